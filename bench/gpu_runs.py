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

from bench.gpu import Finding, last_words
from common import ROOT

STEPS = 4  # two before the kill, two after it
DEADLINE = 200  # seconds, for one process
LEAVE = 60  # seconds within which a rank must notice that another has died


def command_of(script: str, **settings) -> list[str]:
    """The command for a script of this project on its smallest task."""
    flags = [f"--{key}={value}" for key, value in settings.items()]
    return [sys.executable, script, "config/countdown_tiny.py", *flags]


def environment(setting) -> dict:
    """Hides GPUs if the setting is a CPU. The hub is never asked: everything needed is here."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if setting.device == "cpu" else {}
    return os.environ | {"HF_HUB_OFFLINE": "1"} | hidden


def run(command: list[str], setting) -> str:
    """Runs a command; returns its last words if it fails, else ""."""
    env = environment(setting)
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE
    )
    return last_words(done.stderr) if done.returncode else ""


def metrics_of(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl that are training steps."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]  # the last line may be half written
    rows = [json.loads(line) for line in whole.splitlines()]
    return [row for row in rows if "loss" in row]  # evaluations have no loss


def begin(command: list[str], out, setting) -> subprocess.Popen:
    """Starts a process whose output goes to the file: a full pipe would stop it."""
    env = environment(setting)
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)


def words_in(out) -> str:
    out.seek(0)
    return last_words(out.read())


def second_checkpoint(process: subprocess.Popen, folder: Path) -> bool:
    """Waits for the second checkpoint; False if the process ends before, or takes too long."""
    end = time.monotonic() + DEADLINE
    while not (folder / "step_000002").exists():
        if process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def run_and_kill(command: list[str], folder: Path, setting) -> str:
    """Starts a run and kills it after its second checkpoint. Returns what went wrong, or ""."""
    with open(folder.with_suffix(".out"), "w+") as out:
        process = begin(command, out, setting)
        try:
            came_so_far = second_checkpoint(process, folder)
        finally:
            process.kill()  # nothing can be tidied up, as after a power cut
            process.wait()
        return "" if came_so_far else words_in(out)


def train(setting):
    """A tiny model for Countdown: a warm start, then four steps, killed after two."""
    yield from from_warm_start(resumed_run, setting)


def from_warm_start(work, setting):
    """The findings of work(folder, setting), with a warmed-up tiny model in folder / "sft"."""
    base = Path(tempfile.mkdtemp(prefix="bench_gpu_"))
    try:
        wrong = run(command_of("sft.py", model="tiny", output_dir=base / "sft", steps=20), setting)
        yield Finding("sft.py", not wrong, wrong or "runs", "a model")
        if not wrong:
            yield from work(base, setting)
    finally:  # also if nobody asks for the next finding
        shutil.rmtree(base, ignore_errors=True)


def settings_of(base: Path, **changes) -> dict:
    """Flags for train.py: as short a run as can be killed after two checkpoints."""
    vllm = importlib.util.find_spec("vllm") is not None  # not needed for a run, only for speed
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
    """train.py on two ranks, and how long one takes to leave after the other is killed."""
    yield from from_warm_start(pair_of_runs, setting)


def pair_of_runs(base: Path, setting):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun.append("--nproc_per_node=2")
    # [1:]: torchrun finds Python by itself
    wrong = run(torchrun + command_of("train.py", **settings_of(base))[1:], setting)
    steps = [row["step"] for row in metrics_of(base / "run")]
    good = not wrong and steps == list(range(1, STEPS + 1))
    yield Finding("train.py", good, wrong or f"steps {steps}", f"steps 1 to {STEPS}")
    # long enough that it is not done before it is killed
    changes = {"output_dir": base / "killed", "max_steps": 100_000, "save_steps": 2}
    command = torchrun + command_of("train.py", **settings_of(base, **changes))[1:]
    seconds, said = kill_one_rank(command, base / "killed", setting)
    measured = f"{seconds:.0f} s: {said}" if seconds else said
    yield Finding("one rank killed", 0 < seconds <= LEAVE, measured, f"a word in {LEAVE} s")


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children. Linux only, like all of this."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def kill_one_rank(command: list[str], folder: Path, setting) -> tuple[float, str]:
    """Kills one of torchrun's processes when there is a checkpoint: (seconds until torchrun has
    gone, last words); 0 seconds if it never came so far."""
    with open(folder.with_suffix(".out"), "w+") as out:
        process = begin(command, out, setting)
        try:
            if not second_checkpoint(process, folder):
                return 0.0, words_in(out)
            killed = time.monotonic()
            os.kill(children_of(process.pid)[-1], signal.SIGKILL)  # it is the last rank
            process.wait(timeout=DEADLINE)
            seconds = time.monotonic() - killed
        finally:
            if process.poll() is None:
                # ranks first, because without torchrun nobody would end them
                for pid in [*children_of(process.pid), process.pid]:
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        return seconds, words_in(out)


def resumed_run(base: Path, setting):
    """A run that is killed and resumed makes every step exactly once."""
    settings = settings_of(base)
    command = command_of("train.py", **settings)
    wrong = run_and_kill(command, base / "run", setting)
    measured = wrong or f"{len(metrics_of(base / 'run'))} steps with {settings['rollout_engine']}"
    yield Finding("train.py, killed", not wrong, measured, "two checkpoints")
    if wrong:
        return
    wrong = run([*command, "--resume_from_checkpoint=latest"], setting)
    rows = metrics_of(base / "run")
    steps = [row["step"] for row in rows]
    good = not wrong and steps == list(range(1, STEPS + 1))  # no step twice, none left out
    gap = max((row["sampling/sampling_logp_difference/mean"] for row in rows), default=0.0)
    measured = wrong or f"steps {steps}, log-probs apart by {gap:.1e}"
    yield Finding("train.py, resumed", good, measured, f"steps 1 to {STEPS}")
