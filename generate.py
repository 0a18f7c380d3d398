"""Completions of a model for every training prompt, with log-probs and rewards, into a .jsonl file: to distil from, or to look at.

    python generate.py config/countdown_tiny.py --model=runs/countdown_tiny/step_000250 --output=out.jsonl
    torchrun --standalone --nproc_per_node 8 generate.py config/math_maxent.py --output=out.jsonl      the prompts shared out over ranks

num_generations lines a prompt, prompts in the order of the dataset: {"id", "task", "prompt", "answer", "sample", "completion", "reward",
"rewards": {name: value, null where it failed or does not apply}, "finish_reason", "prompt_ids", "completion_ids", "logprobs"}. The same command
again goes on where it was interrupted; OUT.config.json holds the settings that the lines were made with.
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

import data
import rewards
import rollout
import scoring
from common import UserError, check_writable, load_config, progress, read_settings, scheduled
from preflight import load_model_files
from ranks import leave_together, start_distributed, start_sampler

FREE = (
    "output_dir",
    "reward_workers",
    "rollout_server",
    "rollout_timeout",
    "weight_sync",
)  # may change half-way: the lines stay the same


def check_settings(path: Path, config: dict) -> dict:
    """The settings that decide about the lines of `path`, as they are written beside it. A UserError
    if it, or what lies beside it, was made with others or by another program."""
    beside = Path(f"{path}.config.json")
    settings = json.loads(  # as it is read back
        json.dumps({key: value for key, value in config.items() if key not in FREE})
    )
    found = read_settings(beside) if os.path.lexists(beside) else None
    if not path.exists():
        return settings
    if found is None:
        raise UserError(
            f"--output={str(path)!r} is there, but not {beside.name}, which says how its lines were made: name another file or remove it"
        )
    made_with = load_config([]) | found  # a key that is younger than the file had its default
    for key in settings:
        if made_with.get(key) != settings[key]:
            raise UserError(
                f"--output={str(path)!r} was made with {key}={made_with.get(key)!r}, not {settings[key]!r}: name another file or remove it"
            )
    return settings


def finished_prompts(path: Path, config: dict) -> int:
    """How many prompts the file holds whole; what comes after them, part of a group or of a line, is cut off. A UserError if its lines
    were made with other settings."""
    settings = check_settings(path, config)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{path}.config.json").write_text(json.dumps(settings, indent=1))
        path.touch()
    with open(path, "rb") as file:
        lengths = [len(line) for line in file if line.endswith(b"\n")]
    whole = len(lengths) // config["num_generations"] * config["num_generations"]
    os.truncate(path, sum(lengths[:whole]))
    return whole // config["num_generations"]


def lines_of(rollouts: list[dict], row: dict, values, rewards, columns: list) -> list[str]:
    """The JSON lines of one prompt. values (G, F), rewards (G,)."""
    found = []
    for i, r in enumerate(rollouts):
        each = {
            column.name: v if math.isfinite(v) else None
            for column, v in zip(columns, values[i].tolist())
        }
        found.append(
            json.dumps(
                {
                    "id": row["id"],
                    "task": row["task"],
                    "prompt": row["prompt"],
                    "answer": row["answer"],
                    "sample": i,
                    "completion": r["text"],
                    "reward": rewards[i].item(),
                    "rewards": each,
                    "finish_reason": r["finish_reason"],
                    "prompt_ids": list(r["prompt_ids"]),
                    "completion_ids": r["completion_ids"],
                    "logprobs": list(r["logprobs"]),
                },
                default=str,
            )
            + "\n"
        )
    return found


def main(c: dict, own: dict = FLAGS["generate"]) -> None:
    if own["max_prompts"] < 0:
        raise UserError(f"--max_prompts={own['max_prompts']} must be at least 0")
    if not own["output"]:
        raise UserError("--output is empty: name a .jsonl file to write to")
    path = Path(own["output"])
    check_writable("--output", path, folder=False)
    check_settings(path, c)
    rewards.check_names(c["reward_funcs"])
    _, tokenizer, stop_ids = load_model_files(c["model"], c["chat_template"])
    rows = [row for source in data.training_sources(c, tokenizer)[0] for row in source]
    rows = rows[: own["max_prompts"] or len(rows)]
    columns = rewards.columns_of(c["reward_funcs"], c["reward_weights"], rows)
    scoring.check_answers(columns, rows, data.names(c), c)

    rank, world, device = start_distributed()
    shared = [finished_prompts(path, c) if rank == 0 else None]
    dist.broadcast_object_list(shared)
    sampler, G = start_sampler(c, device), c["num_generations"]
    sampling = {
        "temperature": scheduled(c["temperature"], c["max_steps"]),  # as at the end of training
        "max_tokens": c["max_completion_length"],
        "stop_token_ids": stop_ids,
    }
    bar = progress(
        total=len(rows), initial=min(shared[0], len(rows)), disable=rank > 0, unit="prompt"
    )
    for first in range(shared[0], len(rows), c["prompts_per_step"]):
        own = range(first + rank, min(first + c["prompts_per_step"], len(rows)), world)
        mine = [rows[i] for i in own]
        rollouts = rollout.generate(
            sampler,
            tokenizer,
            [row["prompt_ids"] for row in mine],
            G,
            sampling | {"seeds": [rollout.prompt_seed("generate", c["seed"], i) for i in own]},
            lambda i, group, mine=mine: scoring.begin(group, mine[i], columns, c),
        )
        values, _ = scoring.measure(rollouts, mine, columns, c)
        totals, _ = scoring.combine(values, columns)
        own_lines = {
            i: lines_of(rollouts[n * G : (n + 1) * G], row, values[n], totals[n], columns)
            for n, (i, row) in enumerate(zip(own, mine))
        }
        shares = [None] * world if rank == 0 else None
        dist.gather_object(own_lines, shares)
        if rank == 0:  # a part of it that a dying process leaves behind is cut off the next time
            everyone = {i: lines for share in shares for i, lines in share.items()}
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(line for i in sorted(everyone) for line in everyone[i])
            bar.update(len(everyone))
    bar.close()
    if rank == 0:
        print(f"{path}: {len(rows)} prompts x {G}")
    leave_together(sampler)


if __name__ == "__main__":
    script(main, config, own)
