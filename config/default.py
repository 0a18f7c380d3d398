# Every key the trainer knows, once, with its default. The other files in this folder hold only what
# differs. A file is a list of `key = value` lines with plain literals; nothing is executed.
#
# A number marked (steps) may change during a run: {finished steps: value} is a line through these
# points, flat before the first and after the last: {0: 1.2, 100: 1.0}. A jump is
# {99: 1.2, 100: 1.0}. As a flag: --temperature='{0: 1.2, 100: 1.0}'
#
# A source of rows is a dict; every entry except "name" may be left out:
#   {"name": a task of tasks/, a .jsonl or .parquet file, a folder of save_to_disk, or a dataset id,
#    "config": a variant, "split": "train", "prompt" and "answer": names of these two columns,
#    "more": [further columns that rewards want to see], "task": the task of rows that name none}
# If a column holds dicts, one of their entries can be a column: "reward_model.ground_truth". On the
# command line an entry is set like this: --dataset.name=countdown --dataset.config=tiny

# --- run
output_dir = "runs/default"  # metrics.jsonl, checkpoints, rollouts and the picture go here
overwrite_output_dir = False  # True: delete an earlier run in output_dir
resume_from_checkpoint = ""  # "latest" in output_dir, or the path of a step_* folder; "" fresh run
seed = 42  # for data order, sampling and initialisation

# --- model
model = ""  # Hugging Face id or folder; sft.py also takes "tiny" (built on the spot, no download)
dtype = "auto"  # "float32", "bfloat16"; "auto": bfloat16 on a GPU, float32 on a CPU
lora_rank = 0  # train only adapters of this rank, on all linear layers (alpha = 2 * rank); 0 off
gradient_checkpointing = False  # True: recompute activations in backward: less memory, 30% slower

# --- data
dataset = {}  # source of training prompts; a list of sources, each with a "weight", is a mixture
easy_dataset = {}  # easier prompts to begin with; "share" (steps): their share of a step; {} none
system_prompt = ""  # put before every prompt; "" none
chat_template = ""  # a Jinja template, or a file with one; "": the tokenizer's own
chat_template_kwargs = {}  # variables for the template, such as {"enable_thinking": False}
max_prompt_length = 512  # most tokens of a prompt, chat template included
long_prompts = "error"  # longer ones: "error" stops, "drop" leaves out, "truncate" cuts the start
allow_leakage = False  # True: evaluation prompts may be training prompts too
replay = {}  # repeats prompts: {"size": kept, "fraction": of a step, "ucb": exploration}; {} off
resample_equal_groups = 0  # rounds of replacing groups of equal rewards (dynamic sampling); 0 off

# --- rollouts
rollout_engine = "vllm"  # in this process; "server": over HTTP; "hf": transformers, slow, for tests
prompts_per_step = 32  # P: prompts in a step, over all ranks
num_generations = 8  # G: completions per prompt, which form its group
max_completion_length = 512  # L: most tokens of a completion, EOS included
temperature = 1.0  # (steps) of sampling; the policy's log-probs are taken at the same temperature
max_logp_difference = 0.05  # stop above this mean |sampler - trainer| of log-probs, in nats; -1 off
vllm_options = {}  # arguments of vllm.LLM: gpu_memory_utilization (0.3), tensor_parallel_size, ...
rollout_server = ""  # "http://a:8000,http://b:8000", or "auto": those of slurm/train.sh; "" none
rollout_timeout = 600.0  # seconds to wait for an answer, or for the servers to start; at most 1500
rollout_ahead = 0  # 1: sample the next batch while learning, weights a step older, unchecked; 0 off
weight_sync = "disk"  # to servers: by files in output_dir/weights or a folder named here; or "nccl"

# --- rewards
reward_funcs = ["countdown"]  # in rewards.REWARDS, or "module:function"; "auto": by each row's task
reward_weights = [1.0]  # one per function; a completion is correct if the first function gives >= 1
reward_workers = 2  # processes per rank that run them; 0: in the rank, without limits (to debug)
reward_timeout = 5.0  # seconds for a completion; then it scores 0, and its worker is replaced
reward_memory_gib = 2.0  # GiB that a worker may use on top of what it starts with
max_reward_failures = 0.1  # stop if rewards fail on a larger share of a step's completions; 1 never
soft_overlong_buffer = 128  # soft_overlong falls from 0 to -1 over this many last tokens before L

# --- objective
objective = "maxent"  # a name in checks.OBJECTIVES
scale_rewards = ""  # divisor of advantages: "group", "batch", "mean", "none"; "": the objective's
num_iterations = 1  # optimizer updates per batch of rollouts
epsilon = 0.2  # clips probability ratios below 1 - epsilon; gspo's paper: 3e-4, epsilon_high 4e-4
epsilon_high = -1.0  # clips them above 1 + epsilon_high; dapo's paper: 0.28; -1 same as epsilon
delta = -1.0  # largest ratio at negative advantages (two-sided clip); >= 1 + epsilon_high; -1 off
cispo_epsilon_max = 5.0  # largest ratio in cispo
importance_sampling = "token_truncate"  # corrects where sampler and trainer differ; also
#                   "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric", "none"
importance_sampling_cap = 3.0  # ratios trainer / sampler above it are truncated to it, or masked
beta = 0.0  # weight of the KL to the reference, at first; a tilt in maxent, flow; 0: no reference
kl_loss_type = "k3"  # estimator of that KL: "k3" (forward KL's gradient), "k2" (reverse KL's)
policy_entropy_bonus_coef = 0.0  # rewards completions less certain than others in the group; 0 off
token_entropy_coef = 0.01  # for token_entropy: weight of the policy's entropy, summed as in dr_grpo
seed_grpo_alpha = 1.0  # for seed_grpo: how much advantages shrink when a group's answers differ;
#                        1 halves them where all answers differ
unlikeliness_coef = 0.0  # shrinks rewards above 0, those of the group's likeliest rows most; 0 off
pkpo_k = 4  # (steps) for pkpo: the k of the pass@k that it maximises, at most G
maxent_tau = -1.0  # temperature of the weights w (maxent, xdr) or goals (flow); "inf"; -1: the
#                    bound above which wrong answers win (at it up to half may stay wrong),
#                    1 / ln(vocabulary), for maxent and flow divided by T_q and by the scale of
#                    scores, and by L if scores are sums
maxent_q_temperature = 1.0  # T_q: the target over a group is q = softmax(reward / T_q)
maxent_q_epsilon = 0.0  # the smallest q of a row: a share G * epsilon of q is uniform; 0 off
maxent_score_norm = "length"  # divides summed log-probs: "length", "constant" (L), "sum" (1)
maxent_score_scale = 1.0  # multiplies these scores: how sharply they tell answers apart
maxent_group_weight = "equal"  # a group's weight in the loss; "spread": 4 * variance of its rewards
maxent_loss = "listwise"  # pulls p = softmax(scores) to w; "floored": bad rows' p counts as >= 1/G;
#                    "policy_gradient": advantages G * w - 1; "mle": p is left out, no baseline
maxent_kl = False  # True: add beta * KL to the loss of maxent and flow, besides the tilt
maxent_skip_equal_groups = "all"  # of equal rewards; "wrong": only at the step's lowest; "none"
xdr_utility = "advantage"  # the U in xdr's w: A; "surrogate": A * row's tokens / L (favours length)
xdr_ref_tilt = False  # True: beta tilts xdr's weights, instead of weighing a KL in the loss
xdr_mode_adaptive_tau = False  # True: tau shrinks in groups with several different right answers
mode_entropy_coef = 0.0  # pull to equal likelihood of best rows; not for maxent and flow; 0 off
mode_entropy_score_norm = "sum"  # log-probs to make equal: "sum"; "length": means; "constant": / L

# --- controllers
maxent_target_weight_entropy = -1.0  # (steps) target for the entropy of w, nats; steers tau; -1 off
maxent_target_excess_entropy = -1.0  # (steps) or this: 0 uniform on best rows, 1 on all; -1 off
maxent_tau_lr = 0.03  # change of log tau in a step per unit of error (nat, or share of excess)
maxent_tau_min = 0.01  # bounds of tau under a controller
maxent_tau_max = 1.0  # 1 is high: above checks.tau_limit, 1 / ln(vocabulary), wrong answers win
maxent_tau_warmup_steps = -1  # steps before tau moves; -1: warmup_steps; controller_meta has none
kl_target = 0.0  # KL to the reference, nats per token (meta: of group scores); steers beta; 0 off
kl_horizon = 10.0  # a step multiplies beta by 1 + (relative error) / kl_horizon; 0 off
kl_ctl_step_size = 0.2  # the relative error is clipped to +- this; 0 off
beta_min = 1e-4  # bounds of beta under a controller
beta_max = 10.0  # 0.05 keeps beta from running away if tau begins too large
controller_meta_method = ""  # moves tau and beta together: "analytic", "first_order",
#                              "truncated_backprop"; "" off: the two rules above
controller_meta_optimizer = "sgd"  # for log tau and log beta; "adam": for methods with a gradient
controller_meta_lr = 0.03  # learning rate of log tau and log beta
controller_meta_tau_lr = -1.0  # that of log tau alone; -1: controller_meta_lr
controller_meta_beta_lr = -1.0  # that of log beta alone; -1: controller_meta_lr
controller_meta_beta_grad_clip = 0.0  # the gradient by log beta is clipped to +- this; 0 off
controller_meta_update_interval = 1  # steps from one update to the next
controller_meta_virtual_lr = 1.0  # size of a virtual policy step, stable below 4
controller_meta_truncation_steps = 8  # virtual steps of "truncated_backprop"
controller_meta_use_hessian = True  # False: cheaper; virtual steps take softmax(scores) as constant

# --- InfoSeed: more completions per prompt, each asked with a seed that it should come to show
info_seed_num_seeds = 0  # S: number of seeds, such as 4; 0 off
info_seed_prompt_template = "{prompt} (variant {seed})"  # without {prompt}: added below the prompt
info_seed_lambda = 0.01  # weight of the auxiliary loss on the seed rows; 0 off
info_seed_loss_type = "infonce"  # contrastive; "ce": by a linear head, trained with the policy
info_seed_temperature = 0.1  # of the cosines in infonce
info_seed_pooling = "mean"  # of hidden states over a completion; "last": that of its last token
info_seed_reward = 0.0  # extra reward per nat that a completion tells about its seed; 0 off

# --- optimizer
max_steps = 100  # batches of rollouts, each with its num_iterations updates
learning_rate = 1e-6  # its highest value, after the warm-up
lr_scheduler_type = "constant"  # after the warm-up; "linear" or "cosine": falls to 0 at max_steps
warmup_steps = 0  # steps of a linear warm-up; 0 off
optimizer = "adamw"  # a name in checks.OPTIMIZERS; "adafactor": moments of rows and columns only
optimizer_options = {}  # its arguments: {"weight_decay": 0.1, "betas": [0.9, 0.95]}; {}: no decay
max_grad_norm = 1.0  # gradients are scaled down to this norm; 0 off
max_tokens_per_micro_batch = 0  # tokens in one forward pass; 0: as many as fit into memory
pack_sequences = True  # no padding, shared prompts computed once; False if attention is not causal
zero_stage = 0  # what DeepSpeed ZeRO shards: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters
offload_optimizer = False  # True: optimizer state in CPU memory (ZeRO 1 to 3)
reference_placement = "device"  # a copy per rank; "sharded": ZeRO-3; "cpu": CPU memory while idle

# --- evaluation
eval_steps = 0  # evaluate every N steps, also before the first and after the last; 0 off
eval_dataset = {}  # a source, by default its split "test"; {}: that split of dataset
eval_max_prompts = 256  # evaluate at most this many rows: the first ones, the same for every seed
eval_num_generations = 8  # k: completions per prompt, for pass@k, mean@k, distinct@k, coverage@k
eval_temperature = 1.0  # of sampling; at least 0.01, nearly greedy

# --- checkpoints and logs
save_steps = 0  # every N steps and at the end; 0: only at the end; -1: never
save_total_limit = 2  # how many of the newest checkpoints to keep; 0 keeps all
keep_every = 0  # checkpoints of every N-th step are kept for good; 0 off
checkpoint_mode = "full"  # each has a Hugging Face model; "shallow": only the last one has
eval_command = ""  # run by a shell after a save: "sbatch slurm/evaluate.sh {checkpoint}"; the path
#                    comes with quotes where it needs them; "" off
push_to_hub = ""  # hub repository for full checkpoints (private), such as "me/math-maxent"; "" off
log_rollouts_steps = 0  # completions of every N-th step go to rollouts/step_N.rank_R.jsonl; 0 off
report_to = ""  # "" metrics.jsonl only; "wandb": Weights & Biases too
wandb_options = {}  # arguments of wandb.init, such as {"project": "maxent-grpo", "mode": "offline"}
