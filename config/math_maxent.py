# Mathematics by Qwen2.5-1.5B-Instruct with MaxEnt-GRPO; math_grpo.py is its baseline, equal in all
# but the objective's keys. Eight GPUs with 80 GB, 3 to 4 hours, at most 34 GiB of each
# (estimated, not run):
#   torchrun --standalone --nproc_per_node 8 train.py config/math_maxent.py
model = "Qwen/Qwen2.5-1.5B-Instruct"
output_dir = "runs/math_maxent"
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
# the metric weights/pull says whether this is more than a policy gradient: it was .4 to .5 where
# the plain loss evened out answers of three tokens, and .1 on Countdown; for answers this long
# nothing is known
objective = "maxent"
# with answers of ten tokens the plain loss diverged, this one only where nonsense earned a reward
maxent_loss = "floored"
maxent_tau = 0.08  # 1 / ln(151,936 tokens): with a flatter target wrong answers win
