# Mathematics by Qwen2.5-7B-Instruct with adapters of rank 32 (LoRA). One GPU with 24 GB, 48 GB of
# CPU memory, about 2 minutes a step, 7 hours (estimated; see below for measured memory):
#   torchrun --standalone --nproc_per_node 1 train.py config/math_lora_7b.py
# The policy and vLLM take turns on the GPU: 20.4 GiB while it learns (weights 14.3, libraries 2,
# activations 1.8, logits 1.2, optimizer and gradients 1.1; 18.3 without libraries were measured on
# an H200, with random weights), 20.5 GiB while vLLM samples (19.2 of its own, and the optimizer);
# the policy's frozen weights then wait in CPU memory.
model = "Qwen/Qwen2.5-7B-Instruct"
output_dir = "runs/math_lora_7b"
dtype = "bfloat16"
lora_rank = 32
dataset = {"name": "open-r1/OpenR1-Math-220k", "prompt": "problem"}
eval_dataset = {"name": "HuggingFaceH4/MATH-500", "prompt": "problem"}
system_prompt = "Please reason step by step, and put your final answer within \\boxed{}."
long_prompts = "drop"
max_completion_length = 1024
prompts_per_step = 16
reward_funcs = ["math"]
learning_rate = 1e-5  # ten times the rate for training all weights
warmup_steps = 10
max_steps = 200
max_tokens_per_micro_batch = 4096
gradient_checkpointing = True
vllm_options = {"gpu_memory_utilization": 0.8}  # what 14.3 GiB of weights leave is the cache
eval_steps = 50
eval_max_prompts = 200
save_steps = 50
checkpoint_mode = "shallow"  # only the last has a merged model of 14 GiB
objective = "maxent"
maxent_loss = "floored"  # as in math_maxent.py
maxent_tau = 0.08  # 1 / ln(152,064 tokens): with a flatter target wrong answers win
