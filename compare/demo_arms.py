# make demo, make demo-real: the method beside what it is meant to improve on.
# The first one is the baseline.
dr_grpo = {"objective": "dr_grpo"}
maxent = {"objective": "maxent"}
