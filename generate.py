"""Writes a model's completions of every training prompt, with log-probs and rewards, to a .jsonl
file, to distil from or to look at. Evaluation prompts among the training rows are not left out.

    python generate.py config/countdown_tiny.py --model=runs/demo/maxent/seed_1/step_000200 \\
        --output=out.jsonl
    torchrun --standalone --nproc_per_node 8 generate.py config/math_maxent.py --output=out.jsonl

Ranks divide the prompts among them; --max_prompts=100 takes only the first hundred. The file has
num_generations lines per prompt, with prompts in the order of the dataset: {"id", "task", "prompt",
"answer", "sample", "completion", "reward", "rewards": {name: value}, "finish_reason", "prompt_ids",
"completion_ids", "logprobs"}. A value in "rewards" is null if that function failed or does not
apply; "reward" is null if any function failed. The same command continues an interrupted run.
OUT.config.json holds the settings that the lines were made with.
"""

from checks import FLAGS
from common import load_with_flags, script

# Read the config before the other imports: they take ten seconds, and a wrong config is reported
# at once.
if __name__ == "__main__":
    own, config = script(lambda argv: load_with_flags(argv, FLAGS["generate"]))

import json
import math
import os
from itertools import islice
from pathlib import Path

import torch.distributed as dist

import data
import evaluate
import rewards
import rollout
import scoring
from common import (
    UserError,
    as_read_back,
    check_writable,
    default_config,
    launched_rank,
    print_above_bar,
    progress,
    quoted,
    read_settings,
    scheduled,
)
from journal import hold_folder, write_whole
from preflight import check_prompts, load_checked_files
from prompts import answers_hash, prompts_hash
from ranks import check_alike, leave_together, start_distributed

# keys that may change when an interrupted file is continued: the lines don't depend on them
FREE = (
    "max_tokens_per_micro_batch",  # nothing is learned here
    "output_dir",
    "reward_workers",
    "rollout_server",
    "rollout_timeout",
    "weight_sync",
)


def check_settings(path: Path, config: dict) -> dict:
    """All settings except FREE, in the form of OUT.config.json. UserError if `path` was made with
    other settings or by older weights, or if one of the two files is another program's."""
    beside = Path(f"{path}.config.json")
    settings = as_read_back({key: value for key, value in config.items() if key not in FREE})
    # lexists: a broken link must not be overwritten either
    saved = read_settings(beside) if os.path.lexists(beside) else None
    if not path.exists():
        return settings
    if saved is None:
        raise UserError(
            f"--output={str(path)!r} exists, but {beside.name}, which would say how its lines "
            "were made, does not: name another file or remove it"
        )
    # keys newer than the file had their defaults
    made_with = as_read_back(default_config() | saved)
    for key in settings:
        if made_with.get(key) != settings[key]:
            raise UserError(
                f"--output={str(path)!r} was made with {key}={made_with.get(key)!r}, not "
                f"{settings[key]!r}: name another file or remove it"
            )
    begun = beside.stat().st_mtime  # it is written once, before the first line
    for weights in Path(config["model"]).glob("*.safetensors"):  # none if the model is a hub id
        if weights.stat().st_mtime > begun:
            raise UserError(
                f"{weights} is newer than the first lines of --output={str(path)!r}, so other "
                f"weights may have written these: name another file or remove it (if the weights "
                f"are the same: touch -r {weights} {beside})"
            )
    return settings


def finished_prompts(path: Path, rows: list[dict], config: dict) -> int:
    """The number of prompts of which the file holds all completions. Cuts off what follows them, a
    part of a group or of a line. Makes the file, and its settings, if there is none. UserError,
    before the file is touched, if its lines were made with other settings or from other rows."""
    settings = check_settings(path, config)
    G = config["num_generations"]
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # settings first: a file without them would be refused for ever
        write_whole(Path(f"{path}.config.json"), json.dumps(settings, indent=1))
        path.touch()
    with open(path, "rb") as file:
        # lengths in bytes, for truncate; only the last line can be incomplete
        lengths = [len(line) for line in file if line.endswith(b"\n")]
    check_rows(path, rows[: math.ceil(len(lengths) / G)], G)
    whole = len(lengths) // G * G
    # a prompt whose group is incomplete is sampled again
    os.truncate(path, sum(lengths[:whole]))
    return whole // G


SAMPLED = ("id", "prompt", "answer", "prompt_ids")  # entries of a row that its lines repeat


def check_rows(path: Path, rows: list[dict], G: int) -> None:
    """UserError unless these rows are those of the file's first groups of G lines."""
    with open(path, "rb") as file:  # bytes, because a stranger's file may not be UTF-8
        firsts = islice(file, 0, None, G)  # the first line of each group
        for i, (row, text) in enumerate(zip(rows, firsts)):
            try:
                line = json.loads(text)
                made_of = [line[key] for key in SAMPLED]
            except (ValueError, KeyError, TypeError, RecursionError):  # the file was changed
                made_of = [text]
            asked_for = json.dumps([row[key] for key in SAMPLED], default=str)
            if json.dumps(made_of, default=str) != asked_for:  # as text: NaN is not NaN
                raise UserError(
                    f"--output={str(path)!r} was made from other rows: its prompt {i + 1} is "
                    f"{quoted(made_of[0])}, and that of the dataset is {quoted(row['id'])}, or has "
                    f"another text, answer or chat template (which may write the date): name "
                    f"another file or remove it"
                )


def lines_of(group: list[dict], row: dict, values, totals, functions: list) -> list[str]:
    """The JSON lines of one prompt's G rollouts. values (G, F), totals (G,). The reward is null if
    a function failed on the completion."""
    lines = []
    for i, r in enumerate(group):
        line = {
            "id": row["id"],
            "task": row["task"],
            "prompt": row["prompt"],
            "answer": row["answer"],
            "sample": i,
            "completion": r["text"],
            "reward": None if values[i].isinf().any() else totals[i].item(),
            "rewards": scoring.by_name(functions, values[i]),
            "finish_reason": r["finish_reason"],
            "prompt_ids": list(r["prompt_ids"]),
            "completion_ids": r["completion_ids"],
            "logprobs": list(r["logprobs"]),
        }
        # default=str: answers may be of types that JSON lacks, such as dates
        lines.append(json.dumps(line, default=str) + "\n")
    return lines


def batch_lines(exam: evaluate.Exam, places: range, c: dict) -> dict[int, list[str]]:
    """{place: lines} of this rank's prompts in a batch; a place is an index into the exam's
    rows."""
    rows = [exam.rows[i] for i in places]  # p
    G = c["num_generations"]
    sampling = rollout.Sampling(
        temperature=scheduled(c["temperature"], c["max_steps"]),  # as at the end of training
        max_tokens=c["max_completion_length"],
        stop_token_ids=exam.stop_ids,
        # by the place in the dataset: a continued file gets the same lines, on any number of ranks
        seeds=[rollout.prompt_seed("generate", c["seed"], i) for i in places],
    )
    # values (p, G, F)
    rollouts, values, failed = evaluate.sample_and_measure(exam, rows, G, sampling, c)
    if failed:
        print_above_bar(
            f"warning: {len(failed)} reward(s) failed and are null in the file; the first: "
            f"{scoring.describe_failure(failed[0])}"
        )
    totals, _ = scoring.combine(values, exam.functions)  # (p, G)
    lines = {}
    groups = rollout.groups_of(rollouts, len(rows))
    for n, place in enumerate(places):
        lines[place] = lines_of(groups[n], rows[n], values[n], totals[n], exam.functions)
    return lines


def main(c: dict, own: dict = FLAGS["generate"]) -> None:
    for flag in ("max_prompts", "num_generations"):
        if own[flag] < 0:
            raise UserError(f"--{flag}={own[flag]} must be at least 0")
    if own["num_generations"]:
        c = c | {"num_generations": own["num_generations"]}
    if not own["output"]:
        raise UserError("--output is empty: name a .jsonl file to write to")
    path = Path(own["output"])
    check_writable("--output", path, folder=False)
    # no second process may write lines there. The folder of the lock is removed when this process
    # ends, unless it is killed
    rank = launched_rank()
    with hold_folder(f"{path}.lock", rank, key="output"):
        write(c, own, path)


def write(c: dict, own: dict, path: Path) -> None:
    """Samples the prompts that the file still lacks, and appends their lines."""
    check_settings(path, c)
    rewards.check_names(c["reward_funcs"])
    files = load_checked_files(c)
    rows = data.all_rows(data.training_pools(c, files.tokenizer)[0])
    rows = rows[: own["max_prompts"] or len(rows)]  # 0: all of them
    check_prompts(rows, files)
    functions = rewards.reward_functions(c["reward_funcs"], c["reward_weights"], rows)
    scoring.check_answers(functions, rows, data.source_names(c), c)

    world = start_distributed()
    hashes = {"hash of the prompts": prompts_hash(rows), "hash of the answers": answers_hash(rows)}
    check_alike(c | own | hashes)
    # only rank 0 opens the file, which it may cut; it tells the others the number
    shared = [finished_prompts(path, rows, c) if world.rank == 0 else None]
    dist.broadcast_object_list(shared)
    (done,) = shared  # may exceed len(rows): --max_prompts may have been larger before
    # a complete file needs no engine
    sampler = rollout.start_sampler(c, world.device) if done < len(rows) else None
    exam = evaluate.Exam(sampler, files.tokenizer, files.stop_ids, rows, functions)
    P = c["prompts_per_step"]
    bar = progress(
        total=len(rows), initial=min(done, len(rows)), disable=world.rank > 0, unit="prompt"
    )
    for first in range(done, len(rows), P):
        places = range(first + world.rank, min(first + P, len(rows)), world.size)
        lines = batch_lines(exam, places, c)
        shares = [None] * world.size if world.rank == 0 else None
        # a collective: ranks without a prompt in this batch must take part too
        dist.gather_object(lines, shares)
        if world.rank == 0:
            bar.update(write_batch(path, shares))
    bar.close()
    if world.rank == 0:
        print(f"{path}: {max(done, len(rows))} prompts x {c['num_generations']}")
    leave_together(sampler)


def write_batch(path: Path, shares: list[dict]) -> int:
    """Appends a batch's lines, from all ranks, in the order of the dataset. Returns the number of
    prompts. If the process dies halfway, finished_prompts() cuts off the fragment next time."""
    lines = {}
    for share in shares:
        lines |= share
    with open(path, "a", encoding="utf-8") as file:
        for i in sorted(lines):
            file.writelines(lines[i])
    return len(lines)


if __name__ == "__main__":
    script(main, config, own)
