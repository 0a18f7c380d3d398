# Mathematics as in math_maxent.py with a reference: beta is steered to hold a distance from the
# start. Eight GPUs with 80 GB, 4 to 5 hours, at most 34 GiB of each (estimated, not run):
#   torchrun --standalone --nproc_per_node 8 train.py config/math_steered.py
model = "Qwen/Qwen2.5-1.5B-Instruct"
output_dir = "runs/math_steered"
seed = 42
dataset = {"name": "open-r1/OpenR1-Math-220k", "prompt": "problem"}
eval_dataset = {"name": "HuggingFaceH4/MATH-500", "prompt": "problem"}
system_prompt = "Please reason step by step, and put your final answer within \\boxed{}."
long_prompts = "drop"
max_completion_length = 2048
prompts_per_step = 64
num_generations = 16
reward_funcs = ["math"]
learning_rate = 1e-6
warmup_steps = 10
max_steps = 500
max_tokens_per_micro_batch = 32768
gradient_checkpointing = True
zero_stage = 1  # 2 would send the gradients at every micro-batch, to save 2.5 GiB
eval_steps = 25
eval_max_prompts = 500
save_steps = 50
objective = "maxent"
maxent_loss = "floored"  # as in math_maxent.py
# 1 / ln(151,936 tokens), above which wrong answers win. Up to there the weights, with rewards of 0
# and 1, are uniform over the right answers to within 2e-4, so an excess entropy would leave nothing
# to steer tau by
maxent_tau = 0.08
beta = 0.002
kl_target = 0.01  # nats per token
reference_placement = "sharded"
