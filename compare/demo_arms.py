# The arms of `make demo` and `make demo-real`: the baseline, and the method that should improve on
# it.
dr_grpo = {"objective": "dr_grpo"}
maxent = {"objective": "maxent"}
