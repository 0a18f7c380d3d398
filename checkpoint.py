"""Checkpoints: everything a run needs to continue, in one folder that is either whole or absent.

    output_dir/step_000100/      a Hugging Face model folder (config.json, model.safetensors, tokenizer), and
        engine/                  DeepSpeed's shards: parameters, optimizer, of every rank
        controller_state.json    step, tau, beta and what their controllers remember; the replay buffer
        train_config.json        the resolved config
        rng_0.pt ...             random state of every rank
        manifest.json            size and SHA-256 of every file above

Written to step_000100.tmp, then renamed. Which prompts come next and their sampling seeds follow from (seed, step): nothing to save.
"""
import hashlib
import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from common import UserError
from learner import named_weights


def save(folder: Path, step: int, engine, tokenizer, config: dict, state: dict, replay: dict) -> Path:
    """Writes output_dir/step_N and deletes the oldest over save_total_limit. All ranks call it together; returns the path."""
    rank, path = dist.get_rank(), Path(folder) / f"step_{step:06d}"
    tmp = path.with_suffix(".tmp")
    if rank == 0:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
    dist.barrier()
    engine.save_checkpoint(str(tmp), tag="engine", save_latest=False)
    torch.save(torch.get_rng_state(), tmp / f"rng_{rank}.pt")
    lm, named = engine.module.lm, named_weights(engine.module.lm, config["zero_stage"])
    own = {name for name, _ in lm.named_parameters()}
    weights = {name: tensor.cpu() for name, tensor in named if rank == 0 and name in own}      # every rank runs the gathers
    if rank == 0:
        lm.save_pretrained(tmp, state_dict=weights)
        tokenizer.save_pretrained(tmp)
        (tmp / "controller_state.json").write_text(json.dumps({"step": step, "controllers": state, "replay": replay}))
        (tmp / "train_config.json").write_text(json.dumps(config, indent=1))
    dist.barrier()      # the manifest lists every rank's files
    if rank == 0:
        (tmp / "manifest.json").write_text(json.dumps(manifest_of(tmp), indent=1))
        if path.exists():
            shutil.rmtree(path)
        tmp.rename(path)
        prune(folder, config["save_total_limit"])
    dist.barrier()
    return path


def manifest_of(path: Path) -> dict:
    """{"relative/name": [bytes, sha256]} of all files but the manifest itself."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json")
    return {str(p.relative_to(path)): [p.stat().st_size, file_hash(p)] for p in files}


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path) -> str:
    """"" if the checkpoint is whole, else one sentence about the first thing that is missing or changed."""
    path = Path(path)
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        return f"{path} has no readable manifest.json: {error}"
    for name, (size, digest) in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes instead of {size}"
        if file_hash(file) != digest:
            return f"{file} has changed since it was saved"
    return ""


def steps_of(folder) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(p for p in Path(folder).glob("step_*") if p.is_dir() and p.suffix == "")


def prune(folder: Path, limit: int) -> None:
    for old in steps_of(folder)[:-limit] if limit > 0 else []:
        shutil.rmtree(old)


def latest(folder) -> Path | None:
    """The newest checkpoint of a run folder that verifies, None without one; those passed over are named on the console."""
    for path in reversed(steps_of(folder)):
        problem = verify(path)
        if not problem:
            return path
        print(f"checkpoint passed over: {problem}")
    return None


def find(resume_from: str, folder: str) -> Path | None:
    """The checkpoint that resume_from_checkpoint asks for, None for a fresh run; a UserError if it is not there or damaged."""
    if not resume_from:
        return None
    path = latest(folder) if resume_from == "latest" else Path(resume_from)
    if path is None:
        raise UserError(f"resume_from_checkpoint='latest': output_dir={folder!r} holds no whole checkpoint (step_*)")
    problem = verify(path)
    if problem:
        raise UserError(f"resume_from_checkpoint={resume_from!r}: {problem}")
    return path


def load(path: Path, engine, rank: int) -> tuple[int, dict, dict]:
    """(finished steps, controller state, replay state); parameters, optimizer and random state go into `engine` and torch."""
    saved_world = len(list(path.glob("rng_*.pt")))
    if saved_world != dist.get_world_size():
        raise UserError(f"resume_from_checkpoint: {path} was saved by {saved_world} rank(s) and this run has {dist.get_world_size()}: start as many")
    loaded, _ = engine.load_checkpoint(str(path), tag="engine")
    if loaded is None:
        raise UserError(f"resume_from_checkpoint: DeepSpeed found nothing to load in {path / 'engine'}")
    torch.set_rng_state(torch.load(path / f"rng_{rank}.pt", weights_only=True))
    saved = json.loads((path / "controller_state.json").read_text())
    return saved["step"], saved["controllers"], saved.get("replay", {})
