"""One checkpoint: under kill -9, full disks, damage and strangers' writing; which are found, kept,
removed."""

import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import child
import pytest
import torch
from deadlines import PATIENCE
from strangers import RunsCode, replaced
from transformers import AutoConfig, AutoModelForCausalLM

import checkpoint
import common
import controllers
import ranks
import sft
from common import RunStopped, UserError, load_config
from policy import ParameterCounts
from server.disk import run_name

TOGETHER = checkpoint.verify_together  # the fixture `alone` puts another in its place


class FakeEngine:
    """Stands in for DeepSpeed's engine: its shards are two files of a few hundred kB."""

    def __init__(self, model: Path):
        self.module = SimpleNamespace(lm=AutoModelForCausalLM.from_pretrained(model))

    def save_checkpoint(self, folder, tag, save_latest, client_state):
        path = Path(folder) / tag
        path.mkdir()
        for name in ("a.pt", "b.pt"):
            torch.save(torch.rand(100_000), path / name)


GROUP_OF_ONE = {"get_rank": lambda: 0, "get_world_size": lambda: 1, "barrier": lambda: None}


@pytest.fixture
def alone(monkeypatch):
    """A process group of one, without torch.distributed."""
    for name, answer in GROUP_OF_ONE.items():
        monkeypatch.setattr(torch.distributed, name, answer)
    monkeypatch.setattr(checkpoint, "verify_together", checkpoint.verify)


CONFIG = load_config(["--save_total_limit=2"])


def save(folder: Path, step: int, engine, **changes) -> Path:
    config = CONFIG | {"output_dir": str(folder)} | changes
    state = controllers.init_state(config) | {"tau": 0.1 * step}
    memory = checkpoint.TrainerState(step, state, {})
    return checkpoint.save(memory, engine, sft.tiny_tokenizer(), config, {"0" * 16})


def save_again_and_again(folder: Path, notes: Path, model: Path) -> None:
    vars(torch.distributed).update(GROUP_OF_ONE)
    engine = FakeEngine(model)
    for step in itertools.count(1):  # until it is killed
        save(folder, step, engine)
        with open(notes, "a") as file:
            file.write(f"{step}\n")


def quickest_save(folder: Path, engine) -> float:
    """Seconds: of three, because the first one of all is slower and any may be disturbed."""
    seconds = []
    for step in range(1, 4):
        begin = time.monotonic()
        save(folder, step, engine)
        seconds.append(time.monotonic() - begin)
    return min(seconds)


def finished(notes: Path) -> int:
    """The last step that has been noted; it may have been killed before the first word."""
    steps = notes.read_text().split() if notes.exists() else []
    return int(steps[-1]) if steps else 0


def test_kill_9_at_any_instant_of_a_save_loses_no_finished_checkpoint(
    alone, tiny_model_dir, tmp_path
):
    """25 times: a process saves step after step and notes each one that is done; it is killed
    somewhere; what it noted is there and whole."""
    rng = random.Random(0)
    usual = quickest_save(tmp_path, FakeEngine(tiny_model_dir))
    interrupted = 0
    for trial in range(25):
        folder = tmp_path / str(trial)
        notes = tmp_path / f"{trial}.notes"
        folder.mkdir()
        process = child.start(save_again_and_again, folder, notes, tiny_model_dir)
        end = time.monotonic() + PATIENCE
        while not any(folder.iterdir()):  # until it saves
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 3) * usual)
        process.kill()
        assert child.status(process) == -signal.SIGKILL
        path = checkpoint.latest(folder)
        step = checkpoint.number_of(path) if path else 0
        assert step >= finished(notes)
        if path:
            assert json.loads((path / "controller_state.json").read_text())["step"] == step
        interrupted += any(folder.glob("*.tmp"))
        checkpoint.tidy(folder)
        assert not list(folder.glob("*.tmp")) and not list(folder.glob("*.old"))
        shutil.rmtree(folder)
    assert interrupted > 5  # the instants were not all between two saves


def test_a_save_that_is_killed_while_it_replaces_another_leaves_that_one(
    alone, tiny_model_dir, tmp_path, monkeypatch
):
    path = save(tmp_path, 2, FakeEngine(tiny_model_dir))
    rename = Path.rename

    def killed(self, target) -> Path:
        if self.suffix == ".tmp":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2, FakeEngine(tiny_model_dir))
    checkpoint.tidy(tmp_path)  # the next start
    assert checkpoint.verify(tmp_path / "step_000002.abandoned") == "" and not path.exists()
    save(tmp_path, 2, FakeEngine(tiny_model_dir))
    save(tmp_path, 2, FakeEngine(tiny_model_dir))  # not killed: the old one goes
    assert checkpoint.verify(path) == "" and len(list(tmp_path.glob("step_*"))) == 2


def save_with_room_for_300_kb(folder: Path, model: Path, sentence: Path) -> None:
    vars(torch.distributed).update(GROUP_OF_ONE)
    engine = FakeEngine(model)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    try:
        save(folder, 2, engine)
    except RunStopped as error:
        sentence.write_text(str(error))


def test_a_disk_that_is_full_stops_with_a_sentence_and_keeps_the_last_checkpoint(
    alone, tiny_model_dir, tmp_path
):
    """A limit on file size stands in for the full disk: the write fails in the middle of a file
    either way."""
    sentence = tmp_path / "sentence"
    save(tmp_path, 1, FakeEngine(tiny_model_dir))
    process = child.start(save_with_room_for_300_kb, tmp_path, tiny_model_dir, sentence)
    assert child.status(process) == 0
    words = sentence.read_text()
    assert "step_000002 could not be written" in words and "step_000001" in words
    assert "\n" not in words
    assert checkpoint.latest(tmp_path).name == "step_000001"


def test_a_rank_that_dies_in_a_save_does_not_read_as_a_full_disk(
    alone, tiny_model_dir, tmp_path, monkeypatch, capfd
):
    def barrier() -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    monkeypatch.setattr(torch.distributed, "barrier", barrier)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    common.script(lambda argv: save(tmp_path, 1, FakeEngine(tiny_model_dir)))
    error = capfd.readouterr().err
    assert "another rank has died" in error and "could not be written" not in error


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def overwrite(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9] + b"\0" * 9)


@pytest.mark.parametrize(
    "damage, words",
    [(cut, "bytes instead of"), (Path.unlink, "is missing"), (overwrite, "has changed")],
)
def test_truncated_flipped_and_missing_shards_are_passed_over(
    damage, words, alone, tiny_model_dir, tmp_path, capsys
):
    engine = FakeEngine(tiny_model_dir)
    for step in (1, 2):
        save(tmp_path, step, engine)
    damage(tmp_path / "step_000002" / "engine" / "b.pt")
    c = CONFIG | {"output_dir": str(tmp_path), "resume_from_checkpoint": "latest"}
    assert checkpoint.find(c).name == "step_000001" and words in capsys.readouterr().out
    with pytest.raises(UserError, match=words):
        checkpoint.find(c | {"resume_from_checkpoint": str(tmp_path / "step_000002")})
    save(tmp_path, 2, engine)  # the same step again takes its place
    assert checkpoint.find(c).name == "step_000002"
    for step in (1, 2):
        (tmp_path / f"step_00000{step}" / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match="no whole checkpoint"):
        checkpoint.find(c)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"zero_stage": 2}, "zero_stage=0"),
        ({"optimizer": "sgd"}, "optimizer='adamw'"),
        ({"dtype": "bfloat16"}, "dtype='float32'"),
        ({"info_seed_num_seeds": 4, "info_seed_loss_type": "ce"}, "seeds of a trained head=0"),
    ],
)
def test_a_checkpoint_whose_optimizer_does_not_fit_the_config_is_one_sentence(
    changes, words, alone, tiny_model_dir, tmp_path
):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    c = CONFIG | {"output_dir": str(tmp_path), "resume_from_checkpoint": "latest"}
    harmless = {"learning_rate": 1.0, "info_seed_num_seeds": 4, "dtype": "float32"}
    assert checkpoint.find(c | harmless) == path
    with pytest.raises(UserError, match=rf"step_000001 was saved with {words}.*--model="):
        checkpoint.find(c | changes)


def test_who_can_not_go_on_from_a_checkpoint_without_a_model_is_told_to_make_one(
    alone, tiny_model_dir, tmp_path
):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir), checkpoint_mode="shallow")
    words = f"checkpoint.py export {path} OUT, then --model=OUT --output_dir="
    with pytest.raises(UserError, match=words):
        checkpoint.check_fit(path, CONFIG | {"optimizer": "sgd"})


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_what_has_changed_since_the_checkpoint_is_told(alone, tiny_model_dir, tmp_path):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    c = checkpoint.settings_of(path)
    assert checkpoint.changes(path, c) == ""
    elsewhere = {"output_dir": "elsewhere", "resume_from_checkpoint": "latest"}
    assert checkpoint.changes(path, c | elsewhere) == ""
    longer = f"max_steps {c['max_steps']} -> 99"
    assert longer in checkpoint.changes(path, c | elsewhere | {"max_steps": 99})
    said = checkpoint.changes(path, c | {"beta": 0.5, "temperature": {0: 1.0, 9: 0.5}})
    assert said.startswith(f"changed since {path}: ")
    assert f"beta {c['beta']} -> 0.5" in said and "temperature 1.0 -> " in said


def test_a_resume_that_evaluates_something_else_says_so(alone, tiny_model_dir, tmp_path):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    c = checkpoint.settings_of(path) | {"eval_steps": 5}
    words = "eval/* from here on measure something else"
    other = {"dataset": {"name": "other"}}
    assert words in checkpoint.changes(path, c | other)
    assert words in checkpoint.changes(path, c | {"eval_temperature": 0.5})
    assert words not in checkpoint.changes(path, c | {"temperature": 0.5})
    assert words not in checkpoint.changes(path, c | other | {"eval_steps": 0})
    named = {"eval_dataset": {"name": "held_out"}}  # evaluated, whatever is trained on
    path = save(tmp_path, 2, FakeEngine(tiny_model_dir), **named)
    assert words not in checkpoint.changes(path, c | named | other)


def test_a_run_that_goes_on_from_an_earlier_checkpoint_puts_the_later_ones_out_of_sight_of_latest(
    alone, tiny_model_dir, tmp_path
):
    for step in (1, 2, 3):
        save(tmp_path, step, FakeEngine(tiny_model_dir), save_total_limit=0)
    (tmp_path / "step_000003_best").mkdir()  # somebody's own
    assert checkpoint.set_aside(tmp_path, 3) == []
    moved = checkpoint.set_aside(tmp_path, 1)
    assert names(moved) == ["step_000002.abandoned", "step_000003.abandoned"]
    assert checkpoint.latest(tmp_path).name == "step_000001"
    assert checkpoint.verify(tmp_path / "step_000003.abandoned") == ""
    save(tmp_path, 2, FakeEngine(tiny_model_dir))
    checkpoint.prune(tmp_path, 1)
    assert checkpoint.latest(tmp_path).name == "step_000002"  # not pruned as the oldest
    assert names(checkpoint.set_aside(tmp_path, 1)) == ["step_000002.abandoned2"]
    assert (tmp_path / "step_000002.abandoned").exists()
    # going on from a branch that was abandoned abandons the other, of the same step too
    kept = str(tmp_path / "step_000002.abandoned")
    save(tmp_path, 2, FakeEngine(tiny_model_dir))
    assert checkpoint.set_aside(tmp_path, 2, str(tmp_path / "step_000002")) == []
    assert names(checkpoint.set_aside(tmp_path, 2, kept)) == ["step_000002.abandoned3"]


def test_a_run_that_goes_on_from_an_abandoned_branch_takes_the_folder_over_from_the_other(
    alone, tiny_model_dir, tmp_path
):
    path = save(tmp_path, 2, FakeEngine(tiny_model_dir))
    kept = path.rename(tmp_path / "step_000002.abandoned")
    source = checkpoint.manifest_of(kept)
    save(tmp_path, 2, FakeEngine(tiny_model_dir))
    (tmp_path / "wandb_id").write_text("of the other branch")
    c = CONFIG | {"output_dir": str(tmp_path), "resume_from_checkpoint": str(kept)}
    said = checkpoint.prepare_folder(c, 2, ParameterCounts(10, 10))
    assert "step_000002 is now" in said
    assert f"step_000002.abandoned, now {path} again" in said
    # the other branch's is out of sight
    assert checkpoint.latest(tmp_path) == path and checkpoint.manifest_of(path) == source
    assert not (tmp_path / "wandb_id").exists()


def test_ranks_that_see_different_checkpoints_as_the_newest_stop(
    alone, tiny_model_dir, tmp_path, monkeypatch
):
    for step in (1, 2):
        save(tmp_path, step, FakeEngine(tiny_model_dir), save_total_limit=0)
    # another rank, whose node has not seen the last one yet
    other = (str(tmp_path / "step_000001"), "")
    monkeypatch.setattr(ranks, "gather_objects", lambda mine: [mine, other])
    with pytest.raises(RunStopped, match=r"step_000001 and .*step_000002: start again in a minute"):
        checkpoint.latest(tmp_path, TOGETHER)


def test_ranks_share_the_reading_and_together_read_everything(alone, tiny_model_dir, tmp_path):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    for file in sorted(p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json"):
        before = file.read_bytes()
        file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert sum(bool(checkpoint.verify(path, rank, 3)) for rank in range(3)) == 1
        file.write_bytes(before)


def test_what_one_rank_finds_damaged_is_damaged_for_all(
    alone, tiny_model_dir, tmp_path, monkeypatch
):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    overwrite(path / "model.safetensors")
    shares = [(str(path), checkpoint.verify(path, rank, 2)) for rank in range(2)]
    assert sorted(bool(problem) for _, problem in shares) == [False, True]  # one of two reads it
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(ranks, "gather_objects", lambda own: shares)
    found = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        found.append(TOGETHER(path))
    assert "has changed" in found[0] and found[0] == found[1]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    alone, tiny_model_dir, tmp_path, monkeypatch
):
    flushed, synced, real = [], [], checkpoint.flush

    def flush(*paths):
        flushed.append((set(paths), (tmp_path / "step_000001").exists()))
        real(*paths)

    monkeypatch.setattr(checkpoint, "flush", flush)
    monkeypatch.setattr(os, "fsync", synced.append)
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    tmp = path.with_suffix(".tmp")
    (files, named), (folder, named_then) = flushed
    assert files == {tmp, *(tmp / p.relative_to(path) for p in path.rglob("*"))} and not named
    assert folder == {tmp_path} and named_then and len(synced) >= len(files) + 1


def test_a_run_from_another_runs_checkpoint_is_a_run_of_its_own(alone, tiny_model_dir, tmp_path):
    (tmp_path / "theirs").mkdir()
    path = save(tmp_path / "theirs", 1, FakeEngine(tiny_model_dir))
    c = CONFIG | {"resume_from_checkpoint": str(path)}
    assert checkpoint.resumes_in_place(c | {"output_dir": str(tmp_path / "ours")}) is False
    assert checkpoint.resumes_in_place(c | {"output_dir": str(tmp_path / "theirs")}) is True
    # a finished run started again finds itself done; one that would train nothing is a mistake
    c["max_steps"] = 1
    assert checkpoint.resumes_in_place(c | {"output_dir": str(tmp_path / "theirs")}) is True
    with pytest.raises(UserError, match="has 1 steps done, and max_steps=1: set a larger"):
        checkpoint.resumes_in_place(c | {"output_dir": str(tmp_path / "ours")})


def test_a_checkpoint_of_another_model_is_one_sentence(alone, tiny_model_dir, tmp_path):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    model = AutoConfig.from_pretrained(tiny_model_dir)
    checkpoint.check_model(path, model)
    model.num_hidden_layers = 5
    with pytest.raises(UserError, match=r"with num_hidden_layers=2, and this run's has 5: set"):
        checkpoint.check_model(path, model)
    model = AutoConfig.from_pretrained(tiny_model_dir)
    model.tie_word_embeddings = not model.tie_word_embeddings
    with pytest.raises(UserError, match="tie_word_embeddings"):
        checkpoint.check_model(path, model)


@pytest.mark.parametrize("request_of", [lambda path: "latest", str, lambda path: f"{path}_copy"])
def test_going_on_from_more_steps_than_the_run_is_to_have_is_refused_at_once(
    alone, tiny_model_dir, tmp_path, request_of
):
    for step in (3, 9):
        path = save(tmp_path, step, FakeEngine(tiny_model_dir))
    shutil.copytree(path, f"{path}_copy")
    c = CONFIG | {"output_dir": str(tmp_path), "resume_from_checkpoint": request_of(path)}
    assert checkpoint.resumes_in_place(c | {"max_steps": 9}) is True
    with pytest.raises(UserError, match="has 9 steps done, and max_steps=8: set a larger"):
        checkpoint.resumes_in_place(c | {"max_steps": 8})


ZERO = {"zero_stage": 1, "optimizer": "adamw", "optimizer_options": {}}


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "sgd"}, {"optimizer_options": {"amsgrad": True}}],
    ids=["sgd", "amsgrad"],
)
def test_only_an_adam_of_two_moments_goes_on_with_another_number_of_ranks(
    tmp_path, monkeypatch, changes
):
    """DeepSpeed's universal format, into which ZeRO's shards are converted, has just these."""
    for rank in (0, 1):
        (tmp_path / f"rng_{rank}.pt").touch()
    c = CONFIG | ZERO | changes
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    checkpoint.check_convertible(tmp_path, CONFIG | ZERO)
    checkpoint.check_convertible(tmp_path, c | {"zero_stage": 0})
    with pytest.raises(UserError, match="saved by 2 ranks and this run has 1: with optimizer="):
        checkpoint.check_convertible(tmp_path, c)
    monkeypatch.setenv("WORLD_SIZE", "2")
    checkpoint.check_convertible(tmp_path, c)


def test_converted_shards_count_the_steps_of_every_parameter_where_it_is(
    alone, tmp_path, monkeypatch
):
    """A fake of what DeepSpeed leaves after it: one tensor for all of them, on the CPU. "meta"
    stands for a GPU."""
    weights = [torch.zeros(1), torch.zeros(1), torch.zeros(1, device="meta")]
    optimizer = torch.optim.AdamW(weights)

    def load_checkpoint(folder: str, tag: str) -> tuple:
        step = torch.tensor(7.0)
        for weight in weights:
            optimizer.state[weight] = {"step": step, "exp_avg": weight}
        return "loaded", {}

    engine = SimpleNamespace(
        _config=SimpleNamespace(),
        optimizer=SimpleNamespace(optimizer=optimizer),
        load_checkpoint=load_checkpoint,
    )
    monkeypatch.setattr(checkpoint, "convert_apart", lambda shards, out: out.mkdir(parents=True))
    assert checkpoint.load_universal(tmp_path / "step_000007", engine, tmp_path)[0] == "loaded"
    first, second, third = (optimizer.state[weight]["step"] for weight in weights)
    first += 1  # in place, as a step does
    assert (first.item(), second.item(), third.device.type) == (8, 7, "meta")


def test_no_checkpoint_runs_code_whoever_made_it(alone, tiny_model_dir, tmp_path, monkeypatch):
    trace = tmp_path / "trace"
    for step in (1, 2):
        save(tmp_path, step, FakeEngine(tiny_model_dir))
    path = replaced(tmp_path / "step_000002", {"module": RunsCode(trace)})
    problem = checkpoint.code_in(path)
    assert "engine/b.pt is not loaded" in problem and "'posix.mkdir'" in problem
    assert "\n" not in problem
    assert checkpoint.code_in(tmp_path / "step_000001") == ""
    with pytest.raises(UserError, match=r"'posix\.mkdir' would run as code"):
        checkpoint.export(path, tmp_path / "out")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with checkpoint.no_code(), pytest.raises(pickle.UnpicklingError):  # as DeepSpeed asks for it
        torch.load(path / "engine" / "b.pt", weights_only=False)
    assert not trace.exists()
    torch.load(path / "engine" / "b.pt", weights_only=False)  # elsewhere nothing has changed
    assert trace.exists() and os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"


def test_ranks_share_the_search_for_code_and_together_search_everything(
    alone, tiny_model_dir, tmp_path
):
    for shard in ("rng_0.pt", "engine/a.pt", "engine/b.pt"):
        path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
        torch.save({"a": "/a/path"}, path / shard)
        found = [checkpoint.code_in(path, rank, 3) for rank in range(3)]
        assert sum(map(bool, found)) == 1 and shard in "".join(found)


@pytest.mark.parametrize("name", ["../../.ssh/config", "/tmp/x", ".."])
def test_no_shard_names_a_path(name, alone, tiny_model_dir, tmp_path):
    """DeepSpeed makes folders of the names of parameters when the number of ranks has changed."""
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    nest = {"param_shapes": [{"lm.weight": (1,)}, {name: (1,)}]}
    nest["itself"] = nest
    assert f"names a path: {name!r}" in checkpoint.code_in(replaced(path, nest))


def test_a_link_is_nobodys_latest_checkpoint_and_makes_room_for_the_runs_own(
    alone, tiny_model_dir, tmp_path, capsys
):
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"
    for folder, step in ((ours, 1), (theirs, 2)):
        folder.mkdir()
        save(folder, step, FakeEngine(tiny_model_dir))
    (ours / "step_000002").symlink_to(theirs / "step_000002")
    assert checkpoint.latest(ours).name == "step_000001"
    assert f"{ours / 'step_000002'} is a symbolic link" in capsys.readouterr().out
    save(ours, 2, FakeEngine(tiny_model_dir))
    assert not (ours / "step_000002").is_symlink() and checkpoint.verify(ours / "step_000002") == ""
    assert checkpoint.verify(theirs / "step_000002") == ""


@pytest.mark.parametrize("left_out", ["everything", "rng_0.pt", "engine/"])
def test_a_manifest_lists_what_every_checkpoint_has_or_it_is_not_whole(
    left_out, alone, tiny_model_dir, tmp_path
):
    for step in (1, 2):
        save(tmp_path, step, FakeEngine(tiny_model_dir))
    file = tmp_path / "step_000002" / "manifest.json"
    kept = {} if left_out == "everything" else json.loads(file.read_text())
    kept = {name: value for name, value in kept.items() if not name.startswith(left_out)}
    file.write_text(json.dumps(kept))
    assert "manifest.json lists no" in checkpoint.verify(file.parent)
    assert checkpoint.latest(tmp_path).name == "step_000001"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"config.json": [Infinity, ""]}'])
def test_a_manifest_of_nonsense_is_passed_over(text, alone, tiny_model_dir, tmp_path):
    for step in (1, 2):
        save(tmp_path, step, FakeEngine(tiny_model_dir))
    file = tmp_path / "step_000002" / "manifest.json"
    sizes = json.loads(text) | json.loads(file.read_text()) if text[0] == "{" else None
    file.write_text(json.dumps(sizes | json.loads(text)) if sizes else text)
    assert "no readable manifest.json" in checkpoint.verify(file.parent)
    assert checkpoint.latest(tmp_path).name == "step_000001"
    file.unlink()
    os.mkfifo(file)  # to read it would wait for ever
    assert "no readable manifest.json" in checkpoint.verify(file.parent)


def test_what_a_process_that_died_left_is_removed_weights_for_servers_too(tmp_path):
    """Also those of another host, and when the run that goes on has no servers."""
    left = ["step_000002.tmp", "step_000001.old", "push_step_000001.tmp", "universal.tmp"]
    for name in (*left, "weights/elsewhere-1-0123abcd-7", "mine"):
        (tmp_path / name / "engine").mkdir(parents=True)
    (tmp_path / "step_000003.old").symlink_to(tmp_path / "mine")
    checkpoint.tidy(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "weights"]
    assert not any((tmp_path / "weights").iterdir()) and (tmp_path / "mine" / "engine").exists()


def test_weights_go_by_the_names_that_a_run_gives_them_and_never_through_a_link(tmp_path):
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    synced = f"{run_name()}-7"  # as server/engine.py names a sync
    for name in ("my-very-nice-project", synced, f"{synced}.tmp"):
        (theirs / name).mkdir(parents=True)
    run.mkdir()
    (run / "weights").symlink_to(theirs)
    checkpoint.tidy(run)
    assert len(list(theirs.iterdir())) == 3
    (run / "weights").unlink()
    theirs.rename(run / "weights")
    (run / "step_by_step.old").mkdir()  # somebody's own
    checkpoint.tidy(run)
    assert names((run / "weights").iterdir()) == ["my-very-nice-project"]
    assert (run / "step_by_step.old").exists()


def protected(path, ignore_errors: bool = False) -> None:
    if not ignore_errors:
        raise PermissionError(13, "Permission denied", str(path))


def test_an_old_checkpoint_that_can_not_be_deleted_is_a_warning_and_the_save_stands(
    alone, tiny_model_dir, tmp_path, monkeypatch, capsys
):
    engine = FakeEngine(tiny_model_dir)
    for step in (1, 2):
        save(tmp_path, step, engine)
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", protected)
    for _ in range(3):  # of the same step: what it replaces can't be deleted either
        assert checkpoint.verify(save(tmp_path, 3, engine)) == ""
    old = ["step_000001.old", "step_000003.old", "step_000003.old2"]
    for start in ("saves", "the next start"):
        said = capsys.readouterr().out.splitlines()
        for name, line in zip(old, sorted(said), strict=True):
            assert line.startswith(f"warning: {tmp_path / name} is no longer needed"), start
            assert "Permission denied" in line
        checkpoint.tidy(tmp_path)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    checkpoint.tidy(tmp_path)
    assert sorted(names(tmp_path.iterdir())) == ["step_000002", "step_000003"]


def test_the_newest_and_every_nth_are_kept(tmp_path):
    for step in range(10, 100, 10):
        (tmp_path / f"step_{step:06d}").mkdir()
    checkpoint.prune(tmp_path, 2, keep_every=30)
    assert [int(p.name[5:]) for p in checkpoint.checkpoints_in(tmp_path)] == [30, 60, 80, 90]
    checkpoint.prune(tmp_path, 0)
    assert len(checkpoint.checkpoints_in(tmp_path)) == 4


def test_the_report_names_size_frequency_and_place(tmp_path):
    c = CONFIG | {"output_dir": str(tmp_path), "save_steps": 50, "keep_every": 500}
    c["dtype"] = "float32"
    parameters = ParameterCounts(2**30, 2**30)
    text = checkpoint.forecast(c, parameters)
    for words in ("16.00 GiB", "every 50 steps", str(tmp_path), "every 500 steps"):
        assert words in text
    assert "12.00 GiB" in checkpoint.forecast(c | {"checkpoint_mode": "shallow"}, parameters)
    assert "none" in checkpoint.forecast(c | {"save_steps": -1}, parameters)
    assert not list(tmp_path.iterdir())


def test_a_save_keeps_what_the_config_says(alone, tiny_model_dir, tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, FakeEngine(tiny_model_dir), save_total_limit=1, keep_every=3)
    assert names(checkpoint.checkpoints_in(tmp_path)) == ["step_000003", "step_000005"]
