# SmolLM2-135M-Instruct, a real pretrained model, learns on two CPU cores to name a number of a kind
# between two others. Once, then both arms of make demo-real, or one of them:
#   python -m bench.smollm2 runs/smollm2
#   OMP_NUM_THREADS=2 python -m compare config/smollm2_between.py \
#     --arms=compare/demo_arms.py --seeds=1 --ranks=1 --output=runs/demo_real
#   OMP_NUM_THREADS=2 python train.py config/smollm2_between.py
model = "runs/smollm2"
output_dir = "runs/smollm2_between"
dataset = {"name": "between"}
reward_funcs = ["between"]
max_prompt_length = 64
max_completion_length = 8
prompts_per_step = 8
num_generations = 8
learning_rate = 1e-5
max_steps = 20
max_tokens_per_micro_batch = 2048
dtype = "float32"
max_logp_difference = 0.01  # sampler and trainer in float32: old weights show
vllm_options = {"block_size": 32}  # of 128 no block would be full, and no prompt shared
eval_steps = 20
eval_max_prompts = 128
eval_num_generations = 4
