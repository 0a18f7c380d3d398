# SmolLM2-135M-Instruct, a real pretrained model, learns sums of Reasoning Gym on two CPU cores.
# Once (a minute), then 6 to 14 minutes:
#   python -m bench.smollm2 runs/smollm2
#   OMP_NUM_THREADS=2 python train.py config/smollm2_sums.py
model = "runs/smollm2"
output_dir = "runs/smollm2_sums"
# two terms of one or two digits: "85 - 89 ="
dataset = {
    "name": "reasoning_gym",
    "config": {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 2, "size": 2000}},
    "answer": "answer.entry.answer",
}
# Reasoning Gym's own reward wants the number alone, which this model never writes at first
reward_funcs = ["last_number"]
system_prompt = "Answer with the number only."
max_prompt_length = 96
max_completion_length = 12
temperature = 0.7  # at 1.0 so small a model rambles
eval_temperature = 0.7
prompts_per_step = 4
num_generations = 8
learning_rate = 1e-5
max_steps = 48
dtype = "float32"  # also on a GPU: so small a model costs little
max_logp_difference = 0.01  # sampler and trainer use float32: stale weights show
eval_steps = 12
eval_max_prompts = 128
eval_num_generations = 8
objective = "dr_grpo"  # a sum has one right answer; maxent reached as much (one seed)
