# Countdown as in countdown_tiny.py with both controllers on: tau is moved to hold an excess entropy
# of the weights, beta to hold a distance from the warm start. Two CPU cores, 5 minutes; the warm
# start is that of countdown_tiny.py:
#   torchrun --standalone --nproc_per_node 2 train.py config/countdown_steered.py
model = "runs/countdown_sft"
output_dir = "runs/countdown_steered"
dataset = {"name": "countdown", "config": "tiny"}
max_prompt_length = 32
max_completion_length = 32
prompts_per_step = 32
num_generations = 16
objective = "maxent"
maxent_tau = 0.2
maxent_target_excess_entropy = 0.1  # tau about .19 where a quarter of a group is right
maxent_tau_lr = 0.3
maxent_tau_max = 0.217  # 1 / ln(101 tokens), above which wrong answers win
beta = 0.02
# nats per token; left alone the KL is .09 to .1 after 200 steps. 0.05 is out of reach at this
# learning rate: beta grows until tau + beta flattens the weights, and tau can't make up for that
kl_target = 0.08
learning_rate = 2e-4  # constant, because the targets were measured at a constant rate
warmup_steps = 20
max_steps = 300
max_tokens_per_micro_batch = 8192
dtype = "float32"  # also on a GPU: so small a model costs nothing
max_logp_difference = 0.01  # sampler and trainer use float32
eval_steps = 50
