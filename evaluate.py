"""How good and how diverse a model is on held-out problems: k sampled answers each, scored by the first reward function.

    python evaluate.py config/countdown_tiny.py --model=runs/countdown_tiny/step_000100      a checkpoint or any Hugging Face model
    torchrun --standalone --nproc_per_node 8 evaluate.py config/math_maxent.py --model=...   the problems shared out over ranks
    python evaluate.py config/countdown_tiny.py --model=... --seeds=3 --output=eval.jsonl      three times, a line per problem

mean@k     share of correct answers                           pass@k      share of problems with a correct answer among k
distinct@k different correct answers (modes) among k          coverage@k  those over the number of all correct answers
"""

from checks import FLAGS
from common import load_with_flags, script

# A wrong config is told here, at once: the imports that follow take ten seconds.
if __name__ == "__main__":
    own, config = script(lambda argv: load_with_flags(argv, FLAGS["evaluate"]))

import json
import math
import os
import shlex
import subprocess
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

import rewards
import rollout
import scoring
from common import UserError, check_writable
from journal import read_metrics
from preflight import deciding, load_eval_rows, load_model_files
from ranks import across_ranks, leave_together, start_distributed, start_sampler


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the unbiased estimate from n samples with c correct. Chen et al. 2021, arXiv:2107.03374"""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate_problems(
    sampler,
    tokenizer,
    rows: list[dict],
    stop_ids: list[int],
    c: dict,
    rank: int,
    world: int,
    seed: int = 0,
) -> list[dict]:
    """A record {"id", "seed", "correct", "failures", "distinct", "num_modes"} for each of this rank's problems; distinct and num_modes None where the
    task doesn't know its answers. Sampling seeds depend on problem and `seed` only: evaluations of different models are paired."""
    k, own = c["eval_num_generations"], range(rank, len(rows), world)
    mine = [rows[i] for i in own]
    columns = deciding(rows, c)
    rollouts = rollout.generate(
        sampler,
        tokenizer,
        [r["prompt_ids"] for r in mine],
        k,
        {
            "temperature": c["eval_temperature"],
            "max_tokens": c["max_completion_length"],
            "stop_token_ids": stop_ids,
            "seeds": [rollout.prompt_seed("eval", seed, i) for i in own],
        },
        lambda i, group: scoring.begin(group, mine[i], columns, c),
    )
    values, _ = scoring.measure(rollouts, mine, columns, c)
    failures = values.isinf().any(-1).sum(1).tolist() if mine else []
    found = zip(
        mine, scoring.correct_modes(rollouts, mine, scoring.correct(values, columns), c), failures
    )
    return [
        {
            "id": row["id"],
            "seed": seed,
            "correct": right,
            "failures": failed,
            "distinct": None if modes is None else len(modes),
            "num_modes": None if modes is None else row.get("num_modes"),
        }
        for row, (right, modes), failed in found
    ]


def summarize(records: list[dict], k: int) -> dict:
    """{"eval/mean@k", "eval/pass@1", "eval/pass@k", "eval/distinct@k", "eval/coverage@k"} over the records of all ranks; the last two over
    the problems whose number of answers is known; "eval/reward_failures" where a reward failed, which counts as wrong."""
    sums = torch.zeros(7, dtype=torch.float64)
    for r in records:
        modes = r["num_modes"] or 0
        distinct = r["distinct"] if modes else 0
        sums += torch.tensor(
            [
                1,
                r["correct"] / k,
                pass_at_k(k, r["correct"], k),
                modes > 0,
                distinct,
                distinct / max(1, modes),
                r["failures"],
            ]
        )
    problems, mean, passed, with_modes, distinct, coverage, failures = across_ranks(sums).tolist()
    metrics = {
        f"eval/mean@{k}": mean / problems,
        f"eval/pass@{k}": passed / problems,
        "eval/pass@1": mean / problems,
    }
    if with_modes:
        metrics |= {
            f"eval/distinct@{k}": distinct / with_modes,
            f"eval/coverage@{k}": coverage / with_modes,
        }
    return metrics | ({"eval/reward_failures": failures} if failures else {})


def evaluate(sampler, inputs, c: dict, world) -> dict:
    """The summary over all held-out rows, each rank sampling its share. inputs: preflight.Inputs."""
    records = evaluate_problems(
        sampler, inputs.tokenizer, inputs.eval_rows, inputs.stop_ids, c, world.rank, world.size
    )
    return summarize(records, c["eval_num_generations"])


def start_command(command: str, checkpoint: Path) -> None:
    """Starts eval_command for a checkpoint, in a session of its own. If it can't be started that is a line of the log, not the end of the run."""
    words = [
        word.replace("{checkpoint}", str(checkpoint)) for word in shlex.split(command)
    ]  # checks.py has tried to split it
    ours = (
        "RANK",
        "LOCAL_",
        "WORLD_SIZE",
        "MASTER_",
        "GROUP_",
        "ROLE_",
        "TORCHELASTIC_",
    )  # it is no rank of this run
    try:
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if not k.startswith(ours)},
        )
    except OSError as error:
        print(f"warning: eval_command {words} could not be started: {error}", flush=True)


def report(folder: Path) -> None:
    """Prints the first and the last evaluation of a run side by side and draws its curves into curves.png."""
    lines, _ = read_metrics(folder / "metrics.jsonl")
    evals = [line for line in lines if any(key.startswith("eval/") for key in line)]
    if evals:
        first, last = evals[0], evals[-1]
        print(
            f"\n{'held-out problems':<18} {'step ' + str(first['step']):>10} {'step ' + str(last['step']):>10} {'change':>10}"
        )
        for key in [
            key for key in first if key.startswith("eval/") and key in last
        ]:  # reward_failures: only where there were some
            print(
                f"{key[5:]:<18} {first[key]:>10.3f} {last[key]:>10.3f} {last[key] - first[key]:>+10.3f}"
            )
    draw_curves(lines, folder / "curves.png")
    print(f"\nmetrics: {folder / 'metrics.jsonl'}\ncurves:  {folder / 'curves.png'}")


def draw_curves(lines: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    import matplotlib.pyplot as plt

    panels = {
        "training reward": ("reward",),
        "held-out accuracy": ("eval/mean@", "eval/pass@"),
        "different correct answers": ("eval/distinct@", "eval/coverage@"),
        "entropy per token (nats)": ("entropy",),
        "weights over the group": ("weights/entropy_norm", "weights/incorrect_mass", "tau"),
        "gradient, distance": ("kl", "grad_norm", "sampling/sampling_logp_difference/mean"),
    }
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, (title, wanted) in zip(axes.flat, panels.items()):
        seen = dict.fromkeys(
            key
            for line in lines
            for key, value in line.items()
            if value is not None and key != "eval/pass@1"
        )
        names = [
            key
            for key in seen
            if any(key == w or (w.endswith("@") and key.startswith(w)) for w in wanted)
        ]
        for name in names:
            steps, values = zip(
                *[(line["step"], line[name]) for line in lines if line.get(name) is not None]
            )
            if name.startswith("eval/"):
                axis.plot(steps, values, marker="o", markersize=3, label=name.removeprefix("eval/"))
            else:  # single steps are noisy: faint, under their running mean
                mean = list(accumulate(values, lambda past, value: 0.9 * past + 0.1 * value))
                (line,) = axis.plot(steps, mean, label=name)
                axis.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=0.8)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if names:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(c: dict, own: dict = FLAGS["evaluate"]) -> None:
    if own["seeds"] < 1:
        raise UserError(f"--seeds={own['seeds']} must be at least 1")
    output = Path(own["output"])
    unfinished = Path(f"{output}.tmp")  # so that the file is whole or not there
    if own["output"]:
        check_writable("--output", output, folder=False)
        check_writable("--output", unfinished, folder=False)
    rewards.check_names(c["reward_funcs"])
    _, tokenizer, stop_ids = load_model_files(c["model"], c["chat_template"])
    rows = load_eval_rows(c, tokenizer)
    rank, world, device = start_distributed()
    sampler = start_sampler(c, device)
    records = [
        r
        for seed in range(own["seeds"])
        for r in evaluate_problems(sampler, tokenizer, rows, stop_ids, c, rank, world, seed)
    ]
    metrics, shares = summarize(records, c["eval_num_generations"]), [None] * world
    dist.all_gather_object(shares, records)
    if rank == 0:
        print(json.dumps({"model": c["model"], "problems": len(rows), **metrics}), flush=True)
        if own["output"]:
            output.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(
                "".join(json.dumps(r) + "\n" for share in shares for r in share), encoding="utf-8"
            )
            unfinished.rename(output)
    leave_together(sampler)


if __name__ == "__main__":
    script(main, config, own)
