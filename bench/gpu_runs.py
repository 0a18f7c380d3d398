"""Checks of bench.gpu: whole runs of train.py, killed and resumed."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.gpu import ROOT, Finding, last_words

STEPS = 4
DEADLINE = 200  # seconds, for one process
LEAVE = 60  # seconds that a rank may take to notice that another has died


def command_of(script: str, **settings) -> list[str]:
    flags = [f"--{key}={value}" for key, value in settings.items()]
    return [sys.executable, script, "config/countdown_tiny.py", *flags]


def environment(setting) -> dict:
    """A CPU alone, if that was asked for."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if setting.device == "cpu" else {}
    return os.environ | {"HF_HUB_OFFLINE": "1"} | hidden


def run(command: list[str], setting) -> str:
    """Its last words if it fails, else nothing."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(setting),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    if not done.returncode:
        return ""
    return last_words(done.stderr)


def metrics_of(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]  # the last line may be half written
    rows = [json.loads(line) for line in whole.splitlines()]
    return [row for row in rows if "loss" in row]


def run_and_kill(command: list[str], folder: Path, setting) -> str:
    """Starts a run and kills it after its second checkpoint; what went wrong, or nothing."""
    with open(folder.with_suffix(".out"), "w+") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(setting), stdout=out, stderr=subprocess.STDOUT
        )
        end = time.monotonic() + DEADLINE
        try:
            while time.monotonic() < end and process.poll() is None:
                if (folder / "step_000002").exists():
                    return ""
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        return last_words(out.read())


def train(setting):
    """A tiny model for Countdown from its warm start on: four steps, killed after two."""
    yield from from_warm_start(resumed_run, setting)


def from_warm_start(work, setting):
    """What work(folder, setting) finds, with a warmed-up tiny model in folder / "sft"."""
    base = Path(tempfile.mkdtemp(prefix="bench_gpu_"))
    try:
        wrong = run(command_of("sft.py", model="tiny", output_dir=base / "sft", steps=20), setting)
        yield Finding("sft.py", not wrong, wrong or "runs", "a model")
        if not wrong:
            yield from work(base, setting)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def settings_of(base: Path, **changes) -> dict:
    vllm = importlib.util.find_spec("vllm") is not None
    settings = {
        "model": base / "sft",
        "output_dir": base / "run",
        "rollout_engine": "vllm" if vllm else "hf",
        "prompts_per_step": 4,
        "num_generations": 8,
        "max_steps": STEPS,
        "save_steps": 1,
        "eval_steps": 0,
    }
    return settings | changes


def two_ranks(setting):
    """train.py on two ranks, and how long the other one takes to leave when one is killed."""
    yield from from_warm_start(pair_of_runs, setting)


def pair_of_runs(base: Path, setting):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun.append("--nproc_per_node=2")
    wrong = run(torchrun + command_of("train.py", **settings_of(base))[1:], setting)
    steps = [row["step"] for row in metrics_of(base / "run")]
    good = not wrong and steps == list(range(1, STEPS + 1))
    yield Finding("train.py", good, wrong or f"steps {steps}", f"steps 1 to {STEPS}")
    changes = {"output_dir": base / "killed", "max_steps": 100_000, "save_steps": 2}
    command = torchrun + command_of("train.py", **settings_of(base, **changes))[1:]
    seconds, said = kill_one_rank(command, base / "killed", setting)
    measured = f"{seconds:.0f} s: {said}" if seconds else said
    yield Finding("one rank killed", 0 < seconds <= LEAVE, measured, f"a word in {LEAVE} s")


def children_of(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_one_rank(command: list[str], folder: Path, setting) -> tuple[float, str]:
    """Kills one of torchrun's processes when there is a checkpoint: (seconds until torchrun has
    gone, last words); 0 seconds if it never came so far."""
    with open(folder.with_suffix(".out"), "w+") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(setting), stdout=out, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + DEADLINE
            while not (folder / "step_000002").exists():
                if process.poll() is not None or time.monotonic() > end:
                    out.seek(0)
                    return 0.0, last_words(out.read())
                time.sleep(0.05)
            begin = time.monotonic()
            os.kill(children_of(process.pid)[-1], signal.SIGKILL)
            process.wait(timeout=DEADLINE)
            seconds = time.monotonic() - begin
        finally:
            for pid in [*children_of(process.pid), process.pid] if process.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return seconds, last_words(out.read())


def resumed_run(base: Path, setting):
    settings = settings_of(base)
    command = command_of("train.py", **settings)
    wrong = run_and_kill(command, base / "run", setting)
    measured = wrong or f"{len(metrics_of(base / 'run'))} steps with {settings['rollout_engine']}"
    yield Finding("train.py, killed", not wrong, measured, "two checkpoints")
    if wrong:
        return
    wrong = run([*command, "--resume_from_checkpoint=latest"], setting)
    rows = metrics_of(base / "run")
    good = not wrong and [row["step"] for row in rows] == list(range(1, STEPS + 1))
    gap = max((row["sampling/sampling_logp_difference/mean"] for row in rows), default=0.0)
    measured = wrong or f"steps {[row['step'] for row in rows]}, log-probs apart by {gap:.1e}"
    yield Finding("train.py, resumed", good, measured, f"steps 1 to {STEPS}")
