"""Checkpoints: everything a run needs to continue, in one folder that is either whole or absent.

    python checkpoint.py verify RUN/step_000300         says whether it is whole
    python checkpoint.py export RUN/step_000300 OUT     makes it into a Hugging Face folder

    output_dir/step_000100/      a Hugging Face model folder: config.json, tokenizer and, unless the
                                 checkpoint is "shallow", model.safetensors; and
        adapter/                 with lora_rank > 0: the adapters alone, in peft's format
        engine/                  DeepSpeed's shards: parameters and optimizer of every rank
        controller_state.json    step, tau, beta, the controllers' memory, the replay buffer,
                                 how many steps in a row were skipped or taught nothing,
                                 hashes of the training prompts and answers
        train_config.json        the resolved config
        trained_prompts.txt      hashes of all prompts it may have learnt, for evaluate.py's warning
        rng_0.pt ...             random state of every rank
        manifest.json            size and SHA-256 of every file above

A checkpoint is written to step_000100.tmp, flushed to the disk, then renamed. The next prompts and
their sampling seeds are a function of (seed, step) and of the replay buffer, so they need not be
saved.

DeepSpeed's shards are pickles, which can run code when they are loaded. Here they can't, whoever
made them: inside no_code() torch builds tensors, plain values and three of DeepSpeed's classes, and
refuses everything else.

Functions that need libraries import them themselves: importing torch takes ten seconds, and
`verify` and the checks before a run starts need none.
"""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import controllers
from checks import CHOICES, state_bytes
from common import (
    RENAMED,
    RunStopped,
    UserError,
    as_read_back,
    default_config,
    error_text,
    in_one_line,
    launched_ranks,
    lost_a_rank,
    memory_text,
    merge,
    near_path,
    print_above_bar,
    quoted,
    say_on_rank_0,
    script,
)
from journal import CONVERTED, TRIAL_SAVE, delete, open_no_link
from prompts import TRAINED, read_trained, write_trained

# Settings whose change at a resume is not reported: folders, and what follows from the memory of
# this machine.
NOT_REPORTED = (
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "max_tokens_per_micro_batch",
)
# Settings that decide what an evaluation measures; the dataset does where eval_dataset has no name.
MEASURED = (
    "eval_dataset",
    "eval_max_prompts",
    "eval_temperature",
    "reward_funcs",
    "max_completion_length",
    "system_prompt",
    "chat_template",
    "chat_template_kwargs",
)
# Every checkpoint has these files and a shard in engine/, whatever its mode, ZeRO stage and ranks.
REQUIRED = ("config.json", "controller_state.json", "rng_0.pt", "train_config.json")
# Entries of config.json that must agree for weights to fit a model and be used in the same way.
SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
# A push leaves out files whose names begin with these: they are the trainer's, not the model's.
PRIVATE = (
    "engine",
    "rng_",
    "controller_state.json",
    "train_config.json",
    TRAINED,
    "manifest.json",
)
# What a process that died may leave in a run's folder: half a save, a checkpoint that was being
# deleted, an upload's copy, converted shards.
LEFTOVERS = re.compile(r"((push_)?step_\d+|universal)\.tmp|step_\d+\.old\d*")
# ds_to_universal requires this in shards that it converts for another number of ranks.
CONVERTIBLE = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
# Names in the run's folder "weights", by which servers get them: server.disk.run_name(), the number
# of syncs, .tmp while it is written.
WEIGHTS = re.compile(r".+-\d+-[0-9a-f]{8}-\d+(\.tmp)?")
# Environment variables that torch.load obeys: see no_code().
ONLY_WEIGHTS = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
TRIAL_BYTES = 2**24  # written at the start of a run, to estimate how long a save will take
# Seconds that the end of a run waits for each of two uploads: the one under way when the last
# checkpoint is pushed, then that checkpoint's own. During the first the other ranks wait for rank 0
# in a collective, so this must stay below common.DEADLINE.
UPLOAD_SECONDS = 3600.0
# How many steps in a row, up to now, had a skipped update, or only groups of equal rewards.
NO_STREAKS = {"skipped": 0, "equal": 0}


class TrainerState(NamedTuple):
    """What a run remembers besides weights, optimizer and random state."""

    step: int  # finished steps
    controllers: dict  # see controllers.init_state()
    replay: dict  # see stream.py
    streaks: dict = NO_STREAKS
    prompts_hash: str = ""  # of the training rows; "" in older checkpoints
    answers_hash: str = ""  # likewise


# --- is it whole?


def manifest_of(path: Path) -> dict:
    """{"relative/name": [bytes, sha256]} of all files but the manifest itself."""
    manifest = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != "manifest.json":  # a file can't hold its own hash
            manifest[str(file.relative_to(path))] = [file.stat().st_size, file_hash(file)]
    return manifest


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # in pieces: shards are large


def verify(path, rank: int = 0, ranks: int = 1) -> str:
    """ "" if the checkpoint is whole, else a sentence about the first file that is missing or has
    changed.

    Names and sizes are always compared. Contents are read and hashed as well: ranks that call
    this together divide the files among them; ranks=0 reads none, see verify_sizes()."""
    path = Path(path)
    file = path / "manifest.json"
    if not file.is_file():  # opening a named pipe would wait for ever
        return f"{path} has no readable manifest.json: it is missing or not a file"
    try:
        manifest = json.loads(file.read_text())
        problem = unlisted(path, manifest)
        if problem:
            return problem
        for i, (name, (size, digest)) in enumerate(manifest.items()):
            read = ranks > 0 and i % ranks == rank  # every file is read by one rank
            problem = damage(path / name, int(size), str(digest) if read else "")
            if problem:
                return problem
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        return f"{path} has no readable manifest.json, or one of its files can't be read: {error}"
    return ""


def verify_sizes(path) -> str:
    """verify() without reading the contents of files."""
    return verify(path, ranks=0)


def unlisted(path: Path, manifest: dict) -> str:
    """A sentence if the manifest does not list what every checkpoint has, else "". Without this, a
    manifest that was cut short would pass for a whole checkpoint."""
    for name in REQUIRED:
        if name not in manifest:
            return f"{path / 'manifest.json'} lists no {name}"
    if not any(name.startswith("engine/") for name in manifest):
        return f"{path / 'manifest.json'} lists no file in engine/"
    return ""


def damage(file: Path, size: int, digest: str) -> str:
    """A sentence if a file is not as the manifest says, else "". The contents are read only if
    there is a digest to compare them with."""
    if not file.is_file():
        return f"{file} is missing"
    if file.stat().st_size != size:  # cheap, so every rank looks at every file
        return f"{file} has {file.stat().st_size} bytes instead of {size}"
    if digest and file_hash(file) != digest:
        return f"{file} has changed since it was saved"
    return ""


def verify_together(path) -> str:
    """verify() and code_in(), by all ranks together. Every rank gets the same answer, so that none
    goes on alone. RunStopped if the ranks look at different checkpoints: a node may see a shared
    folder as it was a minute ago."""
    import torch.distributed as dist

    from ranks import gather_objects

    rank, ranks = dist.get_rank(), dist.get_world_size()
    local_problem = verify(path, rank, ranks) or code_in(path, rank, ranks)
    answers = gather_objects((str(path), local_problem))
    paths = {name for name, _ in answers}
    if len(paths) > 1:
        raise RunStopped(
            f"ranks see different checkpoints as the newest, {' and '.join(sorted(paths))}: start "
            f"again in a minute, or name one in resume_from_checkpoint"
        )
    for i, (_, problem) in enumerate(answers):
        if problem:
            return f"{problem} (rank {i})"
    return ""


# --- is it only data?


@contextmanager
def no_code():
    """Inside this context torch.load builds data only: tensors, plain values and three of
    DeepSpeed's classes. A pickle that names anything else raises an UnpicklingError and runs
    nothing.

    This sets environment variables, because DeepSpeed calls torch.load(weights_only=False) and only
    they override that argument."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = {name: os.environ.get(name) for name in ONLY_WEIGHTS}
    os.environ.update(ONLY_WEIGHTS)
    try:
        # the only classes that DeepSpeed's shards name besides torch's own
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        # restore the user's: rewards and eval_command inherit our environment, and what they load
        # is their own business
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def code_in(path, rank: int = 0, ranks: int = 1) -> str:
    """One sentence about the first pickle of a checkpoint that is more than data, else "". Ranks
    that call this together each check a share of the files. Tensors are mapped, not read."""
    import torch

    for file in sorted(Path(path).rglob("*.pt"))[rank::ranks]:
        if not file.is_file():  # opening a named pipe would wait for ever
            return f"{file} is not a file"
        try:
            with no_code():
                contents = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # a broken pickle may make torch raise anything
            return f"{file} is not loaded, because it holds more than data: {reason(error)}"
        for text in strings_in(contents):
            if "/" in text or text == "..":  # ds_to_universal names files after such strings
                return f"{file} is not loaded, because it names a path: {text[:80]!r}"
    return ""


def reason(error: Exception) -> str:
    """The point of torch's error message, which is a page of advice."""
    text = str(error).strip()
    match = re.search(r"GLOBAL (\S+) (was not an allowed|whose module)", text)
    if match:
        return f"{match[1]!r} would run as code"
    return f"{type(error).__name__}: {first_line(text)[:200]}"


def first_line(text) -> str:
    return str(text).partition("\n")[0]


def strings_in(value) -> Iterator[str]:
    """Every string in nested dicts, lists and objects. Cycles are allowed."""
    pending = [value]
    seen = set()  # ids of the values that were visited
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        if id(value) in seen:
            continue
        seen.add(id(value))  # ids stay unique, because the caller's `contents` keeps values alive
        if isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            pending += value
        else:
            pending += getattr(value, "__dict__", {}).values()


# --- the checkpoints of a run folder


def checkpoints_in(folder) -> list[Path]:
    """Finished checkpoints, oldest first. Symbolic links are skipped, because their targets may
    belong to somebody else: they are never `latest` and never deleted. resume_from_checkpoint may
    still name one."""
    paths = []
    for path in Path(folder).glob("step_*"):
        is_number = path.name.removeprefix("step_").isdecimal()  # not .tmp, .old, .abandoned
        if is_number and path.is_dir() and not path.is_symlink():
            paths.append(path)
    return sorted(paths, key=number_of)  # by number: from step 1000000 on names have seven digits


def number_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def latest(folder, check=verify, silent: bool = False) -> Path | None:
    """The newest checkpoint of a run folder that passes `check`, None if there is none. Prints
    which ones were passed over, and why, unless `silent`."""
    links = [path for path in sorted(Path(folder).glob("step_*")) if path.is_symlink()]
    problems = [f"{path} is a symbolic link" for path in links]
    newest = None
    for path in reversed(checkpoints_in(folder)):
        problem = check(path)
        if not problem:
            newest = path
            break
        problems.append(in_one_line(problem))
    if not silent:
        for problem in problems:
            say_on_rank_0(f"checkpoint passed over: {problem}")
    return newest


def prune(folder: Path, limit: int, keep_every: int = 0) -> None:
    """Deletes checkpoints, except the newest `limit` and those of every keep_every-th step. limit=0
    deletes none; keep_every=0 keeps only the newest."""
    if limit == 0:
        return
    for path in checkpoints_in(folder)[:-limit]:
        if keep_every == 0 or number_of(path) % keep_every:
            # renamed first: if deletion stops halfway, no partial checkpoint is left under its name
            discard(path, aside=free_name(path, ".old"))


def discard(path: Path, aside: Path | None = None) -> None:
    """Deletes what a run no longer needs. aside: a name that it is given first. If this fails (it
    is write-protected, or NFS keeps files that are open), there is only a warning: nothing is
    lost."""
    try:
        if aside:
            path = path.rename(aside)
        delete(path)
    except OSError as error:
        print_above_bar(
            f"warning: {path} is no longer needed and could not be deleted ({first_line(error)}): "
            f"delete it by hand"
        )


def tidy(folder: Path) -> None:
    """Removes what a process that died left behind: half-written checkpoints, and weights meant for
    rollout servers, even if another host wrote them or this run has no servers."""
    leftovers = [path for path in folder.glob("*") if LEFTOVERS.fullmatch(path.name)]
    weights = folder / "weights"
    if not weights.is_symlink():  # its target may belong to another run, or to no run at all
        leftovers += [path for path in weights.glob("*") if WEIGHTS.fullmatch(path.name)]
    for path in leftovers:
        discard(path)


def set_aside(folder: Path, step: int, resumed: str = "latest") -> list[Path]:
    """Renames the checkpoints after `step` to step_N.abandoned (.abandoned2, ...), so that "latest"
    ignores them: a run that resumes from an earlier step abandons that branch. The checkpoint of
    `step` itself is renamed too if the run resumes from another one of that step, such as
    step_N.abandoned. Returns the new paths."""
    moved = []
    for path in checkpoints_in(folder):
        is_source = resumed == "latest" or path.resolve() == Path(resumed).resolve()
        if number_of(path) > step or (number_of(path) == step and not is_source):
            moved.append(path.rename(free_name(path, ".abandoned")))
    return moved


def free_name(path: Path, suffix: str) -> Path:
    """The first free name of step_N.abandoned, step_N.abandoned2, ..., if suffix=".abandoned"."""
    name = path.with_suffix(suffix)
    tries = 1
    while os.path.lexists(name):  # a link that leads nowhere takes a name too
        tries += 1
        name = path.with_suffix(f"{suffix}{tries}")
    return name


def prepare_folder(config: dict, step: int, parameters) -> str:
    """Puts a run's folder in order before the run goes on from `step`. Returns sentences for the
    console: what was renamed, and what checkpoints the run will write."""
    folder = Path(config["output_dir"])
    tidy(folder)
    sentences = []
    for path in set_aside(folder, step, config["resume_from_checkpoint"]):
        sentences.append(f"the run goes on from an earlier checkpoint: {path.stem} is now {path}")
        # start a new run on Weights & Biases: it accepts no step twice
        (folder / "wandb_id").unlink(missing_ok=True)
    source = Path(config["resume_from_checkpoint"])
    name = re.fullmatch(r"(step_\d+)\.abandoned\d*", source.name)
    if name and source.resolve().parent == folder.resolve():
        # this branch is the run's again, so "latest" and a requeued job must find it
        path = source.rename(folder / name[1])
        sentences.append(
            f"the run goes on from {source.name}, now {path} again; metrics and evaluations up "
            f"to step {step} may be those of the other branch"
        )
    sentences.append(forecast(config, parameters))
    return "\n".join(sentences)


def forecast(config: dict, parameters) -> str:
    """A sentence about the checkpoints to come: where, how often, how large, and how many seconds
    each takes, estimated by a short trial of the disk. parameters: policy.ParameterCounts."""
    if config["save_steps"] < 0:
        return "checkpoints: none (save_steps=-1)"
    folder = Path(config["output_dir"])
    size = checkpoint_bytes(config, parameters)
    seconds = size * trial_seconds(folder) / TRIAL_BYTES  # if the disk keeps up its speed
    often = "at the end"
    if config["save_steps"]:
        often = f"every {config['save_steps']} steps and at the end"
    kept = "all are kept"
    if config["save_total_limit"]:
        kept = f"the newest {config['save_total_limit']} are kept"
        if config["keep_every"] and config["save_steps"]:
            kept += f", and those of every {config['keep_every']} steps"
    return (
        f"checkpoints: {config['checkpoint_mode']}, about {memory_text(size)} and "
        f"{seconds:.0f} s each, {often}, in {folder}/step_*; {kept}; "
        f"{free_gib(folder):.0f} GiB free"
    )


def checkpoint_bytes(config: dict, parameters) -> int:
    """Bytes of a checkpoint: all weights (twice if "full": DeepSpeed's and Hugging Face's), and the
    optimizer's state. parameters: policy.ParameterCounts."""
    from policy import dtype_of

    itemsize = dtype_of(config).itemsize
    files = 1 if config["checkpoint_mode"] == "shallow" else 2  # DeepSpeed's, Hugging Face's
    state = parameters.trained * state_bytes(config, itemsize)
    return parameters.all * itemsize * files + state


def free_gib(folder: Path) -> float:
    return shutil.disk_usage(folder).free / 2**30


def trial_seconds(folder: Path) -> float:
    """Seconds that it takes to write and hash TRIAL_BYTES."""
    trial = folder / TRIAL_SAVE
    start = time.perf_counter()
    try:
        with open(trial, "wb", opener=open_no_link) as file:
            file.write(os.urandom(TRIAL_BYTES))  # random, else a disk that compresses looks fast
            file.flush()
            os.fsync(file.fileno())  # else only the page cache would be measured
        file_hash(trial)  # a save hashes its files too
    except OSError as error:
        raise UserError(
            f"output_dir={str(folder)!r}: a trial file of 16 MiB could not be written there "
            f"({error.strerror})"
        ) from None
    finally:
        trial.unlink(missing_ok=True)
    return time.perf_counter() - start


# --- save


def save(state: TrainerState, engine, tokenizer, config: dict, trained: set[str] | None) -> Path:
    """Writes output_dir/step_N, then prunes older checkpoints (save_total_limit, keep_every).
    Returns the path. All ranks call it together. RunStopped if it can't be written; earlier
    checkpoints then stay as they are.

    trained: prompts.prompt_keys() of all prompts that the model could be trained on; None if they
    are unknown."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    path = Path(config["output_dir"]) / f"step_{state.step:06d}"
    tmp = path.with_suffix(".tmp")
    with stops_if_unwritten(path):
        if rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)  # an unfinished save of the same step
            # without parents: if output_dir is gone, the save must fail, not make a new one
            tmp.mkdir()
        dist.barrier()  # nobody writes before rank 0 has made the folder
        engine.save_checkpoint(str(tmp), tag="engine", save_latest=False, client_state=CONVERTIBLE)
        torch.save(torch.get_rng_state(), tmp / f"rng_{rank}.pt")  # of the CPU's generator
        write_model(tmp, engine.module.lm, state.step, config)
        if rank == 0:
            tokenizer.save_pretrained(tmp)
            (tmp / "controller_state.json").write_text(json.dumps(state._asdict()))
            (tmp / "train_config.json").write_text(json.dumps(config, indent=1))
            write_trained(tmp, trained)
        dist.barrier()  # the manifest lists every rank's files
        if rank == 0:
            (tmp / "manifest.json").write_text(json.dumps(manifest_of(tmp), indent=1))
            put_in_place(tmp, path)
            # only now: until the new one is whole, an old one may be the last
            prune(path.parent, config["save_total_limit"], config["keep_every"])
        dist.barrier()
    return path


@contextmanager
def stops_if_unwritten(path: Path, cure: str = ""):
    """RunStopped, with a sentence, if the folder `path` can't be written in this context. cure: the
    end of that sentence, if `path` is not a checkpoint of a run."""
    try:
        yield
    except Exception as error:
        # any Exception: for a full disk torch, safetensors and DeepSpeed each raise their own
        if lost_a_rank(error):
            raise  # the disk is not to blame; common.script prints what is
        raise RunStopped(not_written(path, error, cure)) from error


def not_written(path: Path, error: Exception, cure: str) -> str:
    folder = path.parent
    if not folder.is_dir():
        return gone(folder)
    return (
        f"{path} could not be written ({error_text(error)}; {free_gib(folder):.1f} GiB are free "
        f"there); {cure or how_to_go_on(folder)}"
    )


def how_to_go_on(folder: Path) -> str:
    """The end of a sentence about a run that has ended too early."""
    saved = checkpoints_in(folder)
    if not saved:
        return (
            "no checkpoint had been saved (save_steps): start again with "
            "--overwrite_output_dir=True"
        )
    return f"go on from {saved[-1]} with --resume_from_checkpoint=latest"


def gone(folder: Path) -> str:
    return (
        f"output_dir={str(folder)!r} is gone or another folder now: it was deleted or renamed "
        f"while the run wrote to it; if it was renamed, it still holds what was saved, and later "
        f"steps are lost"
    )


def write_model(folder: Path, lm, step: int, config: dict) -> None:
    """Writes the Hugging Face model, or only its configs if the checkpoint is "shallow" and not the
    last. All ranks gather the weights together, rank 0 writes."""
    import torch.distributed as dist

    from policy import model_weights, save_adapter

    rank = dist.get_rank()
    save_adapter(folder / "adapter", lm, config["zero_stage"], rank)
    # with the configs, export() can rebuild the model from DeepSpeed's shards
    if config["checkpoint_mode"] == "shallow" and step < config["max_steps"]:
        if rank == 0:
            lm.config.save_pretrained(folder)
            lm.generation_config.save_pretrained(folder)
        return
    weights = {}
    for name, tensor in model_weights(lm, config["zero_stage"]):  # all ranks: ZeRO-3 gathers
        if rank == 0:
            weights[name] = tensor.cpu()  # a GPU may have no room for a second model
    if rank == 0:
        lm.save_pretrained(folder, state_dict=weights)


def put_in_place(tmp: Path, path: Path) -> None:
    """Renames the finished folder to its final name, replacing an earlier save of this step."""
    flush(tmp, *tmp.rglob("*"))  # first: the final name promises that everything is on the disk
    old = None
    if os.path.lexists(path):
        # not .old, which tidy() deletes: if we are killed here, this is the only save of the step
        old = path.rename(free_name(path, ".abandoned"))
    tmp.rename(path)
    flush(path.parent)  # the rename itself
    if old:
        discard(old, aside=free_name(path, ".old"))


def flush(*paths: Path) -> None:
    """Waits until these files and folders are on the disk, not only in the page cache."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # for a folder: the names in it
        finally:
            os.close(handle)


# --- find and load


def resumes_in_place(c: dict) -> bool:
    """Whether the run goes on in the folder of its checkpoint: False if it has no checkpoint, or
    another run's. Reads no weights. UserError if the checkpoint is missing or not whole, or if
    max_steps leaves nothing to train."""
    path = asked_for(c)
    if path is None:
        return False
    goes_on = path.resolve().parent == Path(c["output_dir"]).resolve()
    # 0: a finished run may be started again, to find that it is done; a new run needs steps to do
    check_steps(path, c, least=0 if goes_on else 1)
    return goes_on


def asked_for(c: dict, check=verify_sizes, silent: bool = True) -> Path | None:
    """The checkpoint that resume_from_checkpoint asks for, None for a fresh run. UserError if it is
    missing or not whole. check, silent: see latest(). The default check is quick, because find()
    reads the contents later."""
    resume_from = c["resume_from_checkpoint"]
    if not resume_from:
        return None
    if resume_from == "latest":
        path = latest(c["output_dir"], check, silent)
        if path is None:
            raise UserError(
                f"resume_from_checkpoint='latest': output_dir={c['output_dir']!r} holds no whole "
                f"checkpoint (step_*)"
            )
        return path
    if not Path(resume_from).is_dir():
        raise UserError(
            f"resume_from_checkpoint={resume_from!r} is not a folder{near_path(resume_from)}"
        )
    problem = check(resume_from)
    if problem:
        problem = taken_for_checkpoint(Path(resume_from)) or problem
        raise UserError(f"resume_from_checkpoint={resume_from!r}: {problem}")
    return Path(resume_from)


def taken_for_checkpoint(folder: Path) -> str:
    """A sentence that says what to name instead of a run's folder; "" if `folder` is not one."""
    checkpoints = checkpoints_in(folder)
    if not checkpoints:
        return ""
    return f"this is the folder of a run: name a checkpoint in it, such as {checkpoints[-1]}"


def check_steps(path: Path, c: dict, least: int) -> None:
    """UserError if fewer than `least` steps are left after a checkpoint."""
    step = steps_done(path)
    if c["max_steps"] - step < least:
        raise UserError(
            f"{path} has {step} steps done, and max_steps={c['max_steps']}: set a larger max_steps "
            f"to go on, or name an earlier checkpoint in resume_from_checkpoint"
        )


def steps_done(path: Path) -> int:
    """Finished steps of a checkpoint, read from its file because the folder may have any name. 0 if
    that file is damaged: find() reports it."""
    try:
        return int(read_state(path)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return 0


def find(config: dict) -> Path | None:
    """The checkpoint that resume_from_checkpoint asks for, None for a fresh run. UserError if any
    rank finds it damaged, or if this config can't go on from it. All ranks call it together."""
    path = asked_for(config, verify_together, silent=False)
    if path is not None:
        check_resumable(path, config)
    return path


def changes(path: Path, config: dict) -> str:
    """One sentence about the settings that differ from those that a checkpoint was made with,
    except NOT_REPORTED; "" if there are none."""
    before = as_read_back(settings_of(path))
    known = read_table(path / "train_config.json")  # it may be older than some of the keys
    changed = {}
    for key, value in as_read_back(config).items():
        if key in known and before[key] != value and key not in NOT_REPORTED:
            changed[key] = f"{key} {before[key]!r} -> {value!r}"
    if not changed:
        return ""
    said = f"changed since {path}: {', '.join(changed.values())}"
    measured = MEASURED if "name" in config["eval_dataset"] else ("dataset", *MEASURED)
    if config["eval_steps"] > 0 and any(key in changed for key in measured):
        # the table at the end and curves.png show the first evaluation beside the last
        said += "; eval/* from here on measure something else than before"
    return said


def check_resumable(path: Path, config: dict) -> None:
    """UserError if a run of this config can't go on from a checkpoint. Reads only small files."""
    check_fit(path, config)
    check_convertible(path, config)
    check_state(path, config)


def settings_of(path: Path) -> dict:
    """The config that a checkpoint was made with, under today's keys: keys newer than the
    checkpoint have their defaults, keys that no longer exist are left out. UserError if a value has
    the wrong type."""
    file = path / "train_config.json"
    config = default_config()
    known = {}
    for name, value in read_table(file).items():
        today = RENAMED.get(name, name)
        if today.partition(".")[0] in config:
            known[today] = value
    return merge(config, known, str(file))


def read_table(file: Path) -> dict:
    """The object in one of a checkpoint's JSON files. UserError if it holds none."""
    try:
        table = json.loads(file.read_text())
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise damaged(file)
    return table


def read_state(path: Path) -> dict:
    """A checkpoint's controller_state.json, for a TrainerState. Older files have no hashes."""
    return {"prompts_hash": "", "answers_hash": ""} | read_table(path / "controller_state.json")


def damaged(file: Path, what: str = "") -> UserError:
    return UserError(f"{file} is damaged: it is not what a run saves{what}")


def holds_model(path: Path) -> bool:
    """Whether a checkpoint is a Hugging Face model too: a "shallow" one is not."""
    return (path / "config.json").exists() and any(path.glob("*.safetensors*"))


def ranks_of(path: Path) -> int:
    """The number of ranks that saved a checkpoint."""
    return len(list(path.glob("rng_*.pt")))


def new_run_from(path: Path) -> str:
    """The end of a sentence about a checkpoint that this run can't go on from."""
    if holds_model(path):
        return f"start a new run from its weights: --model={path} --output_dir=..."
    return (  # "shallow"
        f"start a new run from its weights: python checkpoint.py export {path} OUT, then "
        f"--model=OUT --output_dir=..."
    )


def check_fit(path: Path, config: dict) -> None:
    """UserError if this config can't go on from a checkpoint's optimizer state."""
    from policy import dtype_of, seed_classes

    saved = settings_of(path)
    model = read_table(path / "config.json")
    dtype = str(dtype_of(config)).removeprefix("torch.")
    pairs = {
        "zero_stage": (saved["zero_stage"], config["zero_stage"]),
        "optimizer": (saved["optimizer"], config["optimizer"]),
        "optimizer_options.amsgrad": (amsgrad(saved), amsgrad(config)),
        "dtype": (model.get("dtype", dtype), dtype),
        "lora_rank": (saved["lora_rank"], config["lora_rank"]),
        "seeds of a trained head": (seed_classes(saved), seed_classes(config)),
    }
    for name, (was, now) in pairs.items():
        if was != now:
            raise UserError(
                f"{path} was saved with {name}={was!r}, on which its optimizer's state depends, "
                f"and this run has {now!r}: go on with {was!r}, or {new_run_from(path)}"
            )


def check_convertible(path: Path, config: dict) -> None:
    """UserError if ZeRO's shards were saved by another number of ranks and can't be converted:
    DeepSpeed's universal format holds exactly the two moments of Adam."""
    saved, now = ranks_of(path), launched_ranks()
    two_moments = config["optimizer"] == "adamw" and not amsgrad(config)
    if config["zero_stage"] and saved != now and not two_moments:
        options = config["optimizer_options"]
        raise UserError(
            f"{path} was saved by {saved} ranks and this run has {now}: with "
            f"optimizer={config['optimizer']!r}, optimizer_options={options!r} and "
            f"zero_stage={config['zero_stage']} only {saved} can resume it; or "
            f"{new_run_from(path)}"
        )


def amsgrad(config: dict) -> bool:
    """Whether AdamW keeps a third number for each weight."""
    return bool(config["optimizer_options"].get("amsgrad"))


def check_state(path: Path, config: dict) -> None:
    """UserError if a checkpoint's controller_state.json is not of the form that save() writes."""
    file = path / "controller_state.json"
    saved = read_state(path)
    example = TrainerState(0, controllers.init_state(config), {})._asdict()
    if isinstance(saved.get("controllers"), dict):
        check_controllers(path, saved["controllers"], example["controllers"])
    try:
        if saved["replay"]:  # as many prompts as the file has, each with at least one visit
            prompts = {key: [1, 0.0, 0.0] for key in saved["replay"]["prompts"]}
            example["replay"] = {"total": 1, "prompts": prompts}
    except (KeyError, TypeError):
        raise damaged(file) from None
    if not alike(saved, example):
        raise damaged(file)
    variances = [v for _, _, v in saved["replay"].get("prompts", {}).values()]
    variances += saved["controllers"]["meta"]["v"]
    if min(variances) < 0:  # stream.py and controllers.py take their square roots
        raise damaged(file)


def check_controllers(path: Path, saved: dict, example: dict) -> None:
    """UserError that names the entry in which the controllers of a checkpoint differ in form from
    those of controllers.init_state, to which a user may have added one."""
    file = path / "controller_state.json"
    if missing := example.keys() - saved.keys():
        raise UserError(
            f"{file} lacks {', '.join(sorted(missing))}, which controllers.init_state has: older "
            f"code wrote it; go on with that code, or {new_run_from(path)}"
        )
    for key, form in example.items():
        if not alike(saved[key], form):
            raise damaged(
                file,
                f" (controllers.{key}={quoted(saved[key])}, controllers.init_state has {form!r})",
            )


def alike(value, example) -> bool:
    """Whether a value that was read from a file has the form of an example: its keys, lengths and
    types. In the example an int stands for any int that is not smaller, a float for any number but
    NaN, a text for any text, None for null or a finite float. An int too large for a float fits
    nothing."""
    if type(value) is int and abs(value) > sys.float_info.max:
        return False
    if isinstance(example, dict):
        keys = isinstance(value, dict) and value.keys() >= example.keys()
        return keys and all(alike(value[key], example[key]) for key in example)
    if isinstance(example, list):
        same = isinstance(value, list) and len(value) == len(example)
        return same and all(map(alike, value, example))
    if type(example) is int:
        return type(value) is int and value >= example
    if isinstance(example, float):
        return type(value) in (int, float) and value == value
    if isinstance(example, str):
        return isinstance(value, str)
    return value is None or (type(value) is float and math.isfinite(value))


def check_model(path: Path, model_config) -> None:
    """UserError if a checkpoint's model has another shape than this run's. model_config: this
    run's, in Hugging Face's form. DeepSpeed would report other shapes too, but only after loading
    everything, and tensor by tensor."""
    saved = read_table(path / "config.json")
    for name in SHAPE:
        now = getattr(model_config, name, None)
        if name in saved and saved[name] != now:
            raise UserError(
                f"{path} is of a model with {name}={saved[name]!r}, and this run's has {now!r}: "
                f"set --model to the one it was trained from, or start without this checkpoint"
            )


def load(path: Path, engine, folder: Path) -> TrainerState:
    """Loads parameters and optimizer into `engine` and the random state into torch. Returns the
    rest.

    With the number of ranks that saved it, the run continues bit for bit. With another number,
    ZeRO's shards are converted to DeepSpeed's universal format, and the run continues up to
    rounding. folder: output_dir, which holds the converted shards meanwhile; no other run uses
    it."""
    import torch.distributed as dist

    rank = dist.get_rank()
    saved_ranks = ranks_of(path)
    with no_code(), options_kept(engine.optimizer):
        # without ZeRO every rank has everything, so nothing needs converting
        if saved_ranks == dist.get_world_size() or engine.zero_optimization_stage() == 0:
            loaded, _ = engine.load_checkpoint(str(path), tag="engine")
        else:
            loaded, _ = load_universal(path, engine, folder)
    if loaded is None:
        raise UserError(
            f"resume_from_checkpoint: DeepSpeed found nothing to load in {path / 'engine'}"
        )
    # %: if there are more ranks than saved it, some start with the same random state
    set_random_state(path / f"rng_{rank % saved_ranks}.pt")
    saved = read_state(path)
    return TrainerState(**{name: saved[name] for name in TrainerState._fields})


def set_random_state(file: Path) -> None:
    """Sets torch's random state to that of a checkpoint. UserError if the file does not hold
    one."""
    import torch

    try:
        torch.set_rng_state(torch.load(file, weights_only=True))
    except (FileNotFoundError, TypeError, RuntimeError):  # not a tensor of bytes, or a wrong size
        raise damaged(file) from None


@contextmanager
def options_kept(optimizer):
    """Restores the optimizer's options and gradient clipping when the context ends. A checkpoint
    loaded inside brings its own, but those of this run's config must hold."""
    wanted = [dict(group) for group in optimizer.param_groups]
    clip = getattr(optimizer, "clip_grad", None)  # only some of DeepSpeed's optimizers have it
    yield
    for group, options in zip(optimizer.param_groups, wanted, strict=True):
        group.update(options | {"params": group["params"]})
    if clip is not None:
        optimizer.clip_grad = clip


def load_universal(path: Path, engine, folder: Path) -> tuple:
    """Loads shards that another number of ranks saved: rank 0 converts them first, inside `folder`.
    Returns what engine.load_checkpoint returns."""
    import torch.distributed as dist

    rank = dist.get_rank()
    converted = folder / CONVERTED
    if rank == 0:
        if os.path.lexists(converted):  # a killed run's, or a link to somewhere else
            delete(converted)
        problem = convert_apart(path / "engine", converted / "engine")
        if problem:
            if os.path.lexists(converted):
                discard(converted)
            raise RunStopped(
                f"{path} could not be converted for {dist.get_world_size()} rank(s) in {folder}: "
                f"{problem}"
            )
    dist.barrier()
    engine._config.load_universal_checkpoint = True  # for this one call
    loaded = engine.load_checkpoint(str(converted), tag="engine")
    engine._config.load_universal_checkpoint = False
    separate_step_counts(engine.optimizer.optimizer)
    dist.barrier()
    if rank == 0:
        discard(converted)
    return loaded


def separate_step_counts(optimizer) -> None:
    """Gives every parameter of torch's optimizer a step count of its own, on the parameter's
    device. From converted shards DeepSpeed loads a single one, on the CPU, for all of them: on a
    GPU a fused AdamW refuses it, and under ZeRO 3 every group of parameters would add 1 to it in
    each step."""
    import torch

    for parameter, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(parameter.device, copy=True)


def convert_apart(shards: Path, out: Path) -> str:
    """Runs convert() in a process of its own, because it forks workers. Returns "" or its error."""
    env = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE"):  # the process is not a rank of this run
        env.pop(name, None)
    command = [sys.executable, __file__, "convert", shards, out]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode == 0:
        return ""
    # the last line of a traceback is the error; a process that was killed prints nothing
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"its process ended with status {done.returncode}"


def convert(shards: str, out: str) -> None:
    """Converts a checkpoint's shards to DeepSpeed's universal format."""
    from deepspeed.checkpoint import ds_to_universal

    # parse_arguments reads sys.argv only
    sys.argv = ["ds_to_universal", "--input_folder", shards, "--output_folder", out]
    with no_code():
        ds_to_universal.main(ds_to_universal.parse_arguments())


# --- push_to_hub: uploads full checkpoints to the Hugging Face hub, in the background


class Upload(NamedTuple):
    path: Path  # the checkpoint
    copy: Path  # a folder with the model's files, deleted after the upload
    future: Future


class Hub:
    """Uploads checkpoints in the background, in the single thread of HfApi's executor.

    Python waits for that thread when it exits. So a run that must not wait for its upload leaves
    through leave() or common.die(), and one that crashes through crash()."""

    def __init__(self, repo: str, folder: Path):
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # they would garble ours
        self.api = HfApi()
        self.folder = Path(folder)
        self.upload = None  # the latest Upload whose result was not taken yet
        sys.excepthook = crash
        try:
            self.repo = self.api.create_repo(repo, private=True, exist_ok=True).repo_id
        except Exception as error:
            # huggingface_hub and its HTTP library raise many kinds: no token, network, rights, ...
            raise UserError(
                f"push_to_hub={repo!r}: the hub does not let us make or use this repository: "
                f"{in_one_line(error, 300)}; set HF_TOKEN to a token that may write, or "
                f'push_to_hub to ""'
            ) from None

    def push(self, path: Path, last: bool = False) -> None:
        """Starts to upload a checkpoint. While an earlier upload is under way this one is skipped,
        unless it is the last."""
        if not holds_model(path):
            return
        if self.upload and not self.upload.future.done() and not last:
            print_above_bar(
                f"not pushed: {path}, because {self.upload.path.name} is still being uploaded"
            )
            return
        self.finish(stop=False)  # report the upload before this one, and delete its copy
        copy = self.folder / f"push_{path.name}.tmp"
        try:
            link_model(path, copy)
            future = self.api.upload_folder(
                repo_id=self.repo,
                folder_path=copy,
                commit_message=path.name,
                run_as_future=True,
            )
        except OSError as error:  # finish() reports it like an error of the upload
            future = Future()
            future.set_exception(error)
        self.upload = Upload(path, copy, future)

    def finish(self, stop: bool = True) -> None:
        """Waits for the upload that is under way. A failed upload is a warning, or with `stop` a
        RunStopped; the checkpoint itself is still on the disk."""
        if not self.upload:
            return
        path, copy, future = self.upload
        self.upload = None
        try:
            commit = future.result(UPLOAD_SECONDS)
            print_above_bar(f"pushed {path} to {in_one_line(commit.commit_url)}")
        except Exception as error:  # of huggingface_hub, its HTTP library, the operating system
            sentence = f"{path} was not pushed to {self.repo}: {error_text(error)}"
            if stop:
                raise RunStopped(f"{sentence}; by hand: hf upload {self.repo} {path}") from None
            print_above_bar(f"warning: {sentence}")
        finally:
            shutil.rmtree(copy, ignore_errors=True)  # hard links: the checkpoint keeps its files

    def abandon(self) -> bool:
        """Reports that the upload under way will be cut off; False if there is none."""
        if not self.upload or self.upload.future.done():
            return False
        print_above_bar(
            f"not pushed: {self.upload.path}, because the run ends before it is uploaded"
        )
        return True

    def leave(self) -> None:
        """Ends the process if an upload is still under way, instead of waiting for it. Otherwise
        reports how the last upload ended, and returns."""
        if self.abandon():
            sys.stdout.flush()
            os._exit(0)
        self.finish(stop=False)


def crash(*error) -> None:
    """An excepthook: prints the traceback and ends the process at once, because an upload under way
    would keep the other ranks waiting."""
    sys.__excepthook__(*error)
    sys.stdout.flush()
    os._exit(1)


def link_model(path: Path, copy: Path) -> None:
    """Links the model's files of a checkpoint into the folder `copy`, because the checkpoint itself
    may be pruned before they are uploaded. Copies them if the file system has no hard links."""

    def link(file: str, other: str) -> None:
        try:
            os.link(file, other)
        except OSError:
            shutil.copy2(file, other)

    def private(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith(PRIVATE)]

    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy, copy_function=link, ignore=private)


# --- export, and the command line


def engine_weights(path: Path) -> dict:
    """{name: tensor} of the language model, from DeepSpeed's shards of any ZeRO stage and number of
    ranks."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    file = path / "engine" / "mp_rank_00_model_states.pt"
    if file.exists():  # below stage 3 this file of rank 0 holds all weights
        state = torch.load(file, map_location="cpu", weights_only=True)["module"]
    else:
        with no_code():
            state = get_fp32_state_dict_from_zero_checkpoint(str(path), "engine")
    weights = {}
    for name, tensor in state.items():
        if name.startswith("lm."):  # not InfoSeed's head
            weights[name.removeprefix("lm.")] = tensor
    return weights


def model_of(path: Path, config: dict):
    """The language model of a checkpoint, from DeepSpeed's shards. config: settings_of(path)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from policy import add_adapters

    with torch.device("meta"):  # shapes only, no memory
        lm = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path, trust_remote_code=False)
        )
        if config["lora_rank"]:
            add_adapters(lm, config["lora_rank"], base=config["model"])
    dtype = lm.dtype if config["dtype"] == "auto" else getattr(torch, config["dtype"])
    saved = engine_weights(path)
    weights = {}
    for name, _ in lm.named_parameters():
        if name not in saved:
            raise UserError(f"export: {path / 'engine'} has no {name}")
        weights[name] = saved[name].to(dtype)  # at stage 3 the shards are float32
    # not strict: `weights` holds tied weights once, the model expects them under both names
    lm.load_state_dict(weights, strict=False, assign=True)
    lm.tie_weights()  # assign=True has replaced only one of the two
    return lm


def export(path, out) -> None:
    """Makes the Hugging Face folder `out` from a checkpoint, even from a "shallow" one. UserError
    if the checkpoint is not whole or holds code, or if `out` exists already."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from policy import drop_unsavable, model_weights, save_adapter

    logging.disable_progress_bar()  # it would be of one file
    path = Path(path)
    out = Path(out)
    tmp = Path(f"{out}.tmp")
    for folder in (out, tmp):  # never write into somebody's folder
        if folder.exists():
            raise UserError(f"export: {folder} exists already: name a new folder")
    problem = verify(path) or code_in(path)
    if problem:
        raise UserError(f"export: {problem}")
    config = settings_of(path)
    if config["dtype"] not in CHOICES["dtype"]:
        raise damaged(path / "train_config.json")
    trained = read_trained(path)
    if trained is None:
        print(
            f"warning: {path} has no list of its training prompts ({TRAINED}), so evaluate.py "
            f"can't warn when it evaluates on them"
        )
    lm = model_of(path, config)
    weights = dict(model_weights(lm, 0))
    parameters = sum(tensor.numel() for tensor in weights.values())
    sentence = f"{out}: {len(weights)} tensors, {parameters / 1e6:.2f}M parameters"
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    drop_unsavable(lm)
    with stops_if_unwritten(tmp, f"make room and remove {tmp}"):
        lm.save_pretrained(tmp, state_dict=weights)  # this empties `weights`
        # the checkpoint's own: it may have stop tokens that config.json lacks
        if (path / "generation_config.json").exists():
            shutil.copy(path / "generation_config.json", tmp)
        save_adapter(tmp / "adapter", lm, 0, 0)
        tokenizer.save_pretrained(tmp)
        write_trained(tmp, trained)
        tmp.rename(out)  # whole or absent, like a checkpoint
    print(sentence)


USAGE = (
    "usage: python checkpoint.py export RUN/step_N OUT   or   "
    "python checkpoint.py verify RUN/step_N"
)


def main(argv) -> None:
    command = argv[0] if argv else ""
    if command == "export" and len(argv) == 3:
        export(argv[1], argv[2])
    elif command == "convert" and len(argv) == 3:  # convert_apart calls it
        convert(argv[1], argv[2])
    elif command == "verify" and len(argv) == 2:
        problem = verify(argv[1])
        print(in_one_line(problem) or f"{argv[1]} is whole")
        sys.exit(bool(problem))  # status 1, for scripts
    else:
        raise UserError(USAGE)


if __name__ == "__main__":
    script(main)
