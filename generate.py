"""Completions of a model for every training prompt, with log-probs and rewards, into a .jsonl file:
to distil from, or to look at.

    python generate.py config/countdown_tiny.py --model=runs/demo/maxent/seed_1/step_000300 \\
        --output=out.jsonl
    torchrun --standalone --nproc_per_node 8 generate.py config/math_maxent.py --output=out.jsonl

Ranks share the prompts out; --max_prompts=100 takes the first hundred. num_generations lines a
prompt, prompts in the order of the dataset: {"id", "task", "prompt", "answer", "sample",
"completion", "reward": null where one failed, "rewards": {name: null too where it does not apply},
"finish_reason", "prompt_ids", "completion_ids", "logprobs"}. The same command again goes on where
it was interrupted; OUT.config.json holds the settings that the lines were made with.
"""

from checks import FLAGS
from common import load_with_flags, script

# A wrong config is told here, at once: the imports that follow take ten seconds.
if __name__ == "__main__":
    own, config = script(lambda argv: load_with_flags(argv, FLAGS["generate"]))

import json
import math
import os
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

import data
import rewards
import rollout
import scoring
from common import (
    UserError,
    as_read_back,
    check_writable,
    load_config,
    progress,
    read_settings,
    scheduled,
)
from preflight import check_context, load_model_files
from ranks import leave_together, start_distributed, start_sampler

# where and how the samples are made, not which
FREE = (
    "max_tokens_per_micro_batch",  # nothing is learned here
    "output_dir",
    "reward_workers",
    "rollout_server",
    "rollout_timeout",
    "weight_sync",
)  # may change half-way: the lines stay the same


def check_settings(path: Path, config: dict) -> dict:
    """The settings that decide about the lines of `path`, as they are written beside it. A
    UserError if it, or what lies beside it, was made with others or by another program."""
    beside = Path(f"{path}.config.json")
    settings = as_read_back({key: value for key, value in config.items() if key not in FREE})
    # lexists: a broken link is somebody's too
    found = read_settings(beside) if os.path.lexists(beside) else None
    if not path.exists():
        return settings
    if found is None:
        raise UserError(
            f"--output={str(path)!r} is there, but not {beside.name}, which says how its lines "
            "were made: name another file or remove it"
        )
    # a key that is younger than the file had its default
    made_with = as_read_back(load_config([]) | found)
    for key in settings:
        if made_with.get(key) != settings[key]:
            raise UserError(
                f"--output={str(path)!r} was made with {key}={made_with.get(key)!r}, not "
                f"{settings[key]!r}: name another file or remove it"
            )
    return settings


def finished_prompts(path: Path, config: dict) -> int:
    """How many prompts the file holds whole; what comes after them, part of a group or of a line,
    is cut off. A UserError if its lines were made with other settings."""
    settings = check_settings(path, config)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # before the file itself: lines without their settings would be refused for ever
        Path(f"{path}.config.json").write_text(json.dumps(settings, indent=1))
        path.touch()
    with open(path, "rb") as file:
        # in bytes, as truncate counts; only the last line can lack its end
        lengths = [len(line) for line in file if line.endswith(b"\n")]
    whole = len(lengths) // config["num_generations"] * config["num_generations"]
    # whole groups only: a prompt is sampled again with all of its completions
    os.truncate(path, sum(lengths[:whole]))
    return whole // config["num_generations"]


def lines_of(group: list[dict], row: dict, values, rewards, columns: list) -> list[str]:
    """The JSON lines of one prompt's G rollouts. values (G, F), rewards (G,); a completion on which
    a function failed has none."""
    lines = []
    for i, r in enumerate(group):
        each = {}
        for column, value in zip(columns, values[i].tolist()):
            # NaN and infinity are no JSON; here they mean "not asked" and "failed"
            each[column.name] = value if math.isfinite(value) else None
        line = {
            "id": row["id"],
            "task": row["task"],
            "prompt": row["prompt"],
            "answer": row["answer"],
            "sample": i,
            "completion": r["text"],
            "reward": None if values[i].isinf().any() else rewards[i].item(),
            "rewards": each,
            "finish_reason": r["finish_reason"],
            "prompt_ids": list(r["prompt_ids"]),
            "completion_ids": r["completion_ids"],
            "logprobs": list(r["logprobs"]),
        }
        # default=str: the answers of somebody's dataset may be no JSON, such as dates
        lines.append(json.dumps(line, default=str) + "\n")
    return lines


def batch_lines(sampler, inputs: tuple, places: range, c: dict) -> dict[int, list[str]]:
    """{place: lines} of this rank's prompts of a batch. inputs: (rows, columns, tokenizer, tokens
    that end a completion)."""
    all_rows, columns, tokenizer, stop_ids = inputs
    rows = [all_rows[i] for i in places]  # p
    G = c["num_generations"]

    def group_done(i: int, group: list[dict]) -> None:
        scoring.begin(group, rows[i], columns, c)

    sampling = {
        "temperature": scheduled(c["temperature"], c["max_steps"]),  # as at the end of training
        "max_tokens": c["max_completion_length"],
        "stop_token_ids": stop_ids,
        # by the place in the dataset: an interrupted file goes on to the same lines, also on
        # another number of ranks
        "seeds": [rollout.prompt_seed("generate", c["seed"], i) for i in places],
    }
    prompts = [row["prompt_ids"] for row in rows]
    rollouts = rollout.generate(sampler, tokenizer, prompts, G, sampling, group_done)
    values, failed = scoring.measure(rollouts, rows, columns, c)  # (p, G, F)
    if failed:
        tqdm.write(
            f"warning: {len(failed)} reward(s) failed, their lines have null; the first: "
            f"{scoring.describe_failure(failed[0])}"
        )
    totals, _ = scoring.combine(values, columns)  # (p, G)
    lines = {}
    for n, (i, row) in enumerate(zip(places, rows)):
        group = rollouts[n * G : (n + 1) * G]
        lines[i] = lines_of(group, row, values[n], totals[n], columns)
    return lines


def main(c: dict, own: dict = FLAGS["generate"]) -> None:
    if own["max_prompts"] < 0:
        raise UserError(f"--max_prompts={own['max_prompts']} must be at least 0")
    if not own["output"]:
        raise UserError("--output is empty: name a .jsonl file to write to")
    path = Path(own["output"])
    check_writable("--output", path, folder=False)
    check_settings(path, c)
    rewards.check_names(c["reward_funcs"])
    model_config, tokenizer, stop_ids = load_model_files(c["model"], c["chat_template"])
    check_context(model_config, c)
    rows = data.all_rows(data.training_sources(c, tokenizer)[0])
    # 0: all of them
    rows = rows[: own["max_prompts"] or len(rows)]
    columns = rewards.columns_of(c["reward_funcs"], c["reward_weights"], rows)
    scoring.check_answers(columns, rows, data.names(c), c)

    world = start_distributed()
    # rank 0 alone writes and cuts; the others must not read the file while it does
    shared = [finished_prompts(path, c) if world.rank == 0 else None]
    dist.broadcast_object_list(shared)
    done = min(shared[0], len(rows))
    sampler = start_sampler(c, world.device)
    inputs = (rows, columns, tokenizer, stop_ids)
    P = c["prompts_per_step"]
    bar = progress(total=len(rows), initial=done, disable=world.rank > 0, unit="prompt")
    # shared[0] may exceed len(rows): --max_prompts may have been larger before
    for first in range(shared[0], len(rows), P):
        places = range(first + world.rank, min(first + P, len(rows)), world.size)
        lines = batch_lines(sampler, inputs, places, c)
        shares = [None] * world.size if world.rank == 0 else None
        # all ranks in each batch, those without a prompt too, or the others would wait
        dist.gather_object(lines, shares)
        if world.rank == 0:
            bar.update(write_batch(path, shares))
    bar.close()
    if world.rank == 0:
        print(f"{path}: {len(rows)} prompts x {c['num_generations']}")
    leave_together(sampler)


def write_batch(path: Path, shares: list[dict]) -> int:
    """The lines of a batch of all ranks, in the order of the dataset; how many prompts they are. A
    part of it that a dying process leaves behind is cut off the next time."""
    lines = {}
    for share in shares:
        lines |= share
    with open(path, "a", encoding="utf-8") as file:
        for i in sorted(lines):
            file.writelines(lines[i])
    return len(lines)


if __name__ == "__main__":
    script(main, config, own)
