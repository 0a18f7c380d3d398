# Countdown (reach a target with three numbers) by a 0.8M-parameter character model: the whole
# method on two CPU cores. 2 minutes, once, then 3 minutes (`make demo` also runs dr_grpo):
#   torchrun --standalone --nproc_per_node 2 sft.py config/countdown_tiny.py \
#     --model=tiny --output_dir=runs/countdown_sft \
#     --steps=800 --batch_size=128 --learning_rate=2e-3
#   torchrun --standalone --nproc_per_node 2 train.py config/countdown_tiny.py
model = "runs/countdown_sft"
output_dir = "runs/countdown_tiny"
dataset = {"name": "countdown", "config": "tiny"}
max_prompt_length = 32
max_completion_length = 32
prompts_per_step = 32
num_generations = 16
objective = "maxent"
maxent_tau = 0.2  # just below 1 / ln(101 tokens) = .217
learning_rate = 2e-4
lr_scheduler_type = "cosine"  # at a constant rate pass@8 falls below its start
warmup_steps = 20
max_steps = 200  # more steps help: with 1,500 mean@8 rises three times as much
max_tokens_per_micro_batch = 8192
dtype = "float32"  # also on a GPU: so small a model costs nothing
max_logp_difference = 0.01  # sampler and trainer use float32: stale weights show
eval_steps = 50
