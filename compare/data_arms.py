# What replay, easy prompts first and dynamic sampling do for the steps to a mean@8 of .30; the
# first arm is the baseline. The easy prompts are the training problems with four or more right
# answers:
#   python -c "import json; from tasks.countdown import rows; print(*(json.dumps(row)
#   for row in rows('train', -1, 0, 'tiny') if row['num_modes'] >= 4), sep='\n')" > runs/easy.jsonl
# Run, in one line:
#   python -m compare config/countdown_tiny.py --arms=compare/data_arms.py --seeds=3 --ranks=1
#   --jobs=2 --objective=dr_grpo --learning_rate=5e-5 --lr_scheduler_type=constant
#   --warmup_steps=20 --max_steps=200 --eval_steps=20
uniform = {}
replay_ucb = {"replay": {"size": 1000, "fraction": 0.25, "ucb": 0.5}}
easy_pool = {"easy_dataset": {"name": "runs/easy.jsonl", "share": {0: 0.5, 100: 0.0}}}
dynamic_sampling = {"resample_equal_groups": 2}
