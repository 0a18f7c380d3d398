# The arms of `make demo` and `make demo-real`: the method, and the one that it should improve on.
# The first one is the baseline.
dr_grpo = {"objective": "dr_grpo"}
maxent = {"objective": "maxent"}
