"""Checks whether a GPU does what this project needs, and how fast. Uses random weights and no
network. All checks together should take about ten minutes, as their parts did on an H200.

    python -m bench.gpu                          all checks; make check-gpu does the same
    python -m bench.gpu attention head           these checks only
    python -m bench.gpu --json=runs/gpu.json     where figures go (default runs/check_gpu.json)
    python -m bench.gpu --shape=tiny --device=cpu    shows that the checks themselves run. Figures
                                                 mean nothing; stand-ins replace the kernels

Every check is a process of its own with a time limit, and needs only what it tests. The checks of
kernels (alignment, attention, waits, head) and of the learner (zero0 to speed) run without vLLM;
the check trl needs trl. Exit status: 0 if all is well, 1 if a check failed, 3 if there is no GPU.
"""

import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

from bench.processes import run_for
from common import UserError, check_writable, own_flags, script

NO_GPU = 3  # exit status: a script can tell it from a failed check


class Check(NamedTuple):
    module: str  # of bench, with a function of the check's name that yields Findings
    limit: int  # seconds, far above what it should take; a GPU that hangs is a finding too
    needs: tuple = ()  # packages that it needs
    gpus: int = 1


# in this order, because a failure may explain those after it
CHECKS = {
    # the machine
    "driver": Check("gpu_machine", 60),
    "compiler": Check("gpu_machine", 60),
    "python_h": Check("gpu_machine", 60),
    "nccl": Check("gpu_machine", 90),
    "triton": Check("gpu_machine", 90, ("triton",)),
    "peaks": Check("gpu_machine", 60),
    # kernels of the model
    "alignment": Check("gpu_kernels", 60),
    "attention": Check("gpu_kernels", 120),
    "waits": Check("gpu_kernels", 120),
    "head": Check("gpu_kernels", 180),
    # the learner
    "zero0": Check("gpu_learner", 180, ("deepspeed",)),
    "zero1": Check("gpu_learner", 180, ("deepspeed",)),
    "zero2": Check("gpu_learner", 180, ("deepspeed",)),
    "zero3": Check("gpu_learner", 180, ("deepspeed",)),
    "checkpointing": Check("gpu_learner", 180, ("deepspeed",)),
    "offload": Check("gpu_learner", 180, ("deepspeed",)),
    "lora": Check("gpu_learner", 180, ("deepspeed", "peft")),
    "reference": Check("gpu_learner", 180, ("deepspeed",)),
    "speed": Check("gpu_learner", 300, ("deepspeed",)),
    "trl": Check("gpu_trl", 400, ("deepspeed", "trl")),
    # whole runs, and the engine alone
    "train": Check("gpu_runs", 300, ("deepspeed",)),
    "two_ranks": Check("gpu_runs", 300, ("deepspeed",), gpus=2),
    "engine": Check("gpu_engine", 300, ("vllm",)),
}


# here, not in bench/shapes.py, which needs torch: a mistyped name is reported before torch loads
class Shape(NamedTuple):
    """The sizes of a model that decide how long its kernels take."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int  # heads of keys and values, each shared by heads / kv_heads queries
    feed_forward: int
    vocabulary: int


SHAPES = {
    "0.5b": Shape(896, 24, 14, 2, 4864, 151936),  # Qwen2.5-0.5B
    "1.5b": Shape(1536, 28, 12, 2, 8960, 151936),  # Qwen2.5-1.5B
    "tiny": Shape(128, 2, 4, 2, 256, 1000),  # for a CPU, to see that a check runs
}
DEVICES = ("cuda", "cpu")


class Setting(NamedTuple):
    """What a check is given."""

    device: str = "cuda"  # of DEVICES
    shape: str = "0.5b"  # of SHAPES


FLAGS = {
    "device": "cuda",
    "shape": "0.5b",
    "json": "runs/check_gpu.json",
    "check": "",  # the check that this process is; empty: the process that starts them
}


class Finding(NamedTuple):
    """One line of the table."""

    what: str
    good: bool
    measured: str
    wanted: str = ""
    # for the JSON file, never changed: all findings may share the empty one
    figures: dict = {}  # noqa: RUF012


# --- one check, in a process of its own


def run_check(name: str, setting: Setting) -> None:
    """Prints each finding as a line of JSON, as soon as it is there."""
    module = importlib.import_module(f"bench.{CHECKS[name].module}")
    begin = time.perf_counter()
    # at once, so that what was found before a crash is not lost
    for finding in getattr(module, name)(setting):
        now = time.perf_counter()
        row = finding._asdict() | {"seconds": now - begin}
        print("\nfinding " + json.dumps(row), flush=True)
        begin = now


# --- all of them


def why_not(name: str, gpus: int) -> str:
    """Why a check can't run here; empty if it can."""
    # looked up, not imported: imports take seconds each, and may fail in other ways
    missing = [p for p in CHECKS[name].needs if importlib.util.find_spec(p) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if gpus < CHECKS[name].gpus:
        return f"needs {CHECKS[name].gpus} GPUs"
    return ""


def row_of(check: str, state: str, measured: str, seconds: float = 0.0, **more) -> dict:
    return {"check": check, "state": state, "measured": measured, "seconds": seconds} | more


def last_words(text: str) -> str:
    """What a process says went wrong: its last error line, or else its last line."""
    last = "no word"
    last_error = ""
    for line in map(str.strip, text.splitlines()):
        last = line or last
        # "torch.OutOfMemoryError: ...", "[rank0]: RuntimeError: ..."
        if re.match(r"(\[rank\d+\]: )?(\w|\.)*[Ee]rror\b", line):
            last_error = line
    return (last_error or last)[:200].replace("|", "/")  # a cell of the table


def rows_of(name: str, setting: Setting, limit: float) -> list[dict]:
    """The findings of a check, and a failed one if it stops early or does not end in time."""
    command = [sys.executable, "-m", "bench.gpu", f"--check={name}"]
    command += [f"--device={setting.device}", f"--shape={setting.shape}"]
    begin = time.perf_counter()
    done = run_for(command, limit)
    stopped = ""
    if done.returncode is None:
        stopped = f"not done after {limit:.0f} seconds"
    elif done.returncode:
        stopped = f"stopped with status {done.returncode}: {last_words(done.stderr)}"
    rows = []
    for line in done.stdout.splitlines():
        if not line.startswith("finding "):
            continue
        found = json.loads(line.removeprefix("finding "))
        state = "ok" if found.pop("good") else "FAIL"
        # measured, wanted, figures and seconds stay as they are
        rows.append({"check": f"{name}: {found.pop('what')}", "state": state} | found)
    if stopped or not rows:
        stopped = stopped or "found nothing"
        rows.append(row_of(name, "FAIL", stopped, time.perf_counter() - begin))
    return rows


def print_row(row: dict) -> None:
    seconds = f"{row['seconds']:.1f}"
    cells = [row["check"], row["state"], row["measured"], row.get("wanted", ""), seconds]
    print("| " + " | ".join(cells) + " |", flush=True)


def no_gpu() -> str:
    """Why torch sees no GPU here; empty if it sees one."""
    import torch

    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs (make env on a GPU machine, not here)"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return last_words(str(error))
    return "torch.cuda.is_available() is False"


def main(argv: list[str]) -> int:
    flags, names = own_flags(argv, FLAGS)
    wanted = list(names)
    if flags["check"]:
        wanted.append(flags["check"])
    wrong = [name for name in wanted if name not in CHECKS]
    if wrong:
        raise UserError(
            f"there is no check and no flag {' '.join(wrong)}: checks are {', '.join(CHECKS)}; "
            f"flags --device=, --shape=, --json="
        )
    for flag, choices in (("device", DEVICES), ("shape", SHAPES)):
        if flags[flag] not in choices:
            raise UserError(f"--{flag}={flags[flag]} must be one of {', '.join(choices)}")
    setting = Setting(flags["device"], flags["shape"])
    if flags["check"]:
        run_check(flags["check"], setting)
        return 0
    # now, not after all checks, when their figures would be lost
    check_writable("--json", flags["json"], folder=False)
    why = no_gpu()
    if why and setting.device == "cuda":
        print(f"no GPU: {why}")
        return NO_GPU
    return run_all(names or list(CHECKS), setting, Path(flags["json"]))


def run_all(names: list[str], setting: Setting, path: Path) -> int:
    """Runs the checks, prints a table and writes it to `path` as JSON. Returns the exit status."""
    import torch  # here, because a mistyped check is reported before it loads

    gpus = torch.cuda.device_count()
    where = torch.cuda.get_device_name() if gpus else "a CPU: figures mean nothing"
    print(f"{where}; torch {torch.__version__}; shape {setting.shape}")
    print("| check | ok / FAIL / skip | measured | wanted | seconds |", "|---" * 5 + "|", sep="\n")
    rows = []
    for name in names:
        # on a CPU ranks are processes: there is always room for two
        why = why_not(name, gpus if setting.device == "cuda" else 2)
        if why:
            found = [row_of(name, "skip", why)]
        else:
            found = rows_of(name, setting, CHECKS[name].limit)
        rows += found
        for row in found:
            print_row(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"gpu": where, "torch": torch.__version__} | setting._asdict()
    path.write_text(json.dumps(header | {"rows": rows}, indent=1), encoding="utf-8")
    failed = sum(row["state"] == "FAIL" for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} without a failure; figures in {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(script(main))
