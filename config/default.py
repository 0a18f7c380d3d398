# Every key the trainer knows, once, with its default. The other files in this folder hold
# differences only. A file is a list of `key = value` lines with plain literals; nothing is
# executed.
#
# A number marked (steps) may change during a run: {finished steps: value} is a line through these,
# flat before the first and after the last: {0: 1.2, 100: 1.0}; a jump is {99: 1.2, 100: 1.0};
# as a flag --temperature='{0: 1.2, 100: 1.0}'.
#
# A source of rows is a dict; all entries but "name" may be left out:
#   {"name": a task of tasks/, a .jsonl or .parquet file, a folder of save_to_disk, or a dataset id,
#    "config": a variant, "split": "train", "prompt" and "answer": names of these two columns,
#    "more": [further columns that rewards want to see], "task": for rows that name none}
# If a column holds dicts, one of their entries can be a column: "reward_model.ground_truth". On the
# command line an entry is set like this: --dataset.name=countdown --dataset.config=tiny

# --- run
output_dir = "runs/default"  # metrics.jsonl, checkpoints, rollouts and the picture go here
overwrite_output_dir = False  # True: delete an earlier run in output_dir
resume_from_checkpoint = ""  # "latest" of output_dir, or the path of a step_* folder; "" fresh run
seed = 42  # data order, sampling, initialisation

# --- model
model = ""  # Hugging Face id or folder; sft.py also takes "tiny" (built on the spot, no download)
dtype = "auto"  # "float32", "bfloat16"; "auto": bfloat16 on a GPU, float32 on a CPU
lora_rank = 0  # train only adapters of this rank, on all linear layers (alpha = 2 * rank); 0 off
gradient_checkpointing = False  # True: recompute activations in backward: less memory, 30% slower

# --- data
dataset = {}  # source of training prompts; a list of sources, each with a "weight", is a mixture
easy_dataset = {}  # easier prompts to begin with; "share" (steps): their part of a step; {} none
system_prompt = ""  # "" none
chat_template = ""  # a Jinja template, or a file with one; "" the tokenizer's own
chat_template_kwargs = {}  # variables for the template, such as {"enable_thinking": False}
max_prompt_length = 512  # tokens, chat template included
long_prompts = "error"  # longer ones: "error" stops, "drop" leaves out, "truncate" cuts the start
allow_leakage = False  # True: evaluation prompts may be training prompts too
replay = {}  # prompts again: {"size": kept, "fraction": of a step, "ucb": exploration}; {} off
resample_equal_groups = 0  # rounds of replacing groups of equal rewards (dynamic sampling); 0 off

# --- rollouts
rollout_engine = "vllm"  # in this process; "server": over HTTP; "hf": transformers, slow, for tests
prompts_per_step = 32  # P, over all ranks
num_generations = 8  # G, completions per prompt: the group
max_completion_length = 512  # L, tokens, EOS included
temperature = 1.0  # (steps) of sampling; log-probs of the policy are taken at the same temperature
max_logp_difference = 0.05  # a mean |sampler - trainer| (nats) above it stops the run; -1 off
vllm_options = {}  # of vllm.LLM: gpu_memory_utilization (0.3 by default), tensor_parallel_size...
rollout_server = ""  # "http://a:8000,http://b:8000", or "auto": those of the launcher; "" none
rollout_timeout = 600.0  # seconds for one answer, and for the servers to start; at most 1500
rollout_ahead = 0  # 1: sample the next batch while learning, weights a step older, unchecked
weight_sync = "disk"  # to servers: by files in output_dir/weights or a folder named here; or "nccl"

# --- rewards
reward_funcs = ["countdown"]  # in rewards.REWARDS, or "module:function"; "auto": by the row's task
reward_weights = [1.0]  # one per function; a completion is correct where the first one gives >= 1
reward_workers = 2  # processes per rank that run them; 0: this process, no limits (for a debugger)
reward_timeout = 5.0  # seconds for one completion; then its worker is replaced and it scores 0
reward_memory_gib = 2.0  # GiB that a worker may take on top of what it starts with
max_reward_failures = 0.1  # stop when more than this share of a step's completions failed; 1 never
soft_overlong_buffer = 128  # for soft_overlong: it falls to -1 over the last so many tokens

# --- objective
objective = "maxent"  # a name in checks.OBJECTIVES
scale_rewards = ""  # divides advantages: "group", "batch", "mean", "none"; "" the objective's own
num_iterations = 1  # optimizer updates per batch of rollouts
epsilon = 0.2  # clips the probability ratio at 1 - epsilon; gspo's paper: 3e-4, epsilon_high 4e-4
epsilon_high = -1.0  # clips it at 1 + epsilon_high; -1 the same as epsilon
delta = -1.0  # cap of the unclipped branch for negative advantages, >= 1 + epsilon_high; -1 off
cispo_epsilon_max = 5.0  # cap of cispo's ratio
importance_sampling = "token_truncate"  # "token_mask", "sequence_truncate/mask/geometric", "none"
importance_sampling_cap = 3.0  # largest ratio trainer / sampler
beta = 0.0  # weight of a KL to the reference, at first; in maxent and flow a tilt; 0 loads none
kl_loss_type = "k3"  # beta * KL in the loss: "k3" (forward KL's gradient), "k2" (reverse KL's)
policy_entropy_bonus_coef = 0.0  # reward for completions less certain than their group; 0 off
token_entropy_coef = 0.01  # for token_entropy: weight of the policy's entropy, summed like dr_grpo
seed_grpo_alpha = 1.0  # for seed_grpo: how much advantages shrink when a group's answers differ
unlikeliness_coef = 0.0  # rewards above 0 shrink the likelier the answer was in its group; 0 off
pkpo_k = 4  # (steps) for pkpo: the k of the pass@k that it maximises, at most G
maxent_tau = -1.0  # temperature of w (maxent, xdr), goals (flow); "inf"; -1: 1 / ln(vocabulary), in
#                    maxent and flow / (T_q * scale of scores), sums also / L: the largest safe one
maxent_q_temperature = 1.0  # T_q: the target over the group is softmax(reward / T_q)
maxent_q_epsilon = 0.0  # the least q of a row: a share G * epsilon of the target is uniform; 0 off
maxent_score_norm = "length"  # divisor of sequence scores: "length", "constant" (L), "sum" (1)
maxent_score_scale = 1.0  # multiplies sequence scores: how sharply they tell answers apart
maxent_group_weight = "equal"  # a group's weight in the loss; "spread": 4 * variance of its rewards
maxent_loss = "listwise"  # pulls p to w; "floored": p of bad rows counts as 1/G at least;
#                           "policy_gradient": G * w - 1 as advantage; "mle": no baseline
maxent_kl = False  # True: maxent and flow also add beta * KL to the loss
maxent_skip_equal_groups = "all"  # those of equal rewards; "wrong": at the step's lowest; "none"
xdr_utility = "advantage"  # U in its w: A; "surrogate": A * row's tokens / L (favours length)
xdr_ref_tilt = False  # True: beta tilts xdr's weights, instead of a KL in the loss
xdr_mode_adaptive_tau = False  # True: tau shrinks in groups with several different right answers
mode_entropy_coef = 0.0  # pull towards equally likely best rows, not for maxent, flow; 0 off
mode_entropy_score_norm = "sum"  # what becomes equal: "sum" log-probs, "length" or "constant" means

# --- controllers
maxent_target_weight_entropy = -1.0  # (steps) target for the entropy of w, nats; steers tau; -1 off
maxent_target_excess_entropy = -1.0  # (steps) or this: 0 uniform over best rows, 1 over all; -1 off
maxent_tau_lr = 0.03  # change of log tau in a step, for an error of 1 (nat, or share of excess)
maxent_tau_min = 0.01  # bounds of tau under a controller
maxent_tau_max = 1.0  # 1 is much: above checks.tau_limit, 1 / ln(vocabulary), wrong answers win
maxent_tau_warmup_steps = -1  # steps before tau moves; -1: warmup_steps; meta does not wait
kl_target = 0.0  # nats per token (meta: of the scores over a group); steers beta; 0 off
kl_horizon = 10.0  # a step changes beta by the share (relative error) / kl_horizon; 0 off
kl_ctl_step_size = 0.2  # largest relative error that counts in a step; 0 off
beta_min = 1e-4  # bounds of beta under a controller
beta_max = 10.0  # 0.05 keeps it from running away where tau begins too large
controller_meta_method = ""  # moves tau and beta together: "analytic", "first_order",
#                              "truncated_backprop"; "" off: the two rules above
controller_meta_optimizer = "sgd"  # on log tau and log beta; "adam": for methods with a gradient
controller_meta_lr = 0.03  # step of log tau and log beta per unit of gradient
controller_meta_tau_lr = -1.0  # that of log tau alone; -1: controller_meta_lr
controller_meta_beta_lr = -1.0  # that of log beta alone; -1: controller_meta_lr
controller_meta_beta_grad_clip = 0.0  # largest gradient by log beta; 0 off
controller_meta_update_interval = 1  # steps from one update to the next
controller_meta_virtual_lr = 1.0  # size of a virtual policy step, stable below 4
controller_meta_truncation_steps = 8  # virtual steps of "truncated_backprop"
controller_meta_use_hessian = True  # False: cheaper; softmax(s) of a virtual step is a constant

# --- InfoSeed: more completions per prompt, each asked with a seed that it should come to show
info_seed_num_seeds = 0  # S, such as 4; 0 off
info_seed_prompt_template = "{prompt} (variant {seed})"  # without {prompt}: added below the prompt
info_seed_lambda = 0.01  # weight of the auxiliary loss on the seed rows; 0 off
info_seed_loss_type = "infonce"  # contrastive; "ce": a linear head, trained with the policy
info_seed_temperature = 0.1  # of the cosines in infonce
info_seed_pooling = "mean"  # of a completion's hidden states; "last": that of its last token
info_seed_reward = 0.0  # per nat that a completion tells about its seed, added to its reward; 0 off

# --- optimizer
max_steps = 100  # batches of rollouts, each with its num_iterations updates
learning_rate = 1e-6  # the highest, after the warm-up
lr_scheduler_type = "constant"  # after the warm-up; "linear", "cosine": down to 0 at max_steps
warmup_steps = 0  # 0 off
optimizer = "adamw"  # a name in checks.OPTIMIZERS, such as "adafactor": moments of rows, columns
optimizer_options = {}  # its arguments: {"weight_decay": 0.1, "betas": [0.9, 0.95]}; {} no decay
max_grad_norm = 1.0  # 0 off
max_tokens_per_micro_batch = 0  # tokens in one forward pass; 0: as many as fit into memory
pack_sequences = True  # no padding, shared prompts once; False for attention that is not causal
zero_stage = 0  # DeepSpeed ZeRO: 0 none, 1 optimizer, 2 + gradients, 3 + parameters
offload_optimizer = False  # True: optimizer state in CPU memory (ZeRO 1 to 3)
reference_placement = "device"  # reference: a copy per rank; "sharded": ZeRO-3; "cpu" while idle

# --- evaluation
eval_steps = 0  # evaluate every so many steps, before the first and after the last; 0 off
eval_dataset = {}  # a source, by default its split "test"; {} that of dataset
eval_max_prompts = 256  # the first of the evaluation's rows, the same for every seed
eval_num_generations = 8  # k of pass@k, mean@k, distinct@k, coverage@k
eval_temperature = 1.0  # at least 0.01, nearly greedy

# --- checkpoints and logs
save_steps = 0  # every N steps and at the end; 0 only at the end, -1 never
save_total_limit = 2  # older checkpoints are deleted; 0 keeps all
keep_every = 0  # every N-th step's checkpoint is kept for good; 0 off
checkpoint_mode = "full"  # with a Hugging Face model each time; "shallow": only the last time
eval_command = ""  # started after a save, such as "sbatch slurm/evaluate.sh {checkpoint}", without
#                    a shell; "" off
push_to_hub = ""  # a hub repository for full checkpoints, made private, "me/math-maxent"; "" off
log_rollouts_steps = 0  # completions of every N-th step go to rollouts/step_N.rank_R.jsonl; 0 off
report_to = ""  # "" metrics.jsonl only; "wandb": Weights & Biases too
wandb_options = {}  # for wandb.init, such as {"project": "maxent-grpo", "mode": "offline"}
