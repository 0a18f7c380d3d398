# Countdown with four numbers by Qwen2.5-0.5B-Instruct, xdr with tau = 0.05. One GPU with 40 GB, 1.5
# to 2 hours, at most 26 GiB (estimated, not run):
#   torchrun --standalone --nproc_per_node 1 train.py config/countdown_0.5b.py
model = "Qwen/Qwen2.5-0.5B-Instruct"
output_dir = "runs/countdown_0.5b"
dataset = {"name": "countdown", "config": "4"}
max_prompt_length = 256
max_completion_length = 192
num_generations = 16
objective = "xdr"
maxent_tau = 0.05
learning_rate = 2e-7
max_steps = 1000
max_tokens_per_micro_batch = 8192  # 13 GiB of activations
eval_steps = 50
save_steps = 100
