# Countdown with InfoSeed: 4 more completions per prompt, each asked with a seed digit that it comes
# to show. Two CPU cores, after make demo. First a warm start that has seen the digits and reacts to
# them a little, 2 minutes, then 5 minutes:
#   torchrun --standalone --nproc_per_node 2 sft.py config/countdown_infoseed.py \
#     --model=runs/countdown_sft --output_dir=runs/infoseed_sft \
#     --steps=400 --batch_size=128 --learning_rate=1e-3
#   torchrun --standalone --nproc_per_node 2 train.py config/countdown_infoseed.py
# seed/pred_acc, how often the seed can be told from a completion (by chance .25), rises to .37, at
# the same reward as without InfoSeed; with --info_seed_lambda=0 --info_seed_reward=0
# --info_seed_loss_type=infonce it ends at .28, which is what the warm start shows.
model = "runs/infoseed_sft"
output_dir = "runs/countdown_infoseed"
dataset = {"name": "countdown", "config": "tiny"}
max_prompt_length = 32
max_completion_length = 32
prompts_per_step = 24
num_generations = 8
maxent_tau = 0.2  # just below 1 / ln(101 tokens) = .217
info_seed_num_seeds = 4
info_seed_prompt_template = "{prompt}{seed}"  # a digit after the colon disturbs the model least
info_seed_loss_type = "ce"
info_seed_lambda = 0.3
info_seed_reward = 0.3  # at 0.5 or more, seeds matter more than answers: rewards fall to 0
learning_rate = 3e-4
lr_scheduler_type = "linear"
max_steps = 150
max_tokens_per_micro_batch = 8192
dtype = "float32"
max_logp_difference = 0.01
eval_steps = 50
