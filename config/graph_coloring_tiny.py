# Graph colouring (6 vertices, 3 colours, 2 to 8 right answers each) by a 0.8M-parameter character
# model on two CPU cores. 4 minutes, once, then 5 minutes:
#   torchrun --standalone --nproc_per_node 2 sft.py config/graph_coloring_tiny.py \
#     --model=tiny --output_dir=runs/graph_coloring_sft \
#     --steps=800 --batch_size=128 --learning_rate=2e-3
#   torchrun --standalone --nproc_per_node 2 train.py config/graph_coloring_tiny.py
model = "runs/graph_coloring_sft"
output_dir = "runs/graph_coloring_tiny"
dataset = {"name": "graph_coloring", "config": "tiny"}
reward_funcs = ["graph_coloring"]
max_prompt_length = 56
max_completion_length = 10
prompts_per_step = 32
num_generations = 8
maxent_tau = 0.2  # just below 1 / ln(101 tokens) = .217
learning_rate = 2e-4
lr_scheduler_type = "linear"
warmup_steps = 10
max_steps = 250
max_tokens_per_micro_batch = 8192
dtype = "float32"  # also on a GPU: so small a model costs nothing
max_logp_difference = 0.01  # sampler and trainer use float32: stale weights show
eval_steps = 50
