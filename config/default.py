# Every key the trainer knows, once, with its default. The other files in this folder hold differences only.
# A file is a list of `key = value` lines with plain literals; nothing in it is executed.

# --- run
output_dir = "runs/default"  # metrics.jsonl, checkpoints, rollouts and the picture go here
overwrite_output_dir = (
    False  # True: delete an earlier run in output_dir; False: refuse to start on top of it
)
resume_from_checkpoint = (
    ""  # "" fresh run, "latest" newest checkpoint of output_dir, or the path of a step_* folder
)
seed = 42  # data order, sampling, initialisation
dry_run = False  # True: check everything, print what would run, load no weights

# --- model
model = ""  # Hugging Face id or folder; sft.py also takes "tiny" (built on the spot, no download)
dtype = "auto"  # "float32", "bfloat16"; "auto": bfloat16 on a GPU, float32 on a CPU
gradient_checkpointing = (
    False  # True: recompute activations in backward, less memory for about 30% more time
)

# --- data: a task of tasks/, a .jsonl or .parquet file, a folder of save_to_disk, or a Hugging Face dataset id
dataset_name = ""
dataset_config = ""  # variant of the task or of the dataset; "" its default
dataset_split = "train"
dataset_prompt_column = "prompt"  # tasks bring their own prompt and answer
dataset_answer_column = "answer"
dataset_more_columns = []  # other columns of a dataset that rewards want to see, such as ["test_cases"]; a .jsonl file brings all of its own; [] none
dataset_mixture = []  # several, instead of dataset_name: [{"id", "config", "split", "columns", "weight", "task"}, ...]; [] off
system_prompt = ""  # "" none
chat_template = ""  # a Jinja template or a file with one, instead of the tokenizer's own; "" off
max_prompt_length = 512  # tokens, chat template included
long_prompts = "error"  # over max_prompt_length, evaluation too: "error" stops, "drop" leaves out, "truncate" cuts the beginning of the user's message
allow_leakage = False  # True: evaluation prompts may be training prompts too
easy_dataset_name = ""  # a second pool of prompts, to begin with; "" none
easy_dataset_config = ""  # "" its default
easy_schedule = {}  # {first step: share of prompts from the easy pool}, such as {0: 0.5, 100: 0.1, 200: 0.0}
replay_size = 0  # prompts whose rewards are remembered, to come back to the informative ones; 0 off
replay_fraction = 0.25  # share of a step's prompts that come from there
replay_ucb = 0.5  # C of mean gap + C * sqrt(ln n_total / n_prompt): how much to prefer prompts that were hardly tried; 0 off
resample_equal_groups = 0  # groups of equal rewards are replaced by other prompts up to so many times (dynamic sampling); 0 off

# --- rollouts
rollout_engine = "vllm"  # "vllm" in this process, "server" (vLLM servers over HTTP), or "hf" (transformers generate: slow, the oracle)
prompts_per_step = 32  # P, over all ranks
num_generations = 8  # G, completions per prompt: the group
max_completion_length = 512  # L, tokens, EOS included
temperature = 1.0  # of sampling; the policy's log-probs are taken at the same temperature
temperature_schedule = {}  # {first step: temperature} from that step on, such as {0: 1.2, 100: 1.0}; {} off
max_logp_difference = 0.5  # stop when sampler and trainer log-probs differ by more than this on average: a broken sync; -1 off
vllm_gpu_memory_utilization = 0.3  # share of GPU memory for vLLM's weights and KV cache (GPU only)
vllm_kv_cache_gib = 0.25  # KV cache of vLLM on a CPU, GiB
vllm_enforce_eager = "auto"  # "no": vLLM compiles the model as it starts, then generates faster; on a CPU that takes 10 to 20 s and g++. "auto": "yes" on a CPU
vllm_tensor_parallel_size = 1  # ranks that share one vLLM engine
vllm_enable_sleep_mode = True  # GPU only: vLLM gives its memory to the learner between rollouts
rollout_server = (
    ""  # rollout_engine="server": "http://a:8000,http://b:8000", or "auto": those of the launcher
)
rollout_concurrency = 64  # prompts that a rank has under way at a time
rollout_timeout = 600.0  # seconds for one answer, and for the servers to start; at most 1500
rollout_ahead = 0  # 1: while a batch is learnt from, the next one is sampled, with weights that are a step older; 0 off
weight_sync = (
    "disk"  # how weights reach the servers: "disk" (any storage that both see), "nccl" (GPU to GPU)
)
weight_sync_dir = ""  # where they are written, such as /dev/shm/weights if the servers run on this machine; "" output_dir/weights
client_tag = ""  # the beginning of a rank's request ids; "" VLLM_CLIENT_TAG, or rank-<r>-of-<W>

# --- rewards
reward_funcs = [
    "countdown"
]  # names in graders.REWARDS, "module:function", or "auto": the row's task; the first decides what is correct (>= 1)
reward_weights = [1.0]  # one weight per reward function
reward_workers = (
    2  # processes per rank that run them; 0: this process, without any limits (for a debugger)
)
reward_timeout = (
    5.0  # seconds for one completion; then its worker is killed and replaced and it scores 0
)
reward_memory_gib = 2.0  # memory that a worker may take on top of what it starts with, GiB
max_reward_failures = (
    0.1  # stop when more than this share of a step's completions met a timeout or an error; 1 never
)
soft_overlong_buffer = (
    128  # soft_overlong: tokens before max_completion_length over which its penalty grows to 1
)

# --- objective
objective = "maxent"  # a name of OBJECTIVES in checks.py; loss.py has their formulas
scale_rewards = ""  # "group", "batch", "mean", "none"; "" the objective's own (OBJECTIVES in checks.py); maxent has no use for it
num_iterations = 1  # optimizer updates per batch of rollouts
epsilon = 0.2  # clip of the probability ratio, below; gspo's paper has 3e-4, and 4e-4 above
epsilon_high = -1.0  # above; -1 the same as epsilon
delta = (
    -1.0
)  # cap of the unclipped branch for negative advantages, at least 1 + epsilon_high; -1 off
cispo_epsilon_max = 5.0  # cap of cispo's ratio
importance_sampling = "token_truncate"  # sampler mismatch: "token_" or "sequence_" + "truncate" or "mask", "sequence_geometric", "none"
importance_sampling_cap = 3.0  # largest ratio trainer / sampler
beta = 0.0  # weight of the reference model, start value of its controller (alias init_kl_coeff); 0 loads none
kl_loss_type = "k3"  # estimator of beta * KL in the loss: "k3" (gradient of the forward KL), "k2" (of the reverse KL)
policy_entropy_bonus_coef = 0.0  # adds coef * std(r) * z-score of a row's mean token entropy in its group to the reward; 0 off
token_entropy_coef = 0.01  # token_entropy: weight of the policy's entropy, per token like dr_grpo
seed_grpo_alpha = 1.0  # seed_grpo: how much a group's advantages shrink when its answers differ
unlikeliness_coef = 0.0  # a correct answer is worth less the likelier it was in its group: r * (1 - coef * (G - rank) / G); 0 off
pkpo_k = {}  # pkpo: {first step: k of the pass@k that it climbs}; 4 before the first
maxent_tau = (
    0.2  # temperature of the weights w over the group (maxent, xdr), or of flow; "inf" allowed
)
maxent_q_temperature = 1.0  # T_q: the target over the group is softmax(reward / T_q)
maxent_q_epsilon = 0.0  # mixes a uniform share into the target, at most 1 / G; 0 off
maxent_score_norm = "length"  # divisor of sequence scores (maxent, flow): "length", "constant" (L), "sum" (1: divide maxent_tau by the length)
maxent_score_scale = 1.0  # sequence scores are multiplied by it: how sharply they tell answers apart; divide maxent_tau by it
maxent_group_weight = "equal"  # of a group in the loss of maxent and flow: "equal", or "spread", 4 * variance of its rewards
maxent_loss = "listwise"  # "listwise" (cross-entropy to w), "policy_gradient" (w - 1/G as advantage), "mle" (no baseline)
maxent_kl = False  # True: maxent also adds beta * KL to the loss, next to tilting w
maxent_skip_equal_groups = "all"  # groups of equal rewards: "all" are skipped, "wrong" only those at the step's lowest reward, "none"
xdr_utility = "advantage"  # what xdr's weights prefer: "advantage" A, or "surrogate" A * T / L (the paper's; likes length)
xdr_ref_tilt = (
    False  # True: beta tilts xdr's weights towards the reference, instead of a KL in the loss
)
xdr_mode_adaptive_tau = (
    False  # True: xdr's tau shrinks in groups with several different correct answers
)
mode_entropy_coef = (
    0.0  # pull towards equally likely correct answers, policy-gradient objectives only; 0 off
)
mode_entropy_score_norm = "sum"  # what is made equal: "sum" log-probs (favours long answers where they outnumber short ones), or per token: "length", "constant" (L)

# --- controllers
maxent_target_weight_entropy = -1.0  # nats, of w over active groups; steers tau; -1 off
maxent_target_excess_entropy = (
    -1.0
)  # the same for the entropy above that of equally likely best answers, between 0 and 1; -1 off
maxent_target_final = -1.0  # the target moves there in a straight line; -1 it stays
maxent_target_horizon = 0  # over so many steps
maxent_tau_lr = 0.03  # step of log tau per nat of error
maxent_tau_min = 0.01
maxent_tau_max = 1.0  # a bound that keeps the policy is checks.tau_limit, 1 / ln(vocabulary)
maxent_tau_warmup_steps = -1  # tau holds still for so long; -1: the learning-rate warm-up
kl_target = 0.0  # steers beta; 0 off
kl_horizon = 10.0  # steps over which beta answers
kl_ctl_step_size = 0.2  # largest relative error used in one step
beta_min = 1e-4
beta_max = 10.0
controller_meta_enabled = False  # True: one controller moves tau and beta, towards maxent_target_weight_entropy and kl_target (of the group)
controller_meta_method = "analytic"  # "analytic" (residual feedback), "first_order" (gradient, one virtual policy step), "truncated_backprop"
controller_meta_optimizer = "sgd"  # on log tau and log beta: "sgd", "adam" (the gradient methods need it: far from the target theirs is tiny)
controller_meta_lr = 0.03  # step of log tau and log beta per unit of gradient
controller_meta_tau_lr = -1.0  # -1: controller_meta_lr
controller_meta_beta_lr = -1.0  # -1: controller_meta_lr
controller_meta_beta_grad_clip = 0.0  # largest gradient by log beta; 0 off
controller_meta_update_interval = 1  # steps from one update to the next
controller_meta_virtual_lr = 1.0  # size of a virtual step, stable below 4
controller_meta_truncation_steps = 8  # virtual steps of "truncated_backprop"
controller_meta_use_hessian = True  # False: a virtual step's own softmax counts as a constant

# --- InfoSeed
info_seed_enabled = (
    False  # True: S more completions per prompt, each asked with a seed that it should come to show
)
info_seed_num_seeds = 4  # S
info_seed_prompt_template = (
    "{prompt} (variant {seed})"  # must hold {seed}; without {prompt} it is added below the prompt
)
info_seed_lambda = 0.01  # weight of the auxiliary loss on the seed rows; 0 off
info_seed_loss_type = "infonce"  # "infonce" (contrastive), "ce" (a linear head, trained along)
info_seed_temperature = 0.1  # of the cosines in infonce
info_seed_pooling = "mean"  # hidden states of a completion: their "mean", or the "last"
info_seed_reward = 0.0  # reward per nat that a completion tells about its seed; those rows train under their own prompt; 0 off

# --- optimizer
max_steps = 100
learning_rate = 1e-6
lr_scheduler_type = "constant"  # "constant", "linear", "cosine" (both to 0), after the warm-up
warmup_steps = 0  # 0 off
weight_decay = 0.0  # 0 off
adam_beta1 = 0.9
adam_beta2 = 0.999
max_grad_norm = 1.0  # 0 off
max_skipped_steps = 5  # stop after so many non-finite steps in a row
max_tokens_per_micro_batch = 16384  # tokens in one forward pass
pack_sequences = True  # no padding, and the prompt of a group once; False: padded rows, for models whose attention is not plain causal
logprob_chunk_size = (
    1024  # tokens whose vocabulary logits are computed at once (on a CPU at most 128)
)
zero_stage = 0  # DeepSpeed ZeRO: 0 none, 1 optimizer, 2 + gradients, 3 + parameters
offload_optimizer = False  # True: optimizer state in CPU memory (ZeRO 1 to 3)
reference_placement = "device"  # reference model: "device" a full copy per rank, "sharded" ZeRO-3, "cpu" moved in when used

# --- evaluation
eval_steps = 0  # every so many steps, also before the first and after the last; 0 off
eval_dataset_name = ""  # "" the training dataset
eval_dataset_config = ""  # "" the default; for the training dataset its own config
eval_dataset_split = "test"
eval_prompt_column = "prompt"
eval_answer_column = "answer"
eval_max_prompts = 256
eval_num_generations = 8  # k of pass@k, mean@k, distinct@k, coverage@k
eval_temperature = 1.0
eval_seeds = 1  # evaluate.py: how often every problem is sampled, with seeds 0, 1, ...
eval_output = ""  # evaluate.py: a .jsonl file of one line per problem and seed; "" none

# --- generate.py
generate_output = ""  # the .jsonl file to write
generate_max_prompts = 0  # the first so many prompts; 0 all

# --- checkpoints and logs
save_steps = 0  # every N steps and at the end; 0 only at the end, -1 never
save_total_limit = 2  # older checkpoints are deleted; 0 keeps all
keep_every = 0  # every N-th step's checkpoint is kept for good; 0 off
checkpoint_mode = "full"  # "full" also writes a Hugging Face model each time, "shallow" only the last time (checkpoint.py export)
eval_command = ""  # started after every save, such as "sbatch slurm/evaluate.sh {checkpoint}"; nobody waits for it; "" off
trust_checkpoint = False  # True: slurm/evaluate.sh may import rewards that a checkpoint's own config names; loading one runs no code
push_to_hub = ""  # a repository of the Hugging Face hub for full checkpoints, such as "me/math-maxent"; "" off
hub_private_repo = True  # of a repository that push_to_hub makes
log_rollouts_steps = (
    0  # all rollouts of a step to rollouts/step_N.rank_R.jsonl every so many steps; 0 off
)
report_to = ""  # "" metrics.jsonl only, "wandb" also Weights & Biases
wandb_project = "maxent-grpo"
wandb_name = ""  # "" the name of output_dir
wandb_mode = "online"  # "online", "offline"

# --- supervised warm start (sft.py)
sft_steps = 1000
sft_batch_size = 64
sft_learning_rate = 1e-5
