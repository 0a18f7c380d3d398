"""train.py in this process: a run of seconds, without the ten that a process takes to start."""

from types import SimpleNamespace

import train
from common import load_config


def train_here(monkeypatch, model, folder, **flags) -> None:
    """train.main on two prompts x two short completions of transformers; raises what it raises."""
    settings = {
        "model": model,
        "output_dir": folder,
        "dataset": {"name": "countdown", "config": "3"},
        "max_prompt_length": 200,
        "rollout_engine": "hf",
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "reward_workers": 0,
        "save_steps": -1,
    }
    arguments = [f"--{key}={value}" for key, value in (settings | flags).items()]
    # pytest has signals and a process group of its own
    monkeypatch.setattr(train, "Stop", lambda *_: SimpleNamespace(asked=lambda: False))
    monkeypatch.setattr(train, "leave_together", lambda sampler: None)
    train.main(load_config(arguments))
