# The arms of python -m compare.toy. Their settings are those of the experiments in docs/results.md.
dr_grpo = {"objective": "dr_grpo"}
unlikeliness = {"objective": "dr_grpo", "unlikeliness_coef": 0.25}
token_entropy = {"objective": "token_entropy", "token_entropy_coef": 0.03}
mode_entropy = {"objective": "dr_grpo", "mode_entropy_coef": 0.3}
maxrl = {"objective": "maxrl"}
pkpo = {"objective": "pkpo", "pkpo_k": 4}
xdr = {"objective": "xdr", "maxent_tau": 0.05}
maxent = {"objective": "maxent"}
floored = {"objective": "maxent", "maxent_loss": "floored"}
flow = {"objective": "flow"}
