"""Checkpoints: everything a run needs to continue, in one folder that is either whole or absent.

    python checkpoint.py verify runs/countdown_tiny/step_000250              says whether it is whole
    python checkpoint.py export runs/countdown_tiny/step_000250 OUT          a Hugging Face folder, from a "shallow" one too

    output_dir/step_000100/      a Hugging Face model folder (config.json, model.safetensors, tokenizer; no weights if "shallow"), and
        engine/                  DeepSpeed's shards: parameters, optimizer, of every rank
        controller_state.json    step, tau, beta and what their controllers remember; the replay buffer
        train_config.json        the resolved config
        rng_0.pt ...             random state of every rank
        manifest.json            size and SHA-256 of every file above

Written to step_000100.tmp, flushed to the disk, then renamed. Which prompts come next and their sampling seeds follow from (seed, step):
nothing to save. DeepSpeed's shards are pickles, which could run code when they are loaded; here they
can't, whoever made them: no_code() has torch build tensors, plain values and three of DeepSpeed's
records, and refuse the rest.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars
from tqdm import tqdm

from common import RunStopped, UserError, escaped, lost_a_rank, modern, quoted, script

# torch, and what imports it, is imported by the functions that use it: `verify` needs none of it,
# and it takes ten seconds.

# what every checkpoint has, whatever its mode, ZeRO stage and number of ranks; and a shard in engine/
REQUIRED = ("config.json", "controller_state.json", "rng_0.pt", "train_config.json")
FORCE = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}


def save(
    folder: Path, step: int, engine, tokenizer, config: dict, state: dict, replay: dict
) -> Path:
    """Writes output_dir/step_N, deletes what save_total_limit and keep_every leave over, and returns the path. All ranks call it together.
    RunStopped if it can't be written; what was saved before stays as it is."""
    folder = Path(folder)
    path = folder / f"step_{step:06d}"
    try:
        write(path, step, engine, tokenizer, config, state, replay)
    except (
        Exception
    ) as error:  # torch, safetensors and DeepSpeed each have their own for a full disk
        if lost_a_rank(error):
            raise  # common.script has the sentence: the disk is not to blame
        if not folder.is_dir():
            raise RunStopped(gone(folder)) from error
        free, last = shutil.disk_usage(folder).free / 2**30, steps_of(folder)
        raise RunStopped(
            f"{path} could not be written ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; {free:.1f} GiB are free "
            f"there); the last checkpoint is {last[-1] if last else 'none'}, go on from it with --resume_from_checkpoint=latest"
        ) from error
    return path


def write(
    path: Path, step: int, engine, tokenizer, config: dict, state: dict, replay: dict
) -> None:
    import torch
    import torch.distributed as dist

    from policy import named_weights

    rank, tmp = dist.get_rank(), path.with_suffix(".tmp")
    if rank == 0:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir()  # not its parents: an output_dir that is gone is not made anew behind the user
    dist.barrier()
    engine.save_checkpoint(
        str(tmp),
        tag="engine",
        save_latest=False,
        client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}},
    )
    torch.save(torch.get_rng_state(), tmp / f"rng_{rank}.pt")
    lm = engine.module.lm
    if config["checkpoint_mode"] == "full" or step == config["max_steps"]:
        own = {name for name, _ in lm.named_parameters()}
        weights = {
            name: tensor.cpu()
            for name, tensor in named_weights(lm, config["zero_stage"])
            if rank == 0 and name in own
        }  # all ranks gather
        if rank == 0:
            lm.save_pretrained(tmp, state_dict=weights)
    elif rank == 0:
        lm.config.save_pretrained(tmp)
        lm.generation_config.save_pretrained(tmp)
    if rank == 0:
        tokenizer.save_pretrained(tmp)
        (tmp / "controller_state.json").write_text(
            json.dumps({"step": step, "controllers": state, "replay": replay})
        )
        (tmp / "train_config.json").write_text(json.dumps(config, indent=1))
    dist.barrier()  # the manifest lists every rank's files
    if rank == 0:
        (tmp / "manifest.json").write_text(json.dumps(manifest_of(tmp), indent=1))
        flush(tmp)
        old = (
            path.rename(path.with_suffix(".old")) if path.exists() else None
        )  # this step was saved before
        tmp.rename(path)
        flush(path.parent, deep=False)
        if old:
            remove(old)
        prune(path.parent, config["save_total_limit"], config["keep_every"])
    dist.barrier()


def gone(folder: Path) -> str:
    return (
        f"output_dir={str(folder)!r} is gone or another folder now: it was deleted or renamed while the "
        f"run wrote to it; what has been saved is wherever that folder is, later steps are lost"
    )


def flush(folder: Path, deep: bool = True) -> None:
    """To the disk with it, before a rename may say that it is there."""
    for path in (folder, *(folder.rglob("*") if deep else ())):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def report(folder: Path, parameters: int, dtype, c: dict) -> str:
    """A sentence on what will be saved, where, how often, how large it is and how long it takes, from a short trial of the disk."""
    if c["save_steps"] < 0:
        return "checkpoints: none (save_steps=-1)"
    trial, start = folder / "trial.tmp", time.perf_counter()
    try:
        with open(trial, "wb") as file:
            file.write(os.urandom(2**24))
            file.flush()
            os.fsync(file.fileno())
        file_hash(trial)
    except OSError as error:
        raise UserError(
            f"output_dir={str(folder)!r}: a trial file of 16 MiB could not be written there ({error.strerror})"
        ) from None
    finally:
        trial.unlink(missing_ok=True)
    speed = 2**24 / (time.perf_counter() - start)
    size = parameters * (
        16 if c["checkpoint_mode"] == "full" else 16 - dtype.itemsize
    )  # weights, their float32 copy, two moments, Hugging Face file
    often = f"every {c['save_steps']} steps and at the end" if c["save_steps"] else "at the end"
    kept = (
        f"the newest {c['save_total_limit']} are kept" if c["save_total_limit"] else "all are kept"
    )
    return (
        f"checkpoints: {c['checkpoint_mode']}, about {size / 2**30:.2f} GiB and {size / speed:.0f} s each, {often}, in {folder}/step_*; {kept}"
        + (f", and those of every {c['keep_every']} steps" if c["keep_every"] else "")
        + f"; {shutil.disk_usage(folder).free / 2**30:.0f} GiB free"
    )


def take_over(c: dict, step: int, parameters: int) -> str:
    """Puts a run's folder in order before it goes on from `step`; sentences on what was done, and
    on the checkpoints to come."""
    from policy import dtype_of

    folder = Path(c["output_dir"])
    tidy(folder)
    sentences = []
    for path in set_aside(folder, step):
        sentences.append(f"the run goes on from an earlier checkpoint: {path.stem} is now {path}")
        # where it is another run then: Weights & Biases takes no step twice
        (folder / "wandb_id").unlink(missing_ok=True)
    sentences.append(report(folder, parameters, dtype_of(c), c))
    return "\n".join(sentences)


def tidy(folder: Path) -> None:
    """Removes what a process that died left behind: half a save, and weights for rollout servers,
    also those of another host or of a run that had servers when this one has none."""
    for pattern in ("step_*.tmp", "step_*.old", "push_*.tmp", "weights/*-*-*-*"):
        for path in folder.glob(pattern):
            remove(path)


def remove(path: Path) -> None:
    """A folder, or the link to one that somebody put into its place."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path)


def set_aside(folder: Path, step: int) -> list[Path]:
    """Renames the checkpoints after `step` to step_N.abandoned (.abandoned2, ...), where "latest" does not look: a run that goes on from an
    earlier one leaves that branch. The new paths."""
    found = []
    for path in [path for path in steps_of(folder) if number_of(path) > step]:
        free = next(
            new
            for i in count(1)
            if not (new := path.with_suffix(f".abandoned{i if i > 1 else ''}")).exists()
        )
        found.append(path.rename(free))
    return found


def manifest_of(path: Path) -> dict:
    """{"relative/name": [bytes, sha256]} of all files but the manifest itself."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json")
    return {str(p.relative_to(path)): [p.stat().st_size, file_hash(p)] for p in files}


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path, rank: int = 0, world: int = 1) -> str:
    """ "" if the checkpoint is whole, else one sentence about the first thing that is missing or changed. All files must be there with their
    sizes; of `world` ranks that call it together, each reads its share of the contents (world 0: nobody does)."""
    path = Path(path)
    try:
        manifest = {
            name: (int(size), str(digest))
            for name, (size, digest) in json.loads((path / "manifest.json").read_text()).items()
        }
        if missing := [name for name in REQUIRED if name not in manifest]:
            return f"{path / 'manifest.json'} lists no {missing[0]}"
        if not any(name.startswith("engine/") for name in manifest):
            return f"{path / 'manifest.json'} lists no file in engine/"
        for i, (name, (size, digest)) in enumerate(manifest.items()):
            file = path / name
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != size:
                return f"{file} has {file.stat().st_size} bytes instead of {size}"
            if world and i % world == rank and file_hash(file) != digest:
                return f"{file} has changed since it was saved"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{path} has no readable manifest.json: {error}"
    return ""


def verify_together(path) -> str:
    """verify() and code_in() by all ranks: the same answer on each of them, so that none goes on
    alone."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    problem = verify(path, rank, world) or code_in(path, rank, world)
    found = [None] * world
    dist.all_gather_object(found, problem)
    return next((f"{problem} (rank {i})" for i, problem in enumerate(found) if problem), "")


@contextmanager
def no_code():
    """In here torch.load, whatever its caller asks for, makes tensors, plain values and three of
    DeepSpeed's records: a pickle that names anything else is an UnpicklingError, and runs nothing.
    DeepSpeed asks for weights_only=False wherever it loads."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = {name: os.environ.get(name) for name in FORCE}
    os.environ.update(FORCE)
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:  # rewards and eval_command are started with this environment, and may load what they like
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def code_in(path, rank: int = 0, world: int = 1) -> str:
    """One sentence about the first pickle of a checkpoint that is more than data, else "". Of `world`
    ranks each reads its share. Tensors are mapped, not read."""
    import torch

    for file in sorted(Path(path).rglob("*.pt"))[rank::world]:
        try:
            with no_code():
                contents = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # a broken pickle may make torch raise anything
            return f"{file} is not loaded, it holds more than numbers: {reason(error)}"
        for text in strings_in(contents):
            if "/" in text or text == "..":  # ds_to_universal makes files of these names
                return f"{file} is not loaded, it names a path: {text[:80]!r}"
    return ""


def reason(error: Exception) -> str:
    """What torch's advice, a page long, is about."""
    named = re.search(r"GLOBAL (\S+) (was not an allowed|whose module)", str(error))
    if named:
        return f"{named[1]!r} would be code that runs"
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def strings_in(value):
    """Every string in a nest of dicts, lists and records, which may hold itself."""
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set)):
            pending += value
        else:
            pending += getattr(value, "__dict__", {}).values()


def steps_of(folder) -> list[Path]:
    """Finished checkpoints, oldest first. A link is none: what it leads to belongs to somebody else,
    and is neither `latest` nor deleted; resume_from_checkpoint can name it."""
    return sorted(
        (
            p
            for p in Path(folder).glob("step_*")
            if p.is_dir() and not p.is_symlink() and p.name.removeprefix("step_").isdecimal()
        ),
        key=number_of,
    )


def number_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def prune(folder: Path, limit: int, keep_every: int = 0) -> None:
    """Deletes all but the newest `limit` (0: none) and those of every keep_every-th step (0: no others)."""
    for old in steps_of(folder)[:-limit] if limit > 0 else []:
        if keep_every == 0 or number_of(old) % keep_every:
            gone = old.rename(
                old.with_suffix(".old")
            )  # first out of sight: half a checkpoint is none
            shutil.rmtree(gone)


def latest(folder, check=verify) -> Path | None:
    """The newest checkpoint of a run folder that verifies, None without one; those passed over are named on the console."""
    for path in sorted(Path(folder).glob("step_*")):
        if path.is_symlink():
            print(f"checkpoint passed over: {path} is a symbolic link", flush=True)
    for path in reversed(steps_of(folder)):
        problem = check(path)
        if not problem:
            return path
        print(f"checkpoint passed over: {escaped(problem)}", flush=True)
    return None


def check_request(resume_from: str, folder: str) -> bool:
    """Whether the run goes on in the checkpoint's own folder; a UserError if the checkpoint that
    resume_from_checkpoint asks for is plainly not there. Reads no contents yet."""
    if not resume_from:
        return False
    if resume_from == "latest":
        if all(verify(path, 0, 0) for path in steps_of(folder)):
            raise UserError(
                f"resume_from_checkpoint='latest': output_dir={folder!r} holds no whole checkpoint (step_*)"
            )
        return True
    if problem := verify(resume_from, 0, 0):
        raise UserError(f"resume_from_checkpoint={resume_from!r}: {problem}")
    return Path(resume_from).resolve().parent == Path(folder).resolve()


def find(config: dict) -> Path | None:
    """The checkpoint that resume_from_checkpoint asks for, None for a fresh run; a UserError if it is damaged for any rank, or not one that this
    config can go on from. All ranks call it together."""
    resume_from, folder = config["resume_from_checkpoint"], config["output_dir"]
    if not resume_from:
        return None
    path = latest(folder, verify_together) if resume_from == "latest" else Path(resume_from)
    if path is None:
        raise UserError(
            f"resume_from_checkpoint='latest': output_dir={folder!r} holds no whole checkpoint (step_*)"
        )
    if resume_from != "latest" and (problem := verify_together(path)):
        raise UserError(f"resume_from_checkpoint={resume_from!r}: {problem}")
    check_fit(path, config)
    return path


def check_fit(path: Path, config: dict) -> None:
    """UserError if the optimizer's state of a checkpoint is not one that this config can go on from."""
    from policy import dtype_of, seed_classes

    saved, model = (
        json.loads((path / name).read_text()) for name in ("train_config.json", "config.json")
    )
    saved, dtype = config | modern(saved), str(dtype_of(config)).removeprefix("torch.")
    for name, was, now in (
        ("zero_stage", saved["zero_stage"], config["zero_stage"]),
        ("dtype", model.get("dtype", dtype), dtype),
        ("seeds of a trained head", seed_classes(saved), seed_classes(config)),
    ):
        if was != now:
            raise UserError(
                f"{path} was saved with {name}={was!r}, which its optimizer's state depends on; this run has {now!r}: go on with the same, or start a new "
                f"run from its weights: --model={path} --output_dir=..."
            )


def load(path: Path, engine, rank: int) -> tuple[int, dict, dict]:
    """(finished steps, controller state, replay state); parameters, optimizer and random state go into `engine` and torch. Another number of
    ranks than saved it goes through DeepSpeed's universal format: the same to rounding, no longer to the bit."""
    import torch
    import torch.distributed as dist

    saved_world = len(list(path.glob("rng_*.pt")))
    # without ZeRO every rank has everything
    same_ranks = saved_world == dist.get_world_size() or engine.zero_optimization_stage() == 0
    with no_code():
        if same_ranks:
            loaded, _ = engine.load_checkpoint(str(path), tag="engine")
        else:
            loaded, _ = load_universal(path, engine, rank)
    if loaded is None:
        raise UserError(
            f"resume_from_checkpoint: DeepSpeed found nothing to load in {path / 'engine'}"
        )
    torch.set_rng_state(torch.load(path / f"rng_{rank % saved_world}.pt", weights_only=True))
    saved = json.loads((path / "controller_state.json").read_text())
    return saved["step"], saved["controllers"], saved.get("replay", {})


def load_universal(path: Path, engine, rank: int) -> tuple:
    import torch.distributed as dist

    folder = path.with_suffix(".universal.tmp")
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run(
            [sys.executable, __file__, "convert", path / "engine", folder / "engine"],
            capture_output=True,
            text=True,
            env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        )
        if done.returncode:
            raise RunStopped(
                f"{path} could not be converted for {dist.get_world_size()} rank(s): {done.stderr.strip().splitlines()[-1]}"
            )
    dist.barrier()
    engine._config.load_universal_checkpoint = True
    found = engine.load_checkpoint(str(folder), tag="engine")
    engine._config.load_universal_checkpoint = False
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return found


def convert(shards, out) -> None:
    """DeepSpeed's universal format of a checkpoint's shards, in a process of its own: it forks workers."""
    from deepspeed.checkpoint import ds_to_universal

    sys.argv = ["ds_to_universal", "--input_folder", shards, "--output_folder", out]
    with no_code():
        ds_to_universal.main(ds_to_universal.parse_arguments())


# --- without a run


def engine_weights(path: Path, zero_stage: int) -> dict:
    """{name: tensor} of the language model in DeepSpeed's shards, whatever the number of ranks that wrote them."""
    import torch

    if zero_stage == 0:
        file = path / "engine" / "mp_rank_00_model_states.pt"
        weights = torch.load(file, map_location="cpu", weights_only=True)["module"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with no_code():
            weights = get_fp32_state_dict_from_zero_checkpoint(str(path), "engine")
    return {
        name.removeprefix("lm."): tensor
        for name, tensor in weights.items()
        if name.startswith("lm.")
    }


def export(path, out) -> None:
    """A Hugging Face folder `out` from a checkpoint, also a "shallow" one; UserError if it is not
    whole, holds code, or `out` is there already."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path, out = Path(path), Path(out)
    if problem := verify(path) or code_in(path):
        raise UserError(f"export: {problem}")
    if out.exists():
        raise UserError(f"export: {out} is there already")
    config = json.loads((path / "train_config.json").read_text())
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    dtype = lm.dtype if config["dtype"] == "auto" else getattr(torch, config["dtype"])
    own = {name for name, _ in lm.named_parameters()}
    weights = {
        name: tensor.to(dtype)
        for name, tensor in engine_weights(path, config["zero_stage"]).items()
        if name in own
    }
    if missing := own - set(weights):
        raise UserError(f"export: {path / 'engine'} has no {min(missing)}")
    made = f"{out}: {len(weights)} tensors, {sum(t.numel() for t in weights.values()) / 1e6:.2f}M parameters"
    tmp = out.with_name(out.name + ".tmp")
    lm.save_pretrained(tmp, state_dict=weights)  # empties the dict
    AutoTokenizer.from_pretrained(path).save_pretrained(tmp)
    tmp.rename(out)
    print(made)


def main(argv) -> None:
    if len(argv) == 3 and argv[0] == "export":
        export(argv[1], argv[2])
    elif len(argv) == 3 and argv[0] == "convert":  # load_universal calls it
        convert(argv[1], argv[2])
    elif len(argv) == 2 and argv[0] == "verify":
        problem = verify(argv[1])
        print(escaped(problem) or f"{argv[1]} is whole")
        sys.exit(bool(problem))
    else:
        raise UserError(
            "usage: python checkpoint.py export RUN/step_N OUT   or   python checkpoint.py verify RUN/step_N"
        )


# --- push_to_hub: full checkpoints to the Hugging Face hub, in the background while the run goes on.


PRIVATE = (
    "engine",
    "rng_",
    "controller_state.json",
    "train_config.json",
    "manifest.json",
)  # ours, not a model's
LONGEST = 3600.0  # seconds that the end of a run waits for its last upload


def in_background(work) -> Future:
    """work() in a thread that does not keep the process alive."""
    done = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised again where somebody waits for it
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def link_model(path: Path, copy: Path) -> None:
    """The model's files of a checkpoint once more: the checkpoint itself may be pruned before they are uploaded. Copies where a file system has no links."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for file in path.iterdir():
        if not file.name.startswith(PRIVATE):
            try:
                os.link(file, copy / file.name)
            except OSError:
                shutil.copy2(file, copy / file.name)


class Hub:
    def __init__(self, repo: str, folder: Path):
        disable_progress_bars()  # they would cut through ours
        self.api, self.folder, self.going = HfApi(), Path(folder), None
        try:
            self.repo = self.api.create_repo(repo, private=True, exist_ok=True).repo_id
        except Exception as error:  # of huggingface_hub and its HTTP library: no token, no network, no rights, no such name
            raise UserError(
                f"push_to_hub={repo!r}: the hub does not let us make or use this repository: {quoted(' '.join(str(error).split()), 300)}; set HF_TOKEN to a "
                f'token that may write, or push_to_hub to ""'
            ) from None

    def push(self, path: Path, last: bool = False) -> None:
        """Begins to upload; while an earlier upload still runs, leaves this one out, unless it is the last."""
        if not (path / "config.json").exists() or not list(path.glob("*.safetensors*")):
            return  # "shallow": no model in it
        if self.going and not (last or self.going[1].done()):
            return tqdm.write(f"not pushed: {path}, {self.going[0].name} is still on its way")
        self.finish(stop=False)
        copy = self.folder / f"push_{path.name}.tmp"
        try:
            link_model(path, copy)
        except OSError as error:
            upload = Future()
            upload.set_exception(error)
        else:
            upload = in_background(
                lambda: self.api.upload_folder(
                    repo_id=self.repo, folder_path=copy, commit_message=path.name
                )
            )
        self.going = path, upload, copy

    def finish(self, stop: bool = True) -> None:
        """Waits for the upload that is under way. One that failed is a sentence, with `stop` RunStopped: nothing else is lost by it."""
        if not self.going:
            return
        (path, upload, copy), self.going = self.going, None
        try:
            tqdm.write(f"pushed {path} to {escaped(upload.result(LONGEST).commit_url)}")
        except Exception as error:  # of huggingface_hub, its HTTP library and the operating system
            sentence = f"{path} was not pushed to {self.repo}: {type(error).__name__}: {quoted(' '.join(str(error).split()), 300)}"
            if stop:
                raise RunStopped(f"{sentence}; by hand: hf upload {self.repo} {path}") from None
            tqdm.write(f"warning: {sentence}")
        finally:
            shutil.rmtree(copy, ignore_errors=True)


if __name__ == "__main__":
    script(main)
