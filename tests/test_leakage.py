"""The list of the prompts that a model may have learnt: written beside the model, handed on to the
next run, and held against the prompts of an evaluation."""

import errno
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from row_files import check_words, jsonl, refusal

import checkpoint
import controllers
import evaluate
import preflight
import prompts
import sft
import train
from common import load_config
from prompts import (
    TRAINED,
    leakage_warning,
    prompt_key,
    prompt_keys,
    read_trained,
    with_trained,
    write_trained,
)

TOKENIZER = sft.tiny_tokenizer()
SUMS = [{"prompt": f"{i}+1", "answer": str(i + 1), "solutions": [str(i + 1)]} for i in range(6)]
KEY = prompt_key(SUMS[0])


def test_a_list_comes_back_as_it_was_written(tmp_path):
    keys = prompt_keys(SUMS)
    assert len(keys) == len(SUMS)
    write_trained(tmp_path, keys)
    assert read_trained(tmp_path) == keys
    text = (tmp_path / TRAINED).read_text()
    assert text.splitlines() == sorted(keys)  # equal lists are equal files
    write_trained(tmp_path, None)  # something is missing
    assert (tmp_path / TRAINED).read_text() == text
    write_trained(tmp_path, set())
    assert read_trained(tmp_path) == set()


def said(*contents: str) -> list[dict]:
    """A conversation in which the user and the assistant take turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def test_a_prompt_is_known_by_its_whole_text_and_without_its_system_message():
    cut = {"prompt": "1+2=", "uncut_prompt": "add 1+2="}
    assert prompt_keys([cut]) == {prompt_key({"prompt": text}) for text in ("1+2=", "add 1+2=")}
    with_system = [{"role": "system", "content": "S"}, *said("1+2=")]
    assert prompt_keys([{"prompt": with_system}]) == prompt_keys([{"prompt": "1+2="}])
    long = [{"prompt": said(first, "3", "and 4?")} for first in ("1+2?", "5-2?")]
    assert len(prompt_keys([*long, {"prompt": "and 4?"}])) == 3


BAD_LINES = ["x\n", KEY[:15] + "\n", KEY + "0\n", KEY + " " + KEY, "\n\0\n", "\n" * 17, "\xff\n"]


@pytest.mark.parametrize("text", BAD_LINES)
def test_a_list_that_no_run_wrote_is_refused(text, tmp_path):
    (tmp_path / TRAINED).write_bytes(f"{KEY}\n{text}".encode("latin1"))
    message = refusal(read_trained, tmp_path)
    check_words(message, str(tmp_path / TRAINED), "not a list that train.py", "remove it")


def test_a_list_that_is_too_long_or_no_file_is_not_read(tmp_path, monkeypatch):
    write_trained(tmp_path, {KEY})
    monkeypatch.setattr(prompts, "MOST_KEYS", 1)
    assert read_trained(tmp_path) == {KEY}
    (tmp_path / TRAINED).write_text(f"{KEY}\n" * 2)
    check_words(refusal(read_trained, tmp_path), "can't be read")

    def denied(*given):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    check_words(refusal(read_trained, tmp_path), "can't be read (Permission denied)")


def test_a_pipe_is_no_list(tmp_path):
    """Reading it would never end."""
    os.mkfifo(tmp_path / TRAINED)
    # so that a reader who does not notice fails
    writer = threading.Thread(target=lambda: (tmp_path / TRAINED).write_text("x"), daemon=True)
    writer.start()
    assert read_trained(tmp_path) == set()
    (tmp_path / "sft.json").touch()
    assert read_trained(tmp_path) is None
    (tmp_path / TRAINED).unlink()


def test_evaluation_prompts_that_a_model_may_have_learnt_are_counted(tmp_path):
    assert leakage_warning(SUMS, tmp_path) == ""  # a model of somebody else's
    assert leakage_warning(SUMS, "hub/name") == ""
    write_trained(tmp_path, prompt_keys(SUMS[2:4]))
    assert leakage_warning(SUMS[:2], tmp_path) == ""
    spaced = {"prompt": " 3+1\n"}
    known = leakage_warning([*SUMS[:3], spaced, spaced], tmp_path)
    check_words(known, "warning: 3 of these 5", str(tmp_path), TRAINED)
    cut = {"prompt": "1", "uncut_prompt": "2+1"}
    check_words(leakage_warning([cut], tmp_path), "1 of these 1")


@pytest.mark.parametrize("name", ["train_config.json", "sft.json"])
def test_of_a_model_that_an_earlier_version_trained_it_is_said_that_nobody_knows(name, tmp_path):
    (tmp_path / name).write_text("{}")
    check_words(leakage_warning(SUMS, tmp_path), "warning", "has no list", "some of these 6")
    assert leakage_warning([], tmp_path) == ""
    # nor does the next one that goes on with it
    assert with_trained({KEY}, tmp_path) is None
    write_trained(tmp_path, set())
    assert leakage_warning(SUMS, tmp_path) == ""
    assert with_trained({KEY}, tmp_path) == {KEY}
    assert with_trained(None, tmp_path) is None


def test_the_list_does_not_depend_on_the_system_prompt(tiny_model_dir, tmp_path):
    """Who evaluates with another one asks the same problems."""
    path = jsonl(tmp_path, *SUMS)
    keys = []
    for flags in ([], ["--system_prompt=Add."]):
        c = load_config([f"--model={tiny_model_dir}", f"--dataset.name={path}", *flags])
        keys.append(prompt_keys(preflight.eval_rows_of(c, TOKENIZER)))
    assert keys[0] == keys[1] == prompt_keys(SUMS)


# --- handed on


def inputs_of(model, path, evaluated: int, *more):
    flags = [f"--model={model}", f"--dataset.name={path}", "--reward_funcs=['math']"]
    rest = ["--eval_steps=1", f"--eval_max_prompts={evaluated}", "--reward_workers=0", *more]
    return preflight.load_inputs(load_config([*flags, *rest]), 1)


def test_a_run_may_have_learnt_what_it_trains_on_and_what_its_model_had(
    trained_model_dir, tmp_path, capsys
):
    inputs = inputs_of(trained_model_dir, jsonl(tmp_path, *SUMS), evaluated=2)
    # the two held-out prompts are not of its own list; the second is of the model's
    assert inputs.trained == prompt_keys(SUMS[1:]) | {"f" * 16}
    assert "warning: 1 of these 2 evaluation prompts" in capsys.readouterr().out
    # rows of the easy pool are learnt too; of rows that are only named somebody may ask later
    (tmp_path / "others").mkdir()
    easy = jsonl(tmp_path / "others", {"prompt": "0+0", "answer": "0"})
    pool = [f"--easy_dataset.name={easy}", "--easy_dataset.share=0.5"]
    named = [f"--eval_dataset.name={tmp_path / 'rows.jsonl'}", "--eval_steps=0"]
    inputs = inputs_of(trained_model_dir, tmp_path / "rows.jsonl", 2, *pool, *named)
    assert prompt_keys([{"prompt": "0+0"}]) < inputs.trained
    assert "warning: 1 of these 2 evaluation prompts" in capsys.readouterr().out


def test_a_warm_start_hands_on_what_its_model_had_learnt(trained_model_dir, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(sft, "train", lambda *all: given.append(all[-1]))
    flags = [f"--model={trained_model_dir}", f"--dataset.name={jsonl(tmp_path, *SUMS)}"]
    flags += [f"--output_dir={tmp_path / 'out'}", "--eval_steps=1", "--eval_max_prompts=2"]
    sft.main(load_config(flags))
    assert given == [prompt_keys(SUMS[1:]) | {"f" * 16}]


def test_a_warm_start_lists_what_has_solutions_and_a_tiny_model_begins_with_nothing(
    tmp_path, monkeypatch
):
    given = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    write_trained(tmp_path / "tiny", {KEY})  # --model=tiny does not mean this folder
    monkeypatch.setattr(sft, "train", lambda *all: given.append(all[-1]))
    path = jsonl(tmp_path, SUMS[1], {"prompt": "9+9", "answer": "18"}, SUMS[2] | {"solutions": []})
    rest = ["--eval_steps=0", f"--output_dir={tmp_path / 'out'}"]
    sft.main(load_config(["--model=tiny", f"--dataset.name={path}", *rest]))
    assert given == [prompt_keys([SUMS[1]])]


def test_a_warm_start_writes_its_list_and_its_record(tiny_model_dir, tmp_path):
    lm, tokenizer = sft.load_model(load_config([f"--model={tiny_model_dir}"]))
    sft.save(tmp_path, lm, tokenizer, {KEY}, {"config": {}, "loss": 0.5, "seconds": 3.0})
    assert read_trained(tmp_path) == {KEY}
    assert (tmp_path / "sft.json").exists() and (tmp_path / "model.safetensors").exists()


def test_a_resumed_run_hands_on_what_it_had_learnt_before(tmp_path, monkeypatch, capsys):
    """Its data may have changed in between."""
    state = checkpoint.TrainerState(
        3, controllers.init_state(load_config([])), {}, prompts_hash="other"
    )
    monkeypatch.setattr(checkpoint, "load", lambda path, engine, folder: state)
    monkeypatch.setattr(checkpoint, "changes", lambda path, c: "")
    monkeypatch.setattr(train, "rate_change", lambda path, step, c: "")
    write_trained(tmp_path, prompt_keys(SUMS[:2]))
    inputs = preflight.Inputs(None, None, [], [], [], [], [], SUMS[1:3], "these", "", {KEY[::-1]})
    saved, inputs = train.resume(tmp_path, None, inputs, load_config([]))
    assert saved.step == 3
    assert inputs.trained == prompt_keys(SUMS[:2]) | {KEY[::-1]}
    said = capsys.readouterr().out
    check_words(said, "training prompts are not those", "1 of these 2", str(tmp_path), "resumed")
    for asked, answers, told in (
        ("these", "same", False),
        ("these", "other", True),
        ("these", "", False),  # an older checkpoint
        ("", "", False),  # a still older one
    ):
        state = state._replace(prompts_hash=asked, answers_hash=answers)
        train.resume(tmp_path, None, inputs._replace(answers_hash="same"), load_config([]))
        said = capsys.readouterr().out
        assert "training prompts are not those" not in said
        assert ("but not their answers" in said) == told


@pytest.fixture
def trained_model_dir(tiny_model_dir, tmp_path):
    """A model that has learnt the second sum, and another prompt."""
    folder = tmp_path / "trained"
    folder.mkdir()
    for file in tiny_model_dir.iterdir():
        (folder / file.name).symlink_to(file)
    write_trained(folder, {prompt_key(SUMS[1]), "f" * 16})
    return folder


def test_evaluate_warns_of_them(monkeypatch, capsys):
    class Warned(Exception):
        pass

    def sampler(c, device):
        raise Warned

    asked, told = [], []
    files = preflight.ModelFiles(None, None, [])
    monkeypatch.setattr(evaluate, "load_checked_files", lambda *given: files)
    rows = [row | {"prompt_ids": [1, i]} for i, row in enumerate(SUMS)]
    monkeypatch.setattr(evaluate, "checked_eval_rows", lambda *given: rows)
    world = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    monkeypatch.setattr(evaluate, "start_distributed", lambda: world)
    monkeypatch.setattr(evaluate, "check_alike", told.append)
    monkeypatch.setattr(evaluate, "leakage_warning", lambda *given: asked.append(given) or "it may")
    monkeypatch.setattr(evaluate.rollout, "start_sampler", sampler)
    with pytest.raises(Warned):
        evaluate.main(load_config(["--model=some/where"]))
    assert asked == [(rows, "some/where")]
    assert told[0]["hash of the prompts"] == prompts.prompts_hash(rows)
    # ranks with other numbers of seeds would wait for each other
    assert told[0]["seeds"] == evaluate.FLAGS["evaluate"]["seeds"]
    assert capsys.readouterr().out == "it may\n"
