"""train.py in forked children that have imported it already: runs of seconds, without the ten
that a process takes to start."""

import sys

import child
import exact_matrix

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
    status = child.status(child.start(train_after, patch, arguments, log=log))
    with open(log) as words:
        return status, words.read()


def start(model, folder, *flags, patch=None, ranks: int = 1, modules=()) -> list:
    """The ranks of a run as exact_matrix.start has it, a child each, without torchrun; modules:
    folders of which rewards may import."""
    arguments = ["config/countdown_tiny.py", *exact_matrix.FLAGS]
    arguments += [f"--model={model}", f"--output_dir={folder}", *flags]
    work = (train_after, patch, arguments, *map(str, modules))
    return child.start_ranks(ranks, *work, logs=[f"{folder}.log"] * ranks)


def train_after(patch, arguments: list[str], *modules: str) -> None:
    sys.path[:0] = modules
    if patch:
        patch()
    common.script(train.main, common.load_config(arguments))
