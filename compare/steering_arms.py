# The arms for the controllers: off, each alone, both, from a wrong start, and the meta-controller.
# The first one is the baseline. Run, in one line:
#   python -m compare config/countdown_steered.py --arms=compare/steering_arms.py --seeds=3
#   --ranks=1 --jobs=2 --max_steps=200 --lr_scheduler_type=constant
# Do they hold their targets: python -m compare.targets runs/compare_countdown_steered
off = {"maxent_target_excess_entropy": -1.0, "kl_target": 0.0}
# other constant taus: does steering reach what none of them does?
off_05 = {"maxent_target_excess_entropy": -1.0, "kl_target": 0.0, "maxent_tau": 0.05}
off_10 = {"maxent_target_excess_entropy": -1.0, "kl_target": 0.0, "maxent_tau": 0.1}
tau_only = {"kl_target": 0.0}
beta_only = {"maxent_target_excess_entropy": -1.0}
both = {}
# a KL target out of reach: beta grows, and with it the weights' temperature, tau + beta
kl_05 = {"kl_target": 0.05}
# the same, and beta is also the weight of a KL in the loss
kl_05_in_loss = {"kl_target": 0.05, "maxent_kl": True}
# starts at ten times too much and too little
tau_large = {"maxent_tau": 2.0, "maxent_tau_max": 10.0}
# beta can't run away from the large tau's KL
tau_large_capped = {"maxent_tau": 2.0, "maxent_tau_max": 10.0, "beta_max": 0.05}
tau_small = {"maxent_tau": 0.02}
beta_large = {"beta": 0.2}
beta_small = {"beta": 0.002}
# the meta-controller. Its targets are for the plain entropy of the weights, which rises with the
# share of right answers, and for the KL over a group, which is ten times smaller than per token
meta_analytic = {
    "controller_meta_method": "analytic",
    "maxent_target_excess_entropy": -1.0,
    "maxent_target_weight_entropy": 1.5,
    "kl_target": 0.01,
    "controller_meta_tau_lr": 0.3,
    "controller_meta_beta_lr": 3.0,
}
meta_first_order = {
    "controller_meta_method": "first_order",
    "controller_meta_optimizer": "adam",
    "maxent_target_excess_entropy": -1.0,
    "maxent_target_weight_entropy": 1.5,
    "kl_target": 0.01,
}
meta_truncated = {
    "controller_meta_method": "truncated_backprop",
    "controller_meta_optimizer": "adam",
    "maxent_target_excess_entropy": -1.0,
    "maxent_target_weight_entropy": 1.5,
    "kl_target": 0.01,
}
