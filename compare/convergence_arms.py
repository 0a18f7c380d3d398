# The arms of the long comparison, trained until mean@8 stops rising. The first one is the baseline.
# Run, in one line:
#   python -m compare config/countdown_tiny.py --arms=compare/convergence_arms.py --seeds=3
#   --ranks=1 --jobs=2 --learning_rate=2e-4 --lr_scheduler_type=constant --warmup_steps=20
#   --max_steps=1500 --patience=300 --eval_steps=50
dr_grpo = {"objective": "dr_grpo"}
dr_grpo_slow = {"objective": "dr_grpo", "learning_rate": 5e-5}
# flow divides by a row's length and dr_grpo does not; this is dr_grpo divided by it too
dr_grpo_rowmean = {"objective": "grpo", "scale_rewards": "none"}
grpo = {"objective": "grpo"}
dapo = {"objective": "dapo"}
# with one update per batch nothing is clipped
dapo_high = {"objective": "dapo", "epsilon_high": 0.28, "num_iterations": 2}
maxrl = {"objective": "maxrl"}
maxrl_half = {"objective": "maxrl", "learning_rate": 1e-4}
# the controls of maxent_cosine
maxrl_cosine = {"objective": "maxrl", "lr_scheduler_type": "cosine", "warmup_steps": 100}
dr_grpo_cosine = {"objective": "dr_grpo", "lr_scheduler_type": "cosine", "warmup_steps": 100}
pkpo_2 = {"objective": "pkpo", "pkpo_k": 2}
pkpo_anneal = {"objective": "pkpo", "pkpo_k": {0: 8, 300: 4, 600: 2, 900: 1}}
flow_20 = {"objective": "flow", "maxent_tau": 0.2}
flow_10 = {"objective": "flow", "maxent_tau": 0.1}
flow_05 = {"objective": "flow", "maxent_tau": 0.05}
# above the bound of tau, 1 / ln(101 tokens) = .217
flow_50 = {"objective": "flow", "maxent_tau": 0.5}
flow_100 = {"objective": "flow", "maxent_tau": 1.0}
# the scores of whole answers: about eight times those per token
flow_sum_02 = {"objective": "flow", "maxent_score_norm": "sum", "maxent_tau": 0.02}
# at their own bound
flow_sum_007 = {"objective": "flow", "maxent_score_norm": "sum", "maxent_tau": 0.0068}
unlikely_25 = {"objective": "dr_grpo", "unlikeliness_coef": 0.25}
maxent_10 = {"objective": "maxent", "maxent_tau": 0.1}
maxent_20 = {"objective": "maxent", "maxent_tau": 0.2}
maxent_40 = {"objective": "maxent", "maxent_tau": 0.4}
maxent_double = {"objective": "maxent", "maxent_tau": 0.2, "learning_rate": 4e-4}
maxent_half = {"objective": "maxent", "maxent_tau": 0.2, "learning_rate": 1e-4}
maxent_slow = {"objective": "maxent", "maxent_tau": 0.2, "learning_rate": 5e-5}
maxent_scale2 = {"objective": "maxent", "maxent_score_scale": 2.0, "maxent_tau": 0.1}
maxent_scale4 = {"objective": "maxent", "maxent_score_scale": 4.0, "maxent_tau": 0.05}
maxent_scale8 = {"objective": "maxent", "maxent_score_scale": 8.0, "maxent_tau": 0.025}
maxent_soft_half = {
    "objective": "maxent",
    "maxent_score_scale": 0.25,
    "maxent_tau": 0.2,
    "learning_rate": 1e-4,
}
# twice the bound of tau, which the plain loss does not survive
maxent_floored_40 = {"objective": "maxent", "maxent_loss": "floored", "maxent_tau": 0.4}
maxent_floored_40_cosine = {
    "objective": "maxent",
    "maxent_loss": "floored",
    "maxent_tau": 0.4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 100,
}
maxent_spread = {"objective": "maxent", "maxent_group_weight": "spread"}
maxent_cosine = {"objective": "maxent", "lr_scheduler_type": "cosine", "warmup_steps": 100}
# the control: maxent's weighting of groups, without its pull, temperature and scores
maxent_pg_tau0 = {"objective": "maxent", "maxent_loss": "policy_gradient", "maxent_tau": 0.0}
maxent_pg_half = {
    "objective": "maxent",
    "maxent_loss": "policy_gradient",
    "maxent_tau": 0.2,
    "learning_rate": 1e-4,
}
xdr_05 = {"objective": "xdr", "maxent_tau": 0.05}
xdr_05_cosine = {
    "objective": "xdr",
    "maxent_tau": 0.05,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 100,
}
xdr_80 = {"objective": "xdr", "maxent_tau": 0.8}
token_entropy_01 = {"objective": "token_entropy", "token_entropy_coef": 0.01}
token_entropy_03 = {"objective": "token_entropy", "token_entropy_coef": 0.03}
token_entropy_10 = {"objective": "token_entropy", "token_entropy_coef": 0.1}
modes_30_length = {
    "objective": "dr_grpo",
    "mode_entropy_coef": 0.3,
    "mode_entropy_score_norm": "length",
}
