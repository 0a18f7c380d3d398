# SmolLM2-135M-Instruct, a real pretrained model, learns on two CPU cores to name a number between
# two given ones; 5 to 19 answers are right. It begins with a few favourites: what an objective does
# to these shows in distinct@8. Once (a minute), then both arms of make demo-real (6 to 13
# minutes), or only one of them:
#   python -m bench.smollm2 runs/smollm2
#   OMP_NUM_THREADS=2 python -m compare config/smollm2_between.py --arms=compare/demo_arms.py \
#     --seeds=1 --eval_seeds=1 --ranks=1 --output=runs/demo_smollm2
#   OMP_NUM_THREADS=2 python train.py config/smollm2_between.py
model = "runs/smollm2"
output_dir = "runs/smollm2_between"
dataset = {"name": "between"}
reward_funcs = ["between"]
max_prompt_length = 128  # three examples stand before the question
max_completion_length = 8
prompts_per_step = 8
num_generations = 8
learning_rate = 1e-5
max_steps = 24  # distinct@8 goes on rising up to step 48
dtype = "float32"  # also on a GPU: so small a model costs little
max_logp_difference = 0.01  # sampler and trainer use float32: stale weights show
eval_steps = 12
eval_max_prompts = 128
