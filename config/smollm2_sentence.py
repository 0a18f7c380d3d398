# SmolLM2-135M-Instruct, a real pretrained model, learns on two CPU cores to use two given words in
# a short sentence. Once (a minute), then two objectives with three seeds (an hour or two), or one:
#   python -m bench.smollm2 runs/smollm2
#   OMP_NUM_THREADS=2 python -m compare config/smollm2_sentence.py --arms=compare/demo_arms.py \
#     --seeds=3 --eval_seeds=1 --ranks=1
#   OMP_NUM_THREADS=2 python train.py config/smollm2_sentence.py
# --max_steps=48 --maxent_loss=floored gives more right sentences, and more different ones. For
# more than 96 steps add --maxent_tau=0.01 --beta=0.08 --maxent_skip_equal_groups=wrong: no nonsense
model = "runs/smollm2"
output_dir = "runs/smollm2_sentence"
dataset = {"name": "sentence"}
reward_funcs = ["sentence"]
max_prompt_length = 64
max_completion_length = 24
temperature = 0.7  # at 1.0 so small a model rambles
eval_temperature = 0.7
prompts_per_step = 4
num_generations = 8
learning_rate = 1e-5
max_steps = 16
dtype = "float32"  # also on a GPU: so small a model costs little
max_logp_difference = 0.01  # sampler and trainer use float32: stale weights show
eval_steps = 8
eval_max_prompts = 128
eval_num_generations = 4
