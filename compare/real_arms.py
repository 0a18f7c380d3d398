# The arms for a pretrained model; the first one is the baseline. Run, in one line:
#   OMP_NUM_THREADS=1 python -m compare config/smollm2_between.py --arms=compare/real_arms.py
#   --seeds=3 --eval_seeds=3 --ranks=1 --jobs=2 --max_steps=48
# or with config/smollm2_sentence.py, --eval_seeds=1 and --eval_steps=16
dr_grpo = {"objective": "dr_grpo"}
dr_grpo_slow = {"objective": "dr_grpo", "learning_rate": 2.5e-6}
maxent = {"objective": "maxent"}
maxrl = {"objective": "maxrl"}
maxrl_slow = {"objective": "maxrl", "learning_rate": 2.5e-6}
# maxent's weights without p, the policy's own share of the group
maxent_pg = {"objective": "maxent", "maxent_loss": "policy_gradient"}
# the same with p sharper or flatter: its scores are multiplied by this
maxent_scale_double = {"objective": "maxent", "maxent_score_scale": 2.0}
maxent_scale_half = {"objective": "maxent", "maxent_score_scale": 0.5}
maxent_scale_quarter = {"objective": "maxent", "maxent_score_scale": 0.25}
# its bfloat16 on a CPU is up to .1 nats a token from the sampler's
maxent_bfloat16 = {"objective": "maxent", "dtype": "bfloat16", "max_logp_difference": 0.2}
# groups whose answers are all right are evened out too
maxent_right_too = {"objective": "maxent", "maxent_skip_equal_groups": "wrong"}
# rows below their group's mean are pushed down at least as hard as by a policy gradient
maxent_floored = {"objective": "maxent", "maxent_loss": "floored"}
# what else might hold an entropy that stays high
maxent_beta = {"objective": "maxent", "beta": 0.1}
maxent_cosine = {"objective": "maxent", "lr_scheduler_type": "cosine"}
# other ways to keep many answers
unlikeliness = {"objective": "dr_grpo", "unlikeliness_coef": 0.25}
token_entropy = {"objective": "token_entropy", "token_entropy_coef": 0.03}
mode_entropy = {"objective": "dr_grpo", "mode_entropy_coef": 0.3}
# among right answers the target is the reference to the power beta / (tau + beta): .89, or .56
floored_reference = {
    "objective": "maxent",
    "maxent_loss": "floored",
    "maxent_tau": 0.01,
    "beta": 0.08,
    "maxent_skip_equal_groups": "wrong",
}
floored_reference_half = {
    "objective": "maxent",
    "maxent_loss": "floored",
    "maxent_tau": 0.04,
    "beta": 0.05,
    "maxent_skip_equal_groups": "wrong",
}
# groups whose answers are all right teach nothing
floored_reference_skipping = {
    "objective": "maxent",
    "maxent_loss": "floored",
    "maxent_tau": 0.01,
    "beta": 0.08,
}
