"""Measures how good and how diverse a model is on held-out problems: samples k answers to each and
scores them by the first reward function.

    python evaluate.py config/countdown_tiny.py --model=runs/demo/maxent/seed_1/step_000200
    torchrun --standalone --nproc_per_node 8 evaluate.py config/math_maxent.py --model=...
    python evaluate.py config/countdown_tiny.py --model=... --seeds=3 --output=eval.jsonl

The model is a checkpoint or any Hugging Face model. Ranks divide the problems among them. --seeds=3
evaluates every problem three times, and --output names a file for one line per problem and seed.

mean@k      share of correct answers
pass@k      share of problems with a correct answer among k
distinct@k  number of different correct answers (modes) among k
coverage@k  distinct@k / number of all correct answers that the problem has
"""

from checks import FLAGS, INSTEAD
from common import load_with_flags, script

# Read the config before the other imports: they take ten seconds, and a wrong config is reported
# at once.
if __name__ == "__main__":
    own, config = script(lambda argv: load_with_flags(argv, FLAGS["evaluate"], INSTEAD["evaluate"]))

import json
import math
import os
import shlex
import subprocess
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import rewards
import rollout
import scoring
from common import CHOSEN_WAITING, UserError, check_writable, say_on_rank_0
from journal import is_evaluation, read_metrics
from preflight import checked_eval_rows, deciding_functions, load_checked_files
from prompts import answers_hash, leakage_warning, prompts_hash
from ranks import World, check_alike, gather_objects, leave_together, start_distributed

# environment variables that torchrun sets for its ranks, beside TORCHELASTIC_*
OF_TORCHRUN = {
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}


class Exam(NamedTuple):
    """What this file and generate.py need: a sampler, the problems, and what scores answers."""

    sampler: object  # the rollout engine, a rollout.Engine
    tokenizer: object
    stop_ids: list[int]  # the tokens that end a completion
    rows: list[dict]  # the problems of all ranks
    # from the rows of all ranks: under "auto" every rank must have the same functions
    functions: list[scoring.RewardFunction]


def sample_and_measure(exam: Exam, rows: list[dict], n: int, sampling, c: dict) -> tuple:
    """(n rollouts of each of these rows of the exam, their values (p, n, F), records of failures).
    Workers score a group while the others are still being sampled."""

    def group_done(i: int, group: list[dict]) -> None:
        scoring.begin(group, rows[i], exam.functions, c)

    prompts = [row["prompt_ids"] for row in rows]
    rollouts = rollout.generate(exam.sampler, exam.tokenizer, prompts, n, sampling, group_done)
    values, failed = scoring.measure(rollouts, rows, exam.functions, c)
    return rollouts, values, failed


def evaluate_problems(exam: Exam, c: dict, world: World, seed: int = 0) -> list[dict]:
    """A record {"id", "seed", "samples", "correct", "failures", "distinct", "num_modes"} for each
    problem; distinct and num_modes are None if the task has no modes. Sampling seeds depend only on
    the problem's place and `seed`, so that evaluations of different models are paired. All ranks
    call this together, and each samples a share of the problems; records are in the rows' order."""
    k = c["eval_num_generations"]
    places = range(world.rank, len(exam.rows), world.size)
    rows = [exam.rows[i] for i in places]  # this rank's p
    sampling = rollout.Sampling(
        temperature=c["eval_temperature"],
        max_tokens=c["max_completion_length"],
        stop_token_ids=exam.stop_ids,
        # i is the place among all rows, so seeds don't depend on the number of ranks
        seeds=[rollout.prompt_seed("eval", seed, i) for i in places],
    )
    rollouts, values, _ = sample_and_measure(exam, rows, k, sampling, c)  # values (p, k, F)
    failures = values.isinf().any(-1).sum(1).tolist()  # (p,)
    right = scoring.correct(values, exam.functions)  # (p, k) bool
    right_modes = scoring.correct_modes(rollouts, rows, right, c)
    records = []
    for row, (correct, modes), failed in zip(rows, right_modes, failures):
        record = {"id": row["id"], "seed": seed, "samples": k, "correct": correct}
        record["failures"] = failed
        record["distinct"] = None if modes is None else len(modes)
        record["num_modes"] = None if modes is None else row.get("num_modes")
        records.append(record)
    # dealt out one by one, so collected one by one: in the rows' order on any number of ranks
    rounds = zip_longest(*gather_objects(records))
    return [record for found in rounds for record in found if record is not None]


def summarize(records: list[dict], k: int) -> dict:
    """{"eval/mean@k", "eval/pass@1", "eval/pass@k", "eval/distinct@k", "eval/coverage@k"}: means
    over the records; distinct over problems whose task tells right answers apart, coverage over
    those with a known number of right answers. "eval/reward_failures", if there are any, is the
    number of answers on which a reward failed; they count as wrong."""
    mean = fmean(record["correct"] / k for record in records)
    metrics = {
        f"eval/mean@{k}": mean,
        f"eval/pass@{k}": fmean(record["correct"] > 0 for record in records),
        "eval/pass@1": mean,  # the share of right samples is also its unbiased estimate
    }
    distinct = [record["distinct"] for record in records if record["distinct"] is not None]
    if distinct:
        metrics[f"eval/distinct@{k}"] = fmean(distinct)
    # None or 0: the number of correct answers is unknown
    countable = [record for record in records if record["num_modes"]]
    if countable:
        shares = [record["distinct"] / record["num_modes"] for record in countable]
        metrics[f"eval/coverage@{k}"] = fmean(shares)
    failures = sum(record["failures"] for record in records)
    if failures:  # only then, so that the key is noticed
        metrics["eval/reward_failures"] = failures
    return metrics


def evaluate(sampler, inputs, c: dict, world: World) -> list[dict]:
    """evaluate_problems() of all held-out rows of a run. inputs: preflight.Inputs."""
    rows = inputs.eval_rows
    exam = Exam(sampler, inputs.tokenizer, inputs.stop_ids, rows, deciding_functions(rows, c))
    return evaluate_problems(exam, c, world)


def start_command(command: str, checkpoint: Path) -> None:
    """Starts eval_command for a checkpoint, in a shell and a session of its own."""
    # without torchrun's variables: the command is not a rank of this run
    left_out = {*OF_TORCHRUN, CHOSEN_WAITING}
    kept = {}
    for name, value in os.environ.items():
        if name not in left_out and not name.startswith("TORCHELASTIC_"):
            kept[name] = value
    try:
        subprocess.Popen(
            command.replace("{checkpoint}", shlex.quote(str(checkpoint))),
            shell=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # signals to the run's process group must not reach it
            env=kept,
        )
    except OSError as error:  # no memory, or too many processes: no reason to end a training
        print(f"warning: eval_command could not be started: {error}", flush=True)


def print_row(name: str, cells: list[str]) -> None:
    print(" ".join([f"{name:<18}", *(f"{cell:>10}" for cell in cells)]))


def print_evaluations(first: dict, last: dict) -> None:
    """Prints a table of two lines of metrics.jsonl and the change between them. `first` and `last`
    are the same line if there was one evaluation; it is shown once."""
    one = first is last
    print()
    heads = [f"step {first['step']}", f"step {last['step']}", "change"]
    print_row("held-out problems", heads[:1] if one else heads)
    for key, value in first.items():
        # reward_failures may be in only one of them; null stands for NaN or infinity
        if not key.startswith("eval/") or value is None or last.get(key) is None:
            continue
        cells = [f"{value:.3f}", f"{last[key]:.3f}", f"{last[key] - value:+.3f}"]
        print_row(key.removeprefix("eval/"), cells[:1] if one else cells)


def report(folder: Path) -> None:
    """Prints the first and the last evaluation of a run side by side, or the only one, and draws
    curves.png."""
    lines, _ = read_metrics(folder / "metrics.jsonl")
    evals = [line for line in lines if is_evaluation(line)]
    if evals:
        print_evaluations(evals[0], evals[-1])
    print(f"\nmetrics: {folder / 'metrics.jsonl'}")
    if lines:  # the file may have been deleted
        draw_curves(lines, folder / "curves.png")
        print(f"curves:  {folder / 'curves.png'}")


PANELS = {  # panels of curves.png: title -> metrics; "eval/mean@" stands for any k
    "training reward": ("reward",),
    "held-out accuracy": ("eval/mean@", "eval/pass@"),
    "different correct answers": ("eval/distinct@", "eval/coverage@"),
    "entropy per token (nats)": ("entropy",),
    "weights over the group": ("weights/entropy_norm", "weights/incorrect_mass", "tau"),
    "gradient, distance": ("kl", "grad_norm", "sampling/sampling_logp_difference/mean"),
}
# drawn against an axis on the right, in nats per token: beside a gradient's norm they would be flat
ON_THE_RIGHT = ("kl", "sampling/sampling_logp_difference/mean")


def panels_of(lines: list[dict]) -> dict:
    """{title: {metric: (steps, values)}} for the panels for which a run has data. A tau that never
    moves is left out: its line would say nothing, and for most objectives it has no effect."""
    curves = {}  # metric -> [(step, value)]; a metric may be missing in some lines
    for line in lines:
        for name, value in line.items():
            if value is not None and name != "eval/pass@1":  # equals mean@k
                curves.setdefault(name, []).append((line["step"], value))
    if len({tau for _, tau in curves.get("tau", ())}) == 1:
        del curves["tau"]
    panels = {}
    for title, wanted in PANELS.items():
        for name, points in curves.items():
            if name in wanted or name.partition("@")[0] + "@" in wanted:
                panels.setdefault(title, {})[name] = tuple(zip(*points))
    return panels


def running_mean(values) -> list[float]:
    """The exponential moving average with decay 0.9. Each is a weighted mean of the values so far
    (like Adam's with bias correction, so the first is the first value itself)."""
    total = weight = 0.0
    means = []
    for value in values:
        total = 0.9 * total + value
        weight = 0.9 * weight + 1.0
        means.append(total / weight)
    return means


def draw_curves(lines: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot, which would look for a window

    panels = panels_of(lines)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    has_steps = False  # whether a curve is not of evaluations
    for number, (title, curves) in enumerate(panels.items(), start=1):
        draw_panel(figure.add_subplot(rows, columns, number, title=title, xlabel="step"), curves)
        has_steps = has_steps or not all(name.startswith("eval/") for name in curves)
    if has_steps:
        figure.supxlabel("bold: running mean of about 10 steps; faint: single steps", fontsize=8)
    figure.savefig(path, dpi=110)


def draw_panel(axis, curves: dict) -> None:
    """Draws the curves of one panel, {metric: (steps, values)}."""
    right = axis.twinx() if set(ON_THE_RIGHT) & set(curves) else None
    handles = []
    for i, (name, (steps, values)) in enumerate(curves.items()):
        color = f"C{i}"
        side = axis
        label = name.removeprefix("eval/")
        if name in ON_THE_RIGHT:
            side = right
            label = f"{name.removeprefix('sampling/')} (right)"
        if name.startswith("eval/"):
            handles += side.plot(steps, values, marker="o", markersize=3, label=label, color=color)
        else:  # single steps are noisy: draw them faintly, and their running mean
            handles += side.plot(steps, running_mean(values), label=label, color=color)
            side.plot(steps, values, alpha=0.25, linewidth=0.8, color=color)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    if right is not None:
        right.set_ylim(bottom=0)
    (right or axis).legend(handles=handles, fontsize=8)  # the right one is drawn above


def check_output(path: Path) -> None:
    """UserError if --output would replace a file that is not an evaluation."""
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with open(path, encoding="utf-8") as file:
            record = json.loads(file.readline())
        if {"id", "samples", "correct"} <= record.keys():
            return
    except (ValueError, RecursionError, AttributeError):  # not text, not JSON, not an object
        pass
    raise UserError(
        f"--output={str(path)!r} exists and is not an evaluation: name another file or remove it"
    )


def main(c: dict, own: dict = FLAGS["evaluate"]) -> None:
    if own["seeds"] < 1:
        raise UserError(f"--seeds={own['seeds']} must be at least 1")
    output = Path(own["output"])
    unfinished = Path(f"{output}.tmp")  # renamed at the end, so `output` is whole or absent
    if own["output"]:
        # now, not after an hour of sampling
        check_writable("--output", output, folder=False)
        check_writable("--output", unfinished, folder=False)
        check_output(output)
    rewards.check_names(c["reward_funcs"])
    files = load_checked_files(c)
    rows = checked_eval_rows(c, files)
    world = start_distributed()
    hashes = {"hash of the prompts": prompts_hash(rows), "hash of the answers": answers_hash(rows)}
    check_alike(c | own | hashes)
    if warning := leakage_warning(rows, c["model"]):
        say_on_rank_0(warning)
    sampler = rollout.start_sampler(c, world.device)
    exam = Exam(sampler, files.tokenizer, files.stop_ids, rows, deciding_functions(rows, c))
    records = []
    for seed in range(own["seeds"]):
        records += evaluate_problems(exam, c, world, seed)
    metrics = summarize(records, c["eval_num_generations"])
    if world.rank == 0:
        print(json.dumps({"model": c["model"], "problems": len(rows), **metrics}), flush=True)
    if world.rank == 0 and own["output"]:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        # `python -m compare` counts a run with this file as done
        unfinished.rename(output)
    leave_together(exam.sampler)


if __name__ == "__main__":
    script(main, config, own)
