# The arms of an experiment of 120 steps (LOG.md, 2026-11-21); the first one is the baseline.
#   python -m compare config/countdown_tiny.py --arms=compare/arms.py --seeds=3 --ranks=1 --jobs=2
#   --max_steps=120 --eval_steps=20 --learning_rate=2e-4 --lr_scheduler_type=linear
#   --warmup_steps=10
dr_grpo = {"objective": "dr_grpo"}
dr_grpo_slow = {"objective": "dr_grpo", "learning_rate": 5e-5}
dr_grpo_hot = {"objective": "dr_grpo", "temperature": 1.3}
maxent_10 = {"objective": "maxent", "maxent_tau": 0.1}
maxent_20 = {"objective": "maxent", "maxent_tau": 0.2}
maxent_40 = {"objective": "maxent", "maxent_tau": 0.4}
# the control: maxent's weighting of groups, without its pull, temperature and scores
maxent_pg_tau0 = {"objective": "maxent", "maxent_loss": "policy_gradient", "maxent_tau": 0.0}
xdr_05 = {"objective": "xdr", "maxent_tau": 0.05}
xdr_20 = {"objective": "xdr", "maxent_tau": 0.2}
xdr_80 = {"objective": "xdr", "maxent_tau": 0.8}
token_entropy = {"objective": "token_entropy", "token_entropy_coef": 0.03}
modes_03 = {"objective": "dr_grpo", "mode_entropy_coef": 0.03}
modes_10 = {"objective": "dr_grpo", "mode_entropy_coef": 0.1}
modes_30 = {"objective": "dr_grpo", "mode_entropy_coef": 0.3}
modes_100 = {"objective": "dr_grpo", "mode_entropy_coef": 1.0}
modes_300 = {"objective": "dr_grpo", "mode_entropy_coef": 3.0}
modes_30_length = {
    "objective": "dr_grpo",
    "mode_entropy_coef": 0.3,
    "mode_entropy_score_norm": "length",
}
