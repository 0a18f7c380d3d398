"""Our step beside that of TRL's GRPOTrainer, and beside the least that it could cost: one model, prompts, reward, group, lengths; float32, CPU, 2 threads.

    python -m bench                                             everything, an hour and a quarter on two cores; tables, and runs/bench/growth.png
    python -m bench P4G8T64V2048 --against=trl --repeats=5      one comparison
    python -m bench P4G8T64V2048 --arm=ours                     one run of one arm (ours, ours_compiled, trl, trl_vllm, limits), as JSON

First it has tests/test_trl_oracle.py show that both compute the same loss on the same batch. Then every run is a process of its own, in the order A B B A ...;
what is reported is the ratio of neighbours, ours / theirs, median and quartiles: these machines are noisy, ratios less so. A scenario is P prompts a
step, G completions of each, T tokens in each and V tokens in the vocabulary; "tail" ends completions by chance, 64 tokens long on average and T at most. The
model is a Qwen2 of 4 layers and width 128 with random weights. trl generates with transformers, trl_vllm with vLLM in process, which TRL leaves compiled:
beside it ours compiles too (vllm_options.enforce_eager=False); beside trl it runs as it does by default.
"""

import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.arms import limits, memory_so_far, ours, ours_compiled, trl, trl_vllm

STARTED = time.perf_counter()
ROOT = Path(__file__).resolve().parent.parent
COMPARISONS = [
    ("P4G8T64V2048", "trl", 0.0),
    ("P4G8T64V2048", "trl_vllm", 0.0),
    ("P4G8T64V2048", "trl", 0.04),
    ("P4G8T64V2048", "trl_vllm", 0.04),
    ("P4G8T256V2048", "trl", 0.0),
    ("P4G8T64V32768", "trl", 0.0),
    ("P4G8T512V2048tail", "trl", 0.0),
    ("P4G4T64V2048", "trl", 0.0),
    ("P4G16T64V2048", "trl", 0.0),
    ("P4G32T64V2048", "trl", 0.0),
]
LIMITS = ["P4G8T64V2048", "P4G8T256V2048", "P4G8T64V32768"]
GROWTH = {
    "G": [4, 8, 16, 32, 64],
    "P": [2, 4, 8, 16],
    "T": [32, 64, 128, 256],
    "V": [2048, 8192, 32768],
}  # the others as in P4G8T64V2048
GROWTH_STEPS = 5
STEPS, WARM = 8, 3  # steps of a run, and how many of its first do not count
MEASURES = ["step", "learn", "memory", "start"]
ARMS = {
    "ours": ours,
    "ours_compiled": ours_compiled,
    "trl": trl,
    "trl_vllm": trl_vllm,
    "limits": limits,
}


def run_arm(arm: str, scenario: str, beta: float, steps: int) -> None:
    first, times = ARMS[arm](scenario, beta, steps)
    result = {name: statistics.median(one[name] for one in times[WARM:]) for name in times[0]}
    print(
        "\nresult " + json.dumps({"memory": memory_so_far(), "start": first - STARTED} | result),
        flush=True,
    )


def result_of(done: subprocess.CompletedProcess) -> dict | None:
    """What the last "result" line of a run holds; None if the run failed."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    return None if done.returncode or not lines else json.loads(lines[-1].removeprefix("result "))


def measure(arm: str, scenario: str, beta: float = 0.0, steps: int = STEPS) -> dict:
    """One run in a process of its own."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
    } | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench",
            f"--arm={arm}",
            scenario,
            f"--beta={beta}",
            f"--steps={steps}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        env=environment,
    )
    return result_of(done) or sys.exit(
        f"error: {arm} {scenario} ended with {done.returncode}:\n{done.stderr[-2000:]}"
    )


def compare(scenario: str, against: str, beta: float, repeats: int) -> str:
    """One row of the table."""
    mine, pairs = "ours_compiled" if against == "trl_vllm" else "ours", []
    for i in range(repeats):
        order = (mine, against) if i % 2 == 0 else (against, mine)
        pairs.append({arm: measure(arm, scenario, beta) for arm in order})
        print(
            f"{scenario} {i + 1}/{repeats}: "
            + ", ".join(
                f"{arm} {one['step']:.3f} s a step, {one['memory']:.2f} GiB"
                for arm, one in pairs[-1].items()
            ),
            flush=True,
        )
    cells = [scenario, against, f"{beta}"]
    for name in MEASURES:
        ratios = [pair[mine][name] / pair[against][name] for pair in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if repeats > 1 else ratios * 3
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    cells.append(
        " / ".join(
            f"{statistics.median(pair[arm]['step'] for pair in pairs):.2f}"
            for arm in (mine, against)
        )
        + " s"
    )
    cells.append(f"{statistics.median(pair[mine]['rest'] for pair in pairs):.1%}")
    return "| " + " | ".join(cells) + " |"


def slope(sizes: list, values: list) -> float:
    """Of log value over log size, least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def growth(path: Path) -> None:
    """How a step grows with each size while the others stay, drawn and fitted; in the picture, dashed, also a step of TRL's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(GROWTH), figsize=(14, 6), sharex="col")
    print(
        "\n| grows | sizes | slope of a step | of rollouts | of learning | GiB at peak | of it the learner's tensors |",
        "|---" * 7 + "|",
        sep="\n",
    )
    for (name, sizes), (above, below) in zip(GROWTH.items(), axes.T):
        runs, theirs = (
            [
                measure(
                    arm, re.sub(rf"{name}\d+", f"{name}{size}", "P4G8T64V2048"), steps=GROWTH_STEPS
                )
                for size in sizes
            ]
            for arm in ("ours", "trl")
        )
        slopes = [
            slope(sizes, [run[what] for run in runs]) for what in ("step", "rollout", "learn")
        ]
        memory, tensors = ([run[what] for run in runs] for what in ("memory", "learner"))
        cells = [
            name,
            ", ".join(map(str, sizes)),
            *(f"{one:.2f}" for one in slopes),
            *(", ".join(f"{one:.2f}" for one in found) for found in (memory, tensors)),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
        for what in ("step", "rollout", "learn"):
            drawn = above.loglog(sizes, [run[what] for run in runs], "o-", label=what)
            above.loglog(
                sizes,
                [run[what] for run in theirs],
                "o--",
                color=drawn[0].get_color(),
                label=f"{what}, TRL",
            )
        above.set_title(f"{name}: slope of a step {slopes[0]:.2f}")
        above.yaxis.set_major_formatter("{x:g}")
        above.yaxis.set_minor_formatter("")
        below.semilogx(sizes, memory, "ko-", label="process")
        below.semilogx(sizes, [run["memory"] for run in theirs], "ko--", label="process, TRL")
        below.semilogx(sizes, tensors, "o:", label="the learner's tensors")
        below.set_ylim(bottom=0)
        below.set_xlabel(name)
        below.set_xticks(sizes, map(str, sizes))
        below.minorticks_off()
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("GiB at peak")
    axes[0, 0].legend()
    axes[1, 0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")


def main(argv: list[str]) -> None:
    flags = dict(
        flag.removeprefix("--").partition("=")[::2] for flag in argv if flag.startswith("--")
    )
    scenarios, beta, repeats = (
        [name for name in argv if not name.startswith("--")],
        float(flags.get("beta", 0.0)),
        int(flags.get("repeats", 5)),
    )
    if "arm" in flags:
        return run_arm(flags["arm"], scenarios[0], beta, int(flags.get("steps", STEPS)))
    oracle = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/test_trl_oracle.py", "-k", "dr_grpo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    print(
        "the same loss on the same batch (tests/test_trl_oracle.py):",
        oracle.stdout.strip().splitlines()[-1],
        flush=True,
    )
    if oracle.returncode:
        sys.exit(oracle.stdout)
    rows = [
        compare(*one, repeats)
        for one in (
            [(name, flags.get("against", "trl"), beta) for name in scenarios] or COMPARISONS
        )
    ]
    print("\nours / theirs, median (quartiles):\n")
    print(
        "| scenario | against | β | seconds a step | learning phase | peak memory | start to first step | a step | neither learning nor rollouts, ours |",
        "|---" * 9 + "|",
        *rows,
        sep="\n",
        flush=True,
    )
    if scenarios:
        return
    print(
        "\n| scenario | learning / bare forward and backward | vLLM's own time / rollouts |",
        "|---" * 3 + "|",
        sep="\n",
    )
    for scenario in LIMITS:
        found = [measure("limits", scenario, steps=12) for _ in range(repeats)]
        print(
            f"| {scenario} |",
            *(
                f"{statistics.median(one[what] for one in found):.2f} |"
                for what in ("learn / bare", "vllm / rollout")
            ),
            flush=True,
        )
    growth(ROOT / "runs" / "bench" / "growth.png")


if __name__ == "__main__":
    main(sys.argv[1:])
