# Countdown (reach a target with three numbers) by a 0.8M-parameter character model: the whole method on two CPU cores in minutes.
#   python sft.py config/countdown_tiny.py --model=tiny --output_dir=runs/countdown_sft                3 minutes, once
#   torchrun --standalone --nproc_per_node 2 train.py config/countdown_tiny.py                         4 minutes
model = "runs/countdown_sft"
output_dir = "runs/countdown_tiny"
dataset_name = "countdown"
dataset_config = "tiny"
max_prompt_length = 32
max_completion_length = 32
prompts_per_step = 32
num_generations = 16
objective = "maxent"
maxent_tau = 0.2                      # 1 / ln(100 characters)
learning_rate = 1e-4
max_steps = 100
max_tokens_per_micro_batch = 8192
max_logp_difference = 0.001           # float32 on both sides: weights one step old already show
eval_steps = 25
sft_steps = 4000
sft_batch_size = 128
sft_learning_rate = 2e-3
