"""Rows, prompts and rewards: what goes into a step."""
import json
import math
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import rewards
import sft
from common import UserError

TOKENIZER = sft.tiny_tokenizer()


def jsonl(folder: Path, *rows) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(path: str, config: str = "") -> list[dict]:
    return data.load_rows(path, config, "train", "prompt", "answer", seed=0)


def refusal(what, *args) -> str:
    with pytest.raises(UserError) as caught:
        what(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- which rows a step takes

@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 40), st.sampled_from([4, 8, 12]), st.integers(0, 20), st.integers(0, 3))
def test_ranks_together_take_the_same_prompts_in_the_same_order(count, prompts_per_step, step, seed):
    rows = list(range(count))
    whole = data.prompts_for_step(rows, step, prompts_per_step, seed, 0, 1)
    for world in (2, 4):
        assert [row for rank in range(world) for row in data.prompts_for_step(rows, step, prompts_per_step, seed, rank, world)] == whole


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3))
def test_every_row_comes_once_per_epoch_even_if_epochs_end_inside_a_step(count, prompts_per_step, seed):
    steps = math.ceil(3 * count / prompts_per_step)
    stream = [row for step in range(steps) for row in data.prompts_for_step(range(count), step, prompts_per_step, seed, 0, 1)]
    for epoch in range(3):
        assert sorted(stream[epoch * count:(epoch + 1) * count]) == list(range(count))


def test_a_resumed_run_needs_nothing_to_see_the_prompts_it_would_have_seen():
    rows = list(range(23))
    ahead = [data.prompts_for_step(rows, step, 8, 7, 1, 2) for step in range(20)]
    data.epoch_order.cache_clear()
    assert [data.prompts_for_step(rows, step, 8, 7, 1, 2) for step in reversed(range(20))] == ahead[::-1]


def test_epochs_and_seeds_have_their_own_order_and_rows_stay_as_they_are():
    rows = [{"id": i} for i in range(50)]
    first, second = data.prompts_for_step(rows, 0, 50, 0, 0, 1), data.prompts_for_step(rows, 1, 50, 0, 0, 1)
    assert first != second and first != data.prompts_for_step(rows, 0, 50, 1, 0, 1) and first != rows
    assert rows == [{"id": i} for i in range(50)]


# --- files and datasets

def test_jsonl_rows_come_with_id_task_prompt_answer_and_their_own_columns(tmp_path):
    path = jsonl(tmp_path, {"prompt": "1+1", "answer": "2", "level": 3}, "", {"prompt": "ü", "answer": 0, "id": 7, "task": "countdown"})
    first, second = load(path)
    assert first == {"id": "0", "task": "", "prompt": "1+1", "answer": "2", "level": 3}
    assert (second["id"], second["task"], second["prompt"], second["answer"]) == ("7", "countdown", "ü", 0)


def test_other_columns_are_renamed_to_prompt_and_answer(tmp_path):
    row, = data.load_rows(jsonl(tmp_path, {"problem": "1+1", "gold": "2"}), "", "train", "problem", "gold", 0)
    assert (row["prompt"], row["answer"]) == ("1+1", "2")
    row, = data.load_rows(jsonl(tmp_path, {"prompt": "1+1", "completion": "2"}), "", "train", "prompt", "completion", 0)
    assert rewards.score([{"text": r"\boxed{2}"}], [row], {"reward_funcs": ["math"], "reward_weights": [1.0]})[0].item() == 1


def test_rows_without_prompt_or_answer_are_left_out_and_counted(tmp_path, capsys):
    path = jsonl(tmp_path, {"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"prompt": "", "answer": "1"}, {"prompt": "c", "answer": ""},
                 {"prompt": "d", "answer": None})
    assert [row["prompt"] for row in load(path)] == ["a"]
    assert "4 of 5" in capsys.readouterr().out


@pytest.mark.parametrize("lines, words", [
    (['{"prompt": "a", "answer": "1"}', "", "{broken"], ["rows.jsonl:3", "JSON"]),
    (['{"prompt": "a", "answer": "1"}', "[1, 2]"], ["rows.jsonl:2", "[1, 2]"]),
    ([], ["rows.jsonl", "0 rows"]),
    (["", ""], ["rows.jsonl", "0 rows"]),
    (['{"problem": "a", "gold": "1"}'], ["'prompt'", "'answer'", "problem, gold"])])
def test_a_jsonl_file_that_can_not_be_used_is_refused_with_the_place(tmp_path, lines, words):
    message = refusal(load, jsonl(tmp_path, *lines))
    assert all(word in message for word in words), message


def test_a_jsonl_file_that_is_not_text_or_not_there_is_named(tmp_path):
    assert "nowhere.jsonl" in refusal(load, "nowhere.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe{}")
    assert "binary.jsonl" in refusal(load, str(tmp_path / "binary.jsonl"))


def test_a_byte_order_mark_and_windows_newlines_do_not_matter(tmp_path):
    (tmp_path / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n{"prompt": "b", "answer": "2"}\r\n')
    assert [row["answer"] for row in load(str(tmp_path / "bom.jsonl"))] == ["1", "2"]


def test_a_prompt_that_is_not_text_is_refused_with_its_row(tmp_path):
    message = refusal(load, jsonl(tmp_path, {"prompt": "a", "answer": "1"}, {"prompt": ["b"], "answer": "1"}))
    assert "'prompt'" in message and "list" in message


def test_datasets_without_a_network_are_one_sentence_and_soon():
    started = time.time()
    message = refusal(load, "nobody/nothing")
    assert "'nobody/nothing'" in message and "countdown" in message
    assert time.time() - started < 20
    assert "dataset_name" in refusal(load, "")


def test_tasks_name_a_variant_or_split_they_do_not_have():
    assert "'5'" in refusal(load, "countdown", "5")
    assert "'validation'" in refusal(data.load_rows, "countdown", "tiny", "validation", "prompt", "answer", 0)


def test_task_rows_bring_their_own_prompt_and_answer_whatever_the_columns():
    rows = data.load_rows("countdown", "tiny", "test", "problem", "gold", 0)
    assert len(rows) == 256 and all(row["task"] == "countdown" and row["prompt"] and row["answer"] for row in rows)


# --- prompts

ROW = {"id": "1", "task": "", "prompt": "1+1?", "answer": "2"}


def test_the_chat_template_is_rendered_with_the_assistants_turn_open():
    assert data.render_prompt(ROW, TOKENIZER, "Be brief.") == "<|system|>Be brief.<|user|>1+1?<|assistant|>"
    assert data.render_prompt(ROW, TOKENIZER, "") == "<|user|>1+1?<|assistant|>"
    encoded, = data.encode_prompts([ROW], TOKENIZER, "", 100, "error")
    assert encoded["prompt_ids"] == [3, *(TOKENIZER.convert_tokens_to_ids(list("1+1?"))), 4]


def test_a_base_model_sees_the_bare_text_and_its_own_special_tokens():
    base = sft.tiny_tokenizer()
    base.chat_template = None
    assert data.render_prompt(ROW, base, "Q: ") == "Q: 1+1?"
    encoded, = data.encode_prompts([ROW], base, "", 100, "error")
    assert base.decode(encoded["prompt_ids"]) == "1+1?"


def test_prompts_over_the_limit_stop_the_run_or_are_dropped_and_counted(capsys):
    rows = [{**ROW, "id": str(n), "prompt": "1" * n} for n in (3, 9, 8, 20)]     # + 2 tokens of the template
    message = refusal(data.encode_prompts, rows, TOKENIZER, "", 10, "error")
    assert all(part in message for part in ("max_prompt_length=10", "2 of 4", "'20'", "22 tokens"))
    assert [len(row["prompt_ids"]) for row in data.encode_prompts(rows, TOKENIZER, "", 10, "drop")] == [5, 10]
    assert "2 of 4" in capsys.readouterr().out
    assert "4 of 4" in refusal(data.encode_prompts, rows, TOKENIZER, "", 4, "drop")      # an empty dataset is never the result
    assert "prompt_ids" not in rows[0]


def test_the_tiny_tokenizer_has_a_token_per_character_and_survives_saving(tiny_model_dir):
    """AutoTokenizer chooses the class by the model beside it, not by what was saved."""
    _, loaded = data.load_model_files(str(tiny_model_dir))
    text = "".join(sft.CHARACTERS) + "  a\n\n b it's <|end|> 10\n"
    for tokenizer in (TOKENIZER, loaded):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text and len(ids) == len(text) - len("<|end|>") + 1 and len(tokenizer) == 101
        assert ids[:96] == list(range(5, 101))
    assert loaded.chat_template == TOKENIZER.chat_template and loaded.eos_token_id == TOKENIZER.eos_token_id == 0


# --- rewards

@pytest.mark.parametrize("text, content", [
    (r"so \boxed{4}", "4"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{a{b{c}}d} end}", "a{b{c}}d"),
    (r"\boxed{1} and \boxed{2", "1"), (r"\boxed{never", None), ("4", None), (r"\boxed 4", None), (r"\boxed{}", ""), (r"\boxed{\boxed{3}}", "3"), ("", None)])
def test_the_last_complete_box_counts(text, content):
    assert rewards.last_boxed(text) == content


def test_a_megabyte_of_open_boxes_costs_no_time():
    started = time.time()
    for text in (r"\boxed{" * 100_000, "{" * 500_000, r"\boxed{" + "}" * 500_000, r"\boxed{" + "9" * 500_000 + "}"):
        assert rewards.math_reward(text, "4") == 0.0
    assert time.time() - started < 1


@pytest.mark.parametrize("box, answer, expected", [
    (r"\frac{1}{2}", "0.5", 1), ("0.5", r"\frac{1}{2}", 1), (r"\frac12", "1/2", 1), ("4", "4", 1), ("4.0", "4", 1), ("5", "4", 0),
    (r"2\sqrt{3}", r"\sqrt{12}", 1),
    (r"\{1, 2\}", r"\{2,1\}", 1), ("(1,2)", "(2,1)", 0), ("x+1", "1+x", 1), ("", "4", 0), ("-3", "3", 0), ("4", 4, 1)])
def test_math_reward_compares_values_not_spellings(box, answer, expected):
    assert rewards.math_reward(f"I get \\boxed{{{box}}}.", answer) == expected


def test_math_reward_gives_nothing_outside_a_box_or_for_an_earlier_box():
    assert rewards.math_reward("The answer is 4.", "4") == 0.0
    assert rewards.math_reward(r"\boxed{4}, no, \boxed{5}", "4") == 0.0


def test_math_reward_survives_hostile_text():
    for box in ("__import__('os').system('false')", "\x00", r"\frac{1}{0}", "(" * 9, "\ud83d", r"\text{" * 9, "9" * 1000, "None"):
        assert rewards.math_reward(f"\\boxed{{{box}}}", "4") == 0.0


ROLLOUTS = [{"text": text} for text in ("2*3+4", "2+3+4", r"\boxed{10}", "3*4-2")]
ROWS = [{"id": str(i), "task": "countdown", "prompt": "", "answer": {"numbers": [2, 3, 4], "target": 10}} for i in range(2)]


def test_score_is_prompt_major_and_weighs_the_rewards(monkeypatch):
    monkeypatch.setitem(rewards.REWARDS, "length", lambda completion, answer, id, **row: len(completion) + 100 * int(id))
    total, metrics = rewards.score(ROLLOUTS, ROWS, {"reward_funcs": ["countdown", "length"], "reward_weights": [2.0, -0.5]})
    assert torch.equal(total, torch.tensor([[2 - 2.5, -2.5], [-55.0, 2 - 52.5]])) and total.dtype == torch.float32
    assert metrics == {"reward/countdown/mean": 0.5, "reward/length/mean": 56.25}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error_with_reward_value_and_row(monkeypatch, value):
    monkeypatch.setitem(rewards.REWARDS, "odd", lambda completion, answer, **row: value if completion == "3*4-2" else 0.0)
    with pytest.raises(ValueError, match=rf"'odd' gave {value} for row '1'"):
        rewards.score(ROLLOUTS, ROWS, {"reward_funcs": ["odd"], "reward_weights": [1.0]})


def test_correct_modes_count_right_answers_and_different_ones():
    texts = ["2*3+4", "4+3*2", "3*4-2", "1", "2", "3", "4", "2+3+4"]
    assert rewards.correct_modes([{"text": t} for t in texts], ROWS, "countdown") == [(3, {"2*3+4", "3*4-2"}), (0, set())]
    plain = [{**row, "task": ""} for row in ROWS]
    assert [right for right, _ in rewards.correct_modes([{"text": t} for t in texts], plain, "countdown")] == [3, 0]
    assert all(modes is None for _, modes in rewards.correct_modes([{"text": t} for t in texts], plain, "countdown"))
