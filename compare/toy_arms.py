# The arms of python -m compare.toy, which takes three seconds.
dr_grpo = {"objective": "dr_grpo"}
grpo = {"objective": "grpo"}
maxrl = {"objective": "maxrl"}
pkpo = {"objective": "pkpo", "pkpo_k": 4}
xdr = {"objective": "xdr", "maxent_tau": 0.05}
maxent = {"objective": "maxent"}
floored = {"objective": "maxent", "maxent_loss": "floored"}
flow = {"objective": "flow"}
