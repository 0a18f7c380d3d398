# Countdown with InfoSeed: 4 more completions per prompt, each asked with a seed digit, that come to show their seed. Two CPU cores.
#   make demo                                                                       builds the warm start
#   torchrun --standalone --nproc_per_node 2 train.py config/countdown_infoseed.py                                      5 minutes
model = "runs/countdown_sft"
output_dir = "runs/countdown_infoseed"
dataset_name = "countdown"
dataset_config = "tiny"
max_prompt_length = 32
max_completion_length = 32
prompts_per_step = 32
num_generations = 12
info_seed_enabled = True
info_seed_num_seeds = 4
info_seed_prompt_template = "{prompt}{seed}"    # a digit after the colon disturbs the character model least
info_seed_lambda = 0.01
info_seed_reward = 0.3
learning_rate = 3e-4
lr_scheduler_type = "linear"
max_steps = 200
max_tokens_per_micro_batch = 8192
max_logp_difference = 0.001
eval_steps = 50
