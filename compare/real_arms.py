# The arms of make demo-real; the first one is the baseline.
#   python -m compare config/smollm2_between.py --arms=compare/real_arms.py --ranks=1 --seeds=1
dr_grpo = {"objective": "dr_grpo"}
maxent = {"objective": "maxent"}
