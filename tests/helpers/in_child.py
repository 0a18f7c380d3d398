"""train.py in a forked child that has imported it already: a run of seconds, without the ten that a
process takes to start."""

import child

import common
import train


def run(patch, model, folder, **flags) -> tuple[int, str]:
    """(status, words) of train.py on two prompts x four short completions by transformers, after
    patch(), a function of a module. Rewards are computed in its process."""
    settings = {
        "model": model,
        "output_dir": folder,
        "dataset": {"name": "countdown", "config": "3"},
        "max_prompt_length": 200,
        "rollout_engine": "hf",
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "reward_workers": 0,
        "save_steps": -1,
    }
    arguments = [f"--{key}={value}" for key, value in (settings | flags).items()]
    log = f"{folder}.log"
    status = child.status(child.start(patched, patch, arguments, log=log))
    with open(log) as words:
        return status, words.read()


def patched(patch, arguments: list[str]) -> None:
    patch()
    common.script(train.main, common.load_config(arguments))
