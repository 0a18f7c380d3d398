"""Checkpoints that somebody else, an older version or another number of ranks has made."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_checkpoint import CONFIG, GROUP_OF_ONE, FakeEngine, names, save
from transformers import AutoModelForCausalLM

import checkpoint
from common import RunStopped, UserError
from prompts import TRAINED, read_trained


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process group of one, without torch.distributed."""
    for name, answer in GROUP_OF_ONE.items():
        monkeypatch.setattr(torch.distributed, name, answer)
    monkeypatch.setattr(checkpoint, "verify_together", checkpoint.verify)


def signed(path: Path, name: str, contents) -> Path:
    """A checkpoint with another file, and a manifest that says so."""
    if name.endswith(".pt"):
        torch.save(contents, path / name)
    else:
        (path / name).write_text(json.dumps(contents))
    (path / "manifest.json").write_text(json.dumps(checkpoint.manifest_of(path)))
    return path


@pytest.mark.parametrize(
    "settings, words",
    [
        ({}, ""),
        ({"dataset_name": "rows.jsonl", "weight_decay": 0.1, "adam_beta1": 0.9}, ""),
        ({"optimizer_options": []}, "optimizer_options must be of type dict"),
        ({"dataset": [5]}, "dataset, source 0 must be of type dict"),
        ({"zero_stage": "3"}, "zero_stage must be of type int"),
    ],
)
def test_a_checkpoint_with_other_settings_is_gone_on_from_or_refused_in_one_sentence(
    settings, words, tiny_model_dir, tmp_path
):
    path = signed(save(tmp_path, 1, FakeEngine(tiny_model_dir)), "train_config.json", settings)
    c = CONFIG | {"output_dir": str(tmp_path), "resume_from_checkpoint": "latest"}
    if not words:
        assert checkpoint.find(c) == path
        return
    for work in (
        lambda: checkpoint.find(c),
        lambda: checkpoint.changes(path, c),
        lambda: checkpoint.export(path, tmp_path / "out"),
    ):
        with pytest.raises(UserError, match=f"{path / 'train_config.json'}: {words}"):
            work()


def test_settings_of_an_older_version_are_read_under_todays_keys(tiny_model_dir, tmp_path, capsys):
    older = {"beta": 0.5, "dataset_name": "x", "weight_decay": 0.1}
    gone = {"logprob_chunk_size": 128, "never_heard_of": None}
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    signed(path, "train_config.json", older | gone)
    capsys.readouterr()
    saved = checkpoint.settings_of(path)
    assert saved.keys() == CONFIG.keys() and saved["beta"] == 0.5
    assert saved["dataset"] == {"name": "x"}
    assert saved["optimizer_options"] == {"weight_decay": 0.1}
    # only what it knew: what it is too old to know has not changed
    c = CONFIG | {"max_logp_difference": 9.0}
    assert checkpoint.changes(path, c) == f"changed since {path}: beta 0.5 -> 0.0"
    assert capsys.readouterr().err == ""  # nobody asked for a lesson in old names


def test_a_checkpoint_is_exported_by_its_shards_whatever_its_settings_say(
    tiny_model_dir, tmp_path, capsys
):
    engine = FakeEngine(tiny_model_dir)
    path = save(tmp_path, 1, engine)
    weights = engine.module.lm.state_dict()
    shard = {"module": {f"lm.{name}": tensor for name, tensor in weights.items()}}
    signed(path, "engine/mp_rank_00_model_states.pt", shard)
    signed(path, "train_config.json", {"dtype": "load"})
    with pytest.raises(UserError, match=r"train_config\.json is damaged"):
        checkpoint.export(path, tmp_path / "out")
    signed(path, "train_config.json", {})
    stops = {"eos_token_id": [0, 7]}  # of which config.json says nothing
    signed(path, "generation_config.json", stops)
    checkpoint.export(path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == stops
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert read_trained(tmp_path / "out") == read_trained(path) == {"0" * 16}
    capsys.readouterr()  # what the fixtures printed
    # a checkpoint of an earlier version has no such list
    (path / TRAINED).unlink()
    signed(path, "train_config.json", {})
    checkpoint.export(path, tmp_path / "older")
    assert not (tmp_path / "older" / TRAINED).exists()
    said = capsys.readouterr()
    assert "no list of its training prompts" in said.out
    assert "0%" not in said.err  # a bar of one file
    # one that is no list is not copied
    (path / TRAINED).symlink_to(Path(__file__))
    with pytest.raises(UserError, match=f"{TRAINED} can't be read"):
        checkpoint.export(path, tmp_path / "other")
    assert not list(tmp_path.glob("other*"))


@pytest.mark.parametrize("out", [".", "/", ".."])
def test_a_place_that_is_there_gets_no_export(out, tiny_model_dir, tmp_path):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    with pytest.raises(UserError, match="exists already: name a new folder"):
        checkpoint.main(["export", str(path), out])


def loads(stage: int, asked: list) -> SimpleNamespace:
    """Stands in for DeepSpeed's engine; `asked` gets the folders that it is to load."""

    def load_checkpoint(folder: str, tag: str) -> tuple:
        assert (Path(folder) / tag).exists()
        asked.append(folder)
        return folder, {}

    return SimpleNamespace(
        _config=SimpleNamespace(),
        optimizer=SimpleNamespace(param_groups=[], optimizer=SimpleNamespace(state={})),
        zero_optimization_stage=lambda: stage,
        load_checkpoint=load_checkpoint,
    )


def test_an_export_that_does_not_fit_on_the_disk_is_one_sentence(
    tiny_model_dir, tmp_path, monkeypatch
):
    engine = FakeEngine(tiny_model_dir)
    weights = engine.module.lm.state_dict()
    shard = {"module": {f"lm.{name}": tensor for name, tensor in weights.items()}}
    path = signed(save(tmp_path, 1, engine), "engine/mp_rank_00_model_states.pt", shard)

    def full(lm, folder, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(engine.module.lm), "save_pretrained", full)
    with pytest.raises(RunStopped, match=r"out\.tmp could not be written .*No space left.*; make"):
        checkpoint.export(path, tmp_path / "out")


def test_a_named_pipe_among_the_shards_is_not_waited_for(tiny_model_dir, tmp_path):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    os.mkfifo(path / "engine" / "x.pt")
    assert checkpoint.code_in(path).endswith("x.pt is not a file")


@pytest.mark.parametrize(
    "change", [{"entropy": math.nan}, {"entropy": math.inf}, {"meta": {"v": [-1.0, 0.0]}}]
)
def test_a_controllers_state_that_no_run_saves_is_one_sentence(change, tiny_model_dir, tmp_path):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    c = CONFIG | {"output_dir": str(tmp_path), "resume_from_checkpoint": "latest"}
    checkpoint.check_state(path, c)
    state = checkpoint.read_state(path)
    meta = state["controllers"]["meta"] | change.get("meta", {})
    state["controllers"] |= change | {"meta": meta}
    signed(path, "controller_state.json", state)
    with pytest.raises(UserError, match=r"controller_state\.json is damaged"):
        checkpoint.check_state(path, c)


def test_a_memory_that_has_left_its_form_is_named(tiny_model_dir, tmp_path):
    """As of a rule of one's own that began with 0 and was to remember an average."""
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    state = checkpoint.read_state(path)
    state["controllers"]["skipped"] = 0.125
    signed(path, "controller_state.json", state)
    said = r"\(controllers\.skipped=0\.125, controllers\.init_state has 0\)"
    with pytest.raises(UserError, match=said):
        checkpoint.check_state(path, CONFIG)


def test_a_checkpoint_from_before_a_controller_says_so(tiny_model_dir, tmp_path):
    path = save(tmp_path, 1, FakeEngine(tiny_model_dir))
    c = CONFIG | {"output_dir": str(tmp_path), "resume_from_checkpoint": "latest"}
    state = checkpoint.read_state(path)
    state["controllers"]["of_a_later_one"] = 0.0
    signed(path, "controller_state.json", state)
    checkpoint.check_state(path, c)
    del state["controllers"]["skipped"]
    signed(path, "controller_state.json", state)
    with pytest.raises(UserError, match=r"lacks skipped, .*: older code wrote it; go on with that"):
        checkpoint.check_state(path, c)


@pytest.mark.parametrize("contents", [{}, torch.zeros(3, dtype=torch.uint8)])
def test_a_random_state_that_is_none_is_one_sentence(contents, tiny_model_dir, tmp_path):
    path = signed(save(tmp_path, 1, FakeEngine(tiny_model_dir)), "rng_0.pt", contents)
    with pytest.raises(UserError, match=r"rng_0\.pt is damaged"):
        checkpoint.load(path, loads(0, []), tmp_path)


def test_shards_are_converted_in_the_folder_of_the_run_that_loads_them(
    tiny_model_dir, tmp_path, monkeypatch
):
    """It is locked: two runs that start from one checkpoint would delete each other's."""
    theirs, ours, home = tmp_path / "theirs", tmp_path / "ours", tmp_path / "home"
    for folder in (theirs, ours, home / "engine"):
        folder.mkdir(parents=True)
    path = signed(save(theirs, 1, FakeEngine(tiny_model_dir)), "rng_1.pt", torch.get_rng_state())
    (ours / "universal.tmp").symlink_to(home)
    asked, problems = [], ["", "No space left on device"]

    def convert(shards: Path, out: Path) -> str:
        assert shards == path / "engine"
        out.mkdir(parents=True)
        return problems.pop(0)

    monkeypatch.setattr(checkpoint, "convert_apart", convert)
    assert checkpoint.load(path, loads(3, asked), ours).step == 1
    assert asked == [str(ours / "universal.tmp")]
    with pytest.raises(RunStopped, match=f"1 rank\\(s\\) in {ours}: No space left"):
        checkpoint.load(path, loads(3, asked), ours)
    assert not list(ours.iterdir()) and names(theirs.iterdir()) == ["step_000001"]
    assert (home / "engine").exists()
