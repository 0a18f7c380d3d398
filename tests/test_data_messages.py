"""Prompts that are lists of chat messages, columns within columns, arguments of a chat template."""

import inspect
import json
import subprocess
import sys
from datetime import datetime

import pytest
from child import ended_well
from deadlines import PATIENCE
from exact_matrix import ROOT
from row_files import check_words, jsonl, load, parquet, refusal

import data
import prompts
import sft
from checks import TEMPLATE_SET_HERE
from common import load_config

TOKENIZER = sft.tiny_tokenizer()
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}
NEXT = {"role": "user", "content": "And 2+2?"}


def row_of(*messages) -> dict:
    return {"id": "1", "task": "", "prompt": list(messages), "answer": "2"}


def encoded(row: dict, *flags, tokenizer=TOKENIZER) -> dict:
    (row,) = prompts.encode_prompts([row], tokenizer, load_config(list(flags)))
    return row


def text_of(row: dict, *flags) -> str:
    return TOKENIZER.decode(encoded(row, *flags)["prompt_ids"])


def test_other_entries_of_a_message_do_not_reach_the_row(tmp_path):
    """A time of day is nothing that JSON, and so a log of rollouts, could hold."""
    message = {**QUESTION, "at": datetime(2026, 1, 1)}
    (row,) = load(parquet(tmp_path, prompt=[[message]], answer=["2"]))
    assert row["prompt"] == [QUESTION]


# --- what the model sees


def test_a_conversation_goes_through_the_chat_template_message_by_message():
    row = row_of(SYSTEM, QUESTION, ANSWER, NEXT)
    turns = "<|system|>Be brief.<|user|>1+1?<|assistant|>2<|end|><|user|>And 2+2?<|assistant|>"
    assert text_of(row) == turns


def test_a_system_message_of_its_own_wins_over_the_configs():
    flag = "--system_prompt=Think."
    assert text_of(row_of(SYSTEM, QUESTION), flag) == "<|system|>Be brief.<|user|>1+1?<|assistant|>"
    assert text_of(row_of(QUESTION), flag) == "<|system|>Think.<|user|>1+1?<|assistant|>"
    silent = {"role": "system", "content": ""}
    assert text_of(row_of(silent, QUESTION), flag) == "<|system|><|user|>1+1?<|assistant|>"


def test_other_entries_of_a_message_do_not_reach_the_template():
    plain = sft.tiny_tokenizer()
    plain.chat_template = "{% for m in messages %}{{ m|length }}{{ m.content }}{% endfor %}"
    row = row_of({**QUESTION, "weight": 1, "tool_calls": None})
    assert plain.decode(encoded(row, tokenizer=plain)["prompt_ids"]) == "21+1?"


def test_the_last_message_alone_is_cut():
    row = row_of(SYSTEM, QUESTION, ANSWER, {"role": "user", "content": "x" * 50 + "2+2?"})
    whole = len(encoded(row)["prompt_ids"])
    cut = encoded(row, f"--max_prompt_length={whole - 50}", "--long_prompts=truncate")
    assert TOKENIZER.decode(cut["prompt_ids"]).endswith("2<|end|><|user|>2+2?<|assistant|>")
    assert cut["prompt"] == [SYSTEM, QUESTION, ANSWER, {"role": "user", "content": "2+2?"}]
    assert len(row["prompt"][-1]["content"]) == 54
    assert cut["uncut_prompt"] == row["prompt"]  # by which an evaluation knows the problem
    # what stands before it is too long already
    message = refusal(encoded, row, "--max_prompt_length=20", "--long_prompts=truncate")
    assert "nothing is left" in message


def test_an_info_seed_stands_in_the_last_message():
    flags = ["--info_seed_num_seeds=2", "--prompts_per_step=2"]
    ids = prompts.seed_prompts(row_of(QUESTION, ANSWER, NEXT), TOKENIZER, load_config(flags))
    assert TOKENIZER.decode(ids[1]) == (
        "<|user|>1+1?<|assistant|>2<|end|><|user|>And 2+2? (variant 1)<|assistant|>"
    )


def test_a_base_model_takes_one_question_and_refuses_turns():
    base = sft.tiny_tokenizer()
    base.chat_template = None
    ids = encoded(row_of(SYSTEM, QUESTION), tokenizer=base)["prompt_ids"]
    assert base.decode(ids) == "Be brief.1+1?"
    message = refusal(encoded, row_of(QUESTION, ANSWER, NEXT), tokenizer=base)
    check_words(message, "row '1'", "3 turns", "--chat_template")


# --- which prompts are the same


def test_a_prompt_is_the_same_if_the_whole_conversation_is():
    text = {"id": "0", "prompt": "And 2+2?"}
    alone = row_of(NEXT)
    others = [row_of(SYSTEM, NEXT), row_of(QUESTION, ANSWER, NEXT)]
    assert prompts.prompt_identity(alone) == prompts.prompt_identity(text)
    assert prompts.prompt_key(alone) == prompts.prompt_key(text)
    different = [text, *others]
    assert len({prompts.prompt_identity(row) for row in different}) == 3
    assert len({prompts.prompt_key(row) for row in different}) == 3
    spaced = row_of({**SYSTEM, "content": " Be\nbrief. "}, NEXT)
    assert prompts.prompt_key(spaced) == prompts.prompt_key(others[0])
    assert prompts.prompt_identity(spaced) != prompts.prompt_identity(others[0])


def test_a_system_prompt_of_the_config_is_part_of_the_conversation():
    """The same tokens, once with the system message in the row and once from the config."""
    trained = [row_of(SYSTEM, QUESTION), row_of(NEXT)]
    c = load_config(["--dataset.name=mine", f"--system_prompt={SYSTEM['content']}"])
    evaluated = [row_of(QUESTION)]
    assert data.leave_out_evaluated([trained, []], evaluated, c) == [[trained[1]], []]


def test_leakage_is_of_whole_conversations():
    trained = [row_of(SYSTEM, QUESTION), row_of(QUESTION, ANSWER, NEXT)]
    c = load_config(["--dataset.name=mine"])
    alike = [row_of(QUESTION), row_of(NEXT)]
    assert data.leave_out_evaluated([trained, []], alike, c) == [trained, []]
    evaluated = [row_of(NEXT), trained[1]]
    assert data.leave_out_evaluated([trained, []], evaluated, c) == [[trained[0]], []]


# --- lists that can't be used


@pytest.mark.parametrize(
    "prompt, words",
    [
        ([], ["a list of 0 messages"]),
        ([QUESTION] * 1001, ["a list of 1001 messages", "1 to 1000"]),
        (["1+1?"], ["number 1 must be", "'1+1?'"]),
        ([{"role": "user"}], ["number 1 must be", '"content"']),
        ([{"from": "human", "value": "1+1?"}], ["number 1 must be", '"role"']),
        ([QUESTION, {"role": "tool", "content": "2"}], ["number 2 has the role 'tool'", "user"]),
        ([{"role": ["user"], "content": "2"}], ["number 1 has the role ['user']"]),
        ([{"role": "x" * 9999, "content": "2"}], ["number 1 has the role 'xxx", "..."]),
        ([QUESTION, SYSTEM, NEXT], ["number 2 is a system message"]),
        ([SYSTEM], ["ends with a message of the role 'system'"]),
        ([QUESTION, ANSWER], ["ends with a message of the role 'assistant'", "the user's"]),
        ([{"role": "user", "content": None}], ["number 1 must have a text", "None"]),
        ([{"role": "user", "content": [{"type": "text"}]}], ["must have a text", "[{'type'"]),
        ([QUESTION, ANSWER, {"role": "user", "content": ""}], ["that is empty"]),
        ([{"role": "user", "content": " \n"}], ["empty or white space", "leave the row out"]),
    ],
)
def test_a_malformed_list_is_one_sentence_with_file_and_line(tmp_path, prompt, words):
    good = {"prompt": [QUESTION], "answer": "2"}
    path = jsonl(tmp_path, good, "", {"prompt": prompt, "answer": "2"})
    message = refusal(load, path)
    assert message.startswith(f"{path}:3: the prompt (column 'prompt') "), message
    check_words(message, *words)
    assert len(message) - len(str(path)) < 400


def test_a_malformed_list_of_a_dataset_is_told_with_its_row(tmp_path):
    path = parquet(tmp_path, prompt=[[QUESTION], [QUESTION, ANSWER]], answer=["2", "2"])
    check_words(refusal(load, path), "row 1: ", "ends with a message of the role 'assistant'")


def test_a_list_nested_deeply_is_one_sentence(tmp_path):
    path = jsonl(tmp_path, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + ', "answer": "2"}')
    check_words(refusal(load, path), f"{path}:1: ", "not JSON")


def test_a_column_nested_deeper_than_a_reward_can_be_sent_is_one_sentence(tmp_path):
    for depth in (200, 600):
        row = '{"prompt": "1+1?", "answer": "2", "extra": ' + "[" * depth + "]" * depth + "}"
        path = jsonl(tmp_path, {"prompt": "1", "answer": "1"}, row)
        check_words(refusal(load, path), f"{path}:2: a column is nested deeper than 100 levels")
    assert load(jsonl(tmp_path, {"prompt": "1", "answer": "1", "extra": [[[1]]]}))


# --- columns within columns

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [QUESTION],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}
ENTRIES = {"answer": "reward_model.ground_truth", "more": ["extra_info.index"]}


def test_a_dotted_column_is_an_entry_of_a_column(tmp_path):
    columns = {name: [content] for name, content in VERL.items()}
    for path in (jsonl(tmp_path, VERL), parquet(tmp_path, **columns)):
        (row,) = load(path, **ENTRIES)
        assert row["prompt"] == [QUESTION]
        assert row["answer"] == "2"
        assert row["extra_info.index"] == 7
        assert ("ability" in row) == path.endswith(".jsonl")  # brings all that it has
    (row,) = load(jsonl(tmp_path, {"a": {"b": {"c": "1+1?"}}, "answer": 2}), prompt="a.b.c")
    assert row["prompt"] == "1+1?"


def test_a_dotted_column_that_the_config_names_is_there_without_a_value_too(tmp_path):
    """As a plain one is: a reward reads row["extra.unit"]."""
    rows = [{"prompt": "1", "answer": "1", "extra": {"unit": unit}} for unit in ("m", None)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for path in (jsonl(tmp_path, *rows), parquet(tmp_path, **columns)):
        loaded = load(path, more=["extra.unit"])
        assert [row["extra.unit"] for row in loaded] == ["m", None]


def test_a_column_with_a_dot_in_its_name_comes_first(tmp_path):
    row = {"prompt": "1+1?", "a.b": "2", "a": {"b": "3"}}
    columns = {name: [content] for name, content in row.items()}
    for path in (jsonl(tmp_path, row), parquet(tmp_path, **columns)):
        assert load(path, answer="a.b")[0]["answer"] == "2"


def test_a_dotted_column_that_is_not_there_is_named(tmp_path):
    columns = {name: [content] for name, content in VERL.items()}
    path = parquet(tmp_path, **columns)
    for name in ("reward_model.truth", "ability.truth", "nothing.at.all"):
        message = refusal(load, path, answer=name)
        check_words(message, f"no column {name!r}", "reward_model", "prompt, answer and more")
        assert name in refusal(load, path, **ENTRIES | {"more": [name]})
    message = refusal(load, jsonl(tmp_path, VERL), answer="reward_model.truth")
    check_words(message, "none of its 1 rows", "'reward_model.truth'", "reward_model.ground_truth")


def test_the_other_sources_bring_dotted_columns_where_they_have_them(tmp_path):
    path = jsonl(tmp_path, VERL)
    easy = {"name": path, "share": 0.5, "answer": "reward_model.ground_truth"}
    for more, found in (("extra_info.index", 7), ("extra_info.depth", None)):
        flags = [f"--dataset.more=['{more}']", f"--easy_dataset={json.dumps(easy)}"]
        (row,) = data.easy_rows(load_config(flags), TOKENIZER)
        assert row.get(more) == found


# --- arguments of the chat template

THINKING = sft.TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}"
OFF = "--chat_template_kwargs={'enable_thinking': False}"


@pytest.fixture
def thinking():
    tokenizer = sft.tiny_tokenizer()
    tokenizer.chat_template = THINKING
    return tokenizer


def test_arguments_reach_the_chat_template(thinking):
    def last_words(*flags) -> str:
        ids = encoded(row_of(QUESTION), *flags, tokenizer=thinking)["prompt_ids"]
        return thinking.decode(ids).removeprefix("<|user|>1+1?<|assistant|>")

    assert last_words() == ""
    assert last_words(OFF) == "<think></think>"
    assert last_words("--chat_template_kwargs.enable_thinking=true") == ""
    assert last_words("--chat_template_kwargs.enable_thinking=false") == "<think></think>"


def test_an_argument_that_the_template_does_not_read_is_refused(thinking):
    flag = "--chat_template_kwargs.enable_thinkng=False"
    message = refusal(encoded, row_of(QUESTION), flag, tokenizer=thinking)
    check_words(message, "chat_template_kwargs", "does not read 'enable_thinkng'")
    thinking.chat_template = None
    message = refusal(encoded, row_of(QUESTION), OFF, tokenizer=thinking)
    check_words(message, "'enable_thinking'", "the model has none")


@pytest.mark.parametrize("name", ["tokenize", "messages", "not a name", ""])
def test_what_is_not_for_the_template_is_refused(name):
    flag = f"--chat_template_kwargs={ {name: 1} }"
    check_words(refusal(load_config, [flag]), "chat_template_kwargs", repr(name))


def test_all_arguments_that_are_not_for_the_template_are_known():
    own = inspect.signature(TOKENIZER.apply_chat_template).parameters
    assert set(TEMPLATE_SET_HERE) == {*own, "messages"} - {"kwargs"}


# --- the real script


@pytest.mark.slow
def test_two_steps_on_rows_in_verls_form(tiny_model_dir, tmp_path):
    rows = []
    for i in range(8):
        prompt = [SYSTEM, {"role": "user", "content": f"{i}+1?"}]
        reward_model = {"style": "rule", "ground_truth": str(i + 1)}
        rows.append(VERL | {"prompt": prompt, "reward_model": reward_model})
    flags = [
        f"--dataset={json.dumps({'name': jsonl(tmp_path, *rows), **ENTRIES})}",
        "--reward_funcs=['last_number']",
        f"--model={tiny_model_dir}",
        f"--output_dir={tmp_path / 'run'}",
        "--rollout_engine=hf",
        "--prompts_per_step=4",
        "--num_generations=4",
        "--max_completion_length=12",
        "--max_steps=2",
        "--log_rollouts_steps=1",
    ]
    command = [sys.executable, "train.py", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    ended_well(done)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "<|system|>Be brief.<|user|>" in done.stdout
    logged = (tmp_path / "run" / "rollouts" / "step_000001.rank_0.jsonl").read_text().splitlines()
    assert json.loads(logged[0])["prompt"][0] == SYSTEM
