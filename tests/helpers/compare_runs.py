"""Folders as runs of python -m compare leave them, made up: nothing is trained."""

import json
from pathlib import Path

import numpy as np
from exact_matrix import ROOT

import checkpoint
from compare import __main__ as compare

TINY = str(ROOT / "config" / "countdown_tiny.py")
K = 8  # eval_num_generations there


def plan(folder: Path, arms: str, *flags, seeds: int = 1) -> tuple[list[dict], list[str]]:
    """The runs of an arms file, and the arguments of python -m compare that mean them."""
    file = folder / "arms.py"
    file.write_text(arms)
    argv = [
        TINY,
        f"--arms={file}",
        f"--seeds={seeds}",
        f"--output={folder / 'out'}",
        f"--model={folder}",
        "--ranks=1",
        "--max_steps=20",
        "--eval_steps=10",
        *flags,
    ]
    return compare.plan_runs(*compare.read_own(argv)), argv


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_checkpoint(run: dict, step: int) -> None:
    """Whole for checkpoint.verify: what a manifest must list is there, whatever is in it."""
    path = run["folder"] / f"step_{step:06d}"
    (path / "engine").mkdir(parents=True)
    for name in (*checkpoint.REQUIRED, "engine/weights"):
        (path / name).write_text("these are the weights")
    (path / "manifest.json").write_text(json.dumps(checkpoint.manifest_of(path)))


def write_run(run: dict, correct=3, modes=True, evaluated=True) -> None:
    """A run that is trained and, if `evaluated`, done: the arm answers `correct` of 8, give or
    take, with half as many modes."""
    run["folder"].mkdir(parents=True, exist_ok=True)
    (run["folder"] / "config.json").write_text(json.dumps(run["config"]))
    measured = {
        f"eval/mean@{K}": correct / K,
        f"eval/pass@{K}": 0.9,
        "eval/pass@1": correct / K,
    }
    if modes:
        measured |= {f"eval/coverage@{K}": 0.5, f"eval/distinct@{K}": 1.5}
    lines = [
        {"step": 0, **measured},
        {"step": 1, "reward": 0.1, "tau": None},
        {"step": 10, **measured},
        {"step": 20, **measured},
    ]
    write_lines(run["folder"] / "metrics.jsonl", lines)
    write_checkpoint(run, 20)
    if evaluated:
        write_evaluation(run, correct, modes)


def write_evaluation(run: dict, correct=3, modes=True) -> None:
    """Six problems under three evaluation seeds, as evaluate.py leaves them."""
    rng = np.random.default_rng([run["seed"], *run["arm"].encode()])
    lines = []
    for i in range(6):
        right = int(np.clip(correct + rng.integers(-2, 3), 0, K))
        for seed in range(3):
            line = {
                "id": f"{i:03d}",
                "seed": seed,
                "samples": K,
                "correct": right,
                "distinct": (right + 1) // 2 if modes else None,
                "num_modes": 8 if modes else None,
            }
            lines.append(line)
    write_lines(run["folder"] / "eval.jsonl", lines)
