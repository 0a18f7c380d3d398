"""Compares our step with that of TRL's GRPOTrainer, and with the least that it could cost. Both
have the same model, prompts, reward, group size and lengths, in float32 on a CPU with 2 threads.

    python -m bench                                             all, 75 minutes on two cores:
                                                                tables, and runs/bench/growth.png
    python -m bench P4G8T64V2048 --against=trl --repeats=5      one comparison
    python -m bench smollm2                                     a real model, see bench/smollm2.py:
                                                                all comparisons and the limits
    python -m bench P4G8T64V2048 --arm=ours                     one run of one arm, as JSON: ours,
                                                                ours_compiled, ours_hf, trl,
                                                                trl_vllm, limits

First tests/test_trl_oracle.py has to show that both compute the same loss on the same batch. Then
every run is a process of its own, in the order A B B A ... The report has the ratios ours / theirs
of neighbouring runs, as median and quartiles: these machines are noisy, ratios less so.

A scenario is P prompts a step, G completions of each, T tokens in each and V tokens in the
vocabulary. With "tail" completions end by chance, after 64 tokens on average and T at most. The
model is a Qwen2 of 4 layers and width 128 with random weights. The scenario smollm2 is
SmolLM2-135M-Instruct with P4, G8, T64 and its V of 49,152, compared with each of TRL's arms.

The command's own flags: --against (trl, trl_vllm or trl_hf), --beta, --repeats, --steps (of a run;
the first WARM do not count), and --arm for a single run. --against says who samples with what:

    trl         TRL with transformers; ours as it is by default, with vLLM
    trl_hf      both with transformers (ours: rollout_engine="hf")
    trl_vllm    both with vLLM in process. TRL leaves it compiled, so ours compiles it too
                (vllm_options.enforce_eager=False). Both have TRL's importance sampling, for which
                TRL makes one more forward

TRL's micro-batches have as many tokens as ours or fewer, because its rows must divide the batch
(smollm2: 300, ours 512). Whatever is not rollout counts as learning.
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

from bench.arms import memory_so_far, ours, ours_compiled, ours_hf
from bench.limits import limits
from bench.processes import run_for
from bench.scenarios import REAL, parts, prepare
from bench.trl_arms import trl, trl_vllm
from common import ROOT, SPINS, RunStopped, UserError, own_flags, script

STARTED = time.perf_counter()  # a run's start counts from here, with the import of torch
ARMS = {
    "ours": ours,
    "ours_compiled": ours_compiled,
    "ours_hf": ours_hf,
    "trl": trl,
    "trl_vllm": trl_vllm,
    "limits": limits,
}
# --against: (an arm of ours, one of TRL's). Neither has vLLM, or only ours has it, in its default
# mode, or both have it in the same mode
PAIRS = {
    "trl_hf": ("ours_hf", "trl"),
    "trl": ("ours", "trl"),
    "trl_vllm": ("ours_compiled", "trl_vllm"),
}
# limit in seconds for a run, far above what it should take: a run that hangs is ended
START_SECONDS = 600
STEP_SECONDS = 300  # a step of SmolLM2 beside two busy processes took 86
WARM = 3  # steps at the beginning of a run that do not count: allocators, caches, compilers
FLAGS = {
    "arm": "",  # empty: comparisons
    "against": "",  # empty: trl; for the real model all
    "beta": 0.0,  # above 0 both keep a reference model
    "repeats": 5,  # pairs of runs in a comparison
    "steps": WARM + 5,  # of one run
}

# scenario, against, beta
COMPARISONS = [
    ("P4G8T64V2048", "trl", 0.0),
    ("P4G8T64V2048", "trl_vllm", 0.0),
    # with a reference model
    ("P4G8T64V2048", "trl", 0.04),
    ("P4G8T64V2048", "trl_vllm", 0.04),
    # longer, a larger vocabulary, uneven lengths (what packing is for)
    ("P4G8T256V2048", "trl", 0.0),
    ("P4G8T64V32768", "trl", 0.0),
    ("P4G8T512V2048tail", "trl", 0.0),
    # larger groups: prompts are shared by more
    ("P4G4T64V2048", "trl", 0.0),
    ("P4G16T64V2048", "trl", 0.0),
    ("P4G32T64V2048", "trl", 0.0),
]
LIMITS = ["P4G8T64V2048", "P4G8T256V2048", "P4G8T64V32768"]

GROWS_FROM = "P4G8T64V2048"
# one size grows while the others stay as in GROWS_FROM
GROWTH = {
    "G": [4, 8, 16, 32, 64],
    "P": [2, 4, 8, 16],
    "T": [32, 64, 128, 256],
    "V": [2048, 8192, 32768],
}
GROWTH_STEPS = WARM + 2  # fewer: there are 32 of these runs


# --- one run


def run_arm(arm: str, scenario: str, beta: float, steps: int) -> None:
    """Prints a line of JSON: medians over the steps that count, GiB, seconds to the first step."""
    first, times = ARMS[arm](scenario, beta, steps)
    result = {"memory": memory_so_far(), "start": first - STARTED}
    for name in times[0]:
        # an arm may report "memory" itself: ours measures before its profiler takes some
        result[name] = statistics.median(step[name] for step in times[WARM:])
    print("\nresult " + json.dumps(result), flush=True)


def result_of(done: subprocess.CompletedProcess) -> dict | None:
    """The content of a run's last "result" line; None if the run failed."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        return None
    # libraries print lines before and after it
    return json.loads(lines[-1].removeprefix("result "))


def run_or_stop(
    command: list[str], limit: int, what: str, env: dict | None = None
) -> subprocess.CompletedProcess:
    """Runs the command by run_for(). RunStopped if it was not done in `limit` seconds."""
    done = run_for(command, limit, env)
    if done.returncode is None:
        raise RunStopped(
            f"{what} was not done after {limit} seconds and was ended: it hangs, or this machine "
            f"is too busy or too small for it"
        )
    return done


def measure(arm: str, scenario: str, beta: float = 0.0, steps: int = FLAGS["steps"]) -> dict:
    """One run in a process of its own. RunStopped if it fails, or is not done in time."""
    # no GPU: TRL's arms are written for the CPU
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = "2"
    # ours waits as on free cores, whatever ran when we started; TRL by libgomp's default, as its
    # users have it
    environment.setdefault("GOMP_SPINCOUNT", str(SPINS))
    if arm.startswith("trl"):
        environment["GOMP_SPINCOUNT"] = "300000"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # set by a launcher around us; a run is alone
        environment.pop(name, None)
    # a process each, so that none inherits another's memory, threads or compiled code
    command = [sys.executable, "-m", "bench", scenario]
    command += [f"--arm={arm}", f"--beta={beta}", f"--steps={steps}"]
    limit = START_SECONDS + STEP_SECONDS * steps
    done = run_or_stop(command, limit, f"{arm} {scenario} of {steps} steps", environment)
    result = result_of(done)
    if result is None:
        print(done.stderr[-2000:], file=sys.stderr)
        raise RunStopped(
            f"{arm} {scenario} ended with status {done.returncode}; its last words are above"
        )
    return result


# --- tables


def row_of(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def print_head(columns: list[str]) -> None:
    print("\n" + row_of(columns), row_of(["---"] * len(columns)), sep="\n", flush=True)


COLUMNS_OF_COMPARISONS = [
    "scenario",
    "ours / TRL's",
    "β",
    "seconds a step",
    "learning phase",
    "peak memory",
    "start to first step",
    "a step",
]


def compare(scenario: str, against: str, beta: float, repeats: int, steps: int) -> str:
    """A row of the table: runs ours and TRL's in turns, and gives their ratios."""
    mine, theirs = PAIRS[against]
    pairs = []
    for i in range(repeats):
        # A B B A: a machine that slows down slows both
        order = (mine, theirs) if i % 2 == 0 else (theirs, mine)
        pair = {arm: measure(arm, scenario, beta, steps) for arm in order}
        pairs.append(pair)
        words = []
        for arm, run in pair.items():
            words.append(
                f"{arm} {run['step']:.3f} s a step, {run['learn']:.3f} s of it learning, "
                f"{run['memory']:.2f} GiB, {run['start']:.1f} s to the first"
            )
        # printed at once, so that an interrupted bench has not been for nothing
        print(f"{scenario} {i + 1}/{repeats}: {'; '.join(words)}", flush=True)

    def median_of(arm: str, name: str) -> float:
        return statistics.median(pair[arm][name] for pair in pairs)

    cells = [scenario, f"{mine} / {theirs}", f"{beta}"]
    for name in ("step", "learn", "memory", "start"):
        cells.append(quartiles([pair[mine][name] / pair[theirs][name] for pair in pairs]))
    cells.append(f"{median_of(mine, 'step'):.2f} / {median_of(theirs, 'step'):.2f} s")
    return row_of(cells)


def quartiles(ratios: list[float]) -> str:
    if len(ratios) == 1:
        ratios = ratios * 2  # quartiles need two
    # inclusive: otherwise the quartiles of two ratios lie outside of them
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def print_limits(scenarios: list[str], repeats: int, steps: int) -> None:
    """Prints how near both halves of a step are to the least that they could cost."""
    # numerator and denominator are of one process, so no neighbouring run is needed
    print_head(["scenario", "learning / bare forward and backward", "vLLM's own time / rollouts"])
    for scenario in scenarios:
        runs = [measure("limits", scenario, steps=steps) for _ in range(repeats)]
        cells = [scenario]
        for name in ("learn / bare", "vllm / rollout"):
            cells.append(f"{statistics.median(run[name] for run in runs):.2f}")
        print(row_of(cells), flush=True)


# --- growth

PHASES = ("step", "rollout", "learn")


def values_of(runs: list[dict], name: str) -> list[float]:
    return [run[name] for run in runs]


def slope(sizes: list, values: list) -> float:
    """The least-squares slope of log value over log size: 1 if the cost is proportional to size."""
    x = [math.log(size) for size in sizes]
    y = [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def measure_growth(arm: str, letter: str) -> list[dict]:
    """Runs once for each size of GROWTH[letter]."""
    runs = []
    for size in GROWTH[letter]:
        scenario = re.sub(rf"{letter}\d+", f"{letter}{size}", GROWS_FROM)
        runs.append(measure(arm, scenario, steps=GROWTH_STEPS))
    return runs


def row_of_growth(letter: str, runs: list[dict]) -> str:
    """A row of the table: the sizes, the slopes of the phases, the memory."""
    sizes = GROWTH[letter]
    cells = [letter, ", ".join(map(str, sizes))]
    for phase in PHASES:
        cells.append(f"{slope(sizes, values_of(runs, phase)):.2f}")
    for name in ("memory", "learner"):
        cells.append(", ".join(f"{gib:.2f}" for gib in values_of(runs, name)))
    return row_of(cells)


def draw_seconds(axis, letter: str, runs: list[dict], theirs: list[dict]) -> None:
    """Both axes logarithmic: a straight line is a power law."""
    sizes = GROWTH[letter]
    for phase in PHASES:
        (line,) = axis.loglog(sizes, values_of(runs, phase), "o-", label=phase)
        color = line.get_color()
        axis.loglog(sizes, values_of(theirs, phase), "o--", color=color, label=f"{phase}, TRL")
    axis.set_title(f"{letter}: slope of a step {slope(sizes, values_of(runs, 'step')):.2f}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")


def draw_memory(axis, letter: str, runs: list[dict], theirs: list[dict]) -> None:
    sizes = GROWTH[letter]
    axis.semilogx(sizes, values_of(runs, "memory"), "ko-", label="process")
    axis.semilogx(sizes, values_of(theirs, "memory"), "ko--", label="process, TRL")
    axis.semilogx(sizes, values_of(runs, "learner"), "o:", label="the learner's tensors")
    axis.set_ylim(bottom=0)  # or a flat line would look like growth
    axis.set_xlabel(letter)
    axis.set_xticks(sizes, map(str, sizes))
    axis.minorticks_off()


def growth(path: Path) -> None:
    """Draws and fits how a step grows with each size while the others stay. The picture also has
    TRL's step, dashed."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a window

    print_head(
        [
            "grows",
            "sizes",
            "slope of a step",
            "of rollouts",
            "of learning",
            "GiB at peak",
            "of it the learner's tensors",
        ]
    )
    # a column for each size: seconds above, memory below
    figure = Figure(figsize=(14, 6))
    axes = figure.subplots(2, len(GROWTH), sharex="col")
    for letter, (above, below) in zip(GROWTH, axes.T):
        # not A B B A as in compare(): a slope is of one arm; TRL's is only for the picture
        runs = measure_growth("ours", letter)
        theirs = measure_growth("trl", letter)
        print(row_of_growth(letter, runs), flush=True)
        draw_seconds(above, letter, runs, theirs)
        draw_memory(below, letter, runs, theirs)
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("GiB at peak")
    axes[0, 0].legend()
    axes[1, 0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")


# --- the command


def read_flags(argv: list[str]) -> tuple[dict, list[str]]:
    """Our flags and the scenarios. UserError for anything else, before anything is loaded."""
    flags, scenarios = own_flags(argv, FLAGS)
    for word in scenarios:
        # a mistyped flag is left over too, but is not a scenario
        if word != REAL and not re.fullmatch(r"P\d+G\d+T\d+V\d+(tail)?", word):
            known = " ".join(f"--{name}=" for name in FLAGS)
            raise UserError(
                f"there is no flag and no scenario {word}: flags are {known}, a scenario is "
                f"written like {GROWS_FROM} or {GROWS_FROM}tail, or is {REAL}"
            )
        size = parts(word)
        if size["P"] > 64 or size["V"] < 96:
            raise UserError(f"{word}: P is at most 64 and V at least 96 in these scenarios")
    if flags["arm"] and flags["arm"] not in ARMS:
        raise UserError(f"there is no --arm={flags['arm']}: arms are {', '.join(ARMS)}")
    if flags["against"] and flags["against"] not in PAIRS:
        raise UserError(f"--against={flags['against']} must be one of {', '.join(PAIRS)}")
    if flags["arm"] and len(scenarios) != 1:
        raise UserError(f"--arm={flags['arm']} needs one scenario, such as {GROWS_FROM}")
    if (flags["against"] or flags["beta"]) and not scenarios:
        raise UserError(f"--against and --beta need a scenario, such as {GROWS_FROM}")
    if flags["repeats"] < 1:
        raise UserError(f"--repeats={flags['repeats']} must be at least 1")
    if flags["steps"] <= WARM:
        raise UserError(
            f"--steps={flags['steps']} must be above {WARM}: the first {WARM} do not count"
        )
    return flags, scenarios


def asked_for(flags: dict, scenarios: list[str]) -> list[tuple]:
    """The comparisons: one for each scenario of the command line; without --against, the real model
    has one for each of PAIRS."""
    chosen = []
    for scenario in scenarios:
        pairs = PAIRS if scenario == REAL else ["trl"]
        if flags["against"]:
            pairs = [flags["against"]]
        for against in pairs:
            chosen.append((scenario, against, flags["beta"]))
    return chosen


def check_same_loss() -> None:
    """Checks that both compute the same loss: otherwise the ratios would mean nothing."""
    test = "tests/test_trl_oracle.py"
    command = [sys.executable, "-m", "pytest", "-q", test, "-k", "dr_grpo"]
    oracle = run_or_stop(command, 900, test)
    if oracle.returncode:
        print(oracle.stdout, file=sys.stderr)
        raise RunStopped("tests/test_trl_oracle.py failed, see above: there is nothing to compare")
    summary = oracle.stdout.strip().splitlines()[-1]
    print(f"the same loss on the same batch (tests/test_trl_oracle.py): {summary}", flush=True)


def main(argv: list[str]) -> None:
    flags, scenarios = read_flags(argv)
    if flags["arm"]:  # we are one of measure()'s processes
        run_arm(flags["arm"], scenarios[0], flags["beta"], flags["steps"])
        return
    check_same_loss()
    if REAL in scenarios:
        prepare(REAL)  # now, because the runs may not ask the hub
    rows = []  # printed together; each run prints a line as it ends
    for scenario, against, beta in asked_for(flags, scenarios) or COMPARISONS:
        rows.append(compare(scenario, against, beta, flags["repeats"], flags["steps"]))
    print("\nours / theirs, median (quartiles):")
    print_head(COLUMNS_OF_COMPARISONS)
    print(*rows, sep="\n", flush=True)
    if REAL in scenarios:
        print_limits([REAL], flags["repeats"], flags["steps"])
    if scenarios:  # the user asked for these only: no growth
        return
    print_limits(LIMITS, flags["repeats"], flags["steps"])
    growth(ROOT / "runs" / "bench" / "growth.png")


if __name__ == "__main__":
    script(main)
