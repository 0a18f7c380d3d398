"""Rows of tasks and .jsonl files, the sources of a config, and what evaluation may not share."""

import datetime
import json
import math
from types import SimpleNamespace

import datasets
import pytest
from reward_tools import config, rollouts_of
from row_files import check_words, jsonl, load, parquet, refusal

import checks
import common
import data
import preflight
import rewards
import sft
from common import check_config, load_config

TOKENIZER = sft.tiny_tokenizer()
FILES = preflight.ModelFiles(SimpleNamespace(vocab_size=len(TOKENIZER)), TOKENIZER, [0])


@pytest.fixture(autouse=True)
def no_cache_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")


def score(text: str, row: dict, reward: str) -> float:
    total, _ = rewards.score(rollouts_of([text]), [row], config(reward, reward_workers=0))
    return total.item()


# --- .jsonl files


def test_jsonl_rows_come_with_id_task_prompt_answer_and_their_own_columns(tmp_path):
    plain = {"prompt": "1+1", "answer": "2", "level": 3}
    full = {"prompt": "ü", "answer": 0, "id": 7, "task": "countdown"}
    path = jsonl(tmp_path, plain, "", full)
    first, second = load(path)
    assert first == {"id": "0", "task": "", "prompt": "1+1", "answer": "2", "level": 3}
    assert second == {"id": "7", "task": "countdown", "prompt": "ü", "answer": 0}
    # a task for all rows is that of those that have none
    assert [row["task"] for row in load(path, task="math")] == ["math", "countdown"]


def test_other_columns_are_renamed_to_prompt_and_answer(tmp_path):
    path = jsonl(tmp_path, {"problem": "1+1", "gold": "2"})
    (row,) = load(path, prompt="problem", answer="gold")
    assert (row["prompt"], row["answer"]) == ("1+1", "2")
    # the trainer has an "uncut_prompt" of its own
    path = jsonl(tmp_path, {"prompt": "1+1", "completion": "2", "uncut_prompt": 5})
    (row,) = load(path, answer="completion")
    assert "uncut_prompt" not in row
    assert score(r"\boxed{2}", row, "math") == 1


def test_rows_without_prompt_or_answer_are_left_out_and_counted(tmp_path, capsys):
    path = jsonl(
        tmp_path,
        {"prompt": "a", "answer": "1"},
        {"prompt": "b"},
        {"prompt": "", "answer": "1"},
        {"prompt": " \n\u3000", "answer": "1"},
        {"prompt": "c", "answer": ""},
        {"prompt": "d", "answer": None},
        {"prompt": "e", "answer": " "},
    )
    # the others keep the numbers that they have in the file
    assert [(row["id"], row["prompt"]) for row in load(path)] == [("0", "a"), ("6", "e")]
    check_words(capsys.readouterr().out, "5 of 7", f"the first is {path}:2")


@pytest.mark.parametrize(
    "field, words",
    [
        ('"num_modes": "3"', "'num_modes' must be a whole number from 0 on, not '3'"),
        ('"num_modes": true', "'num_modes' must be a whole number from 0 on, not True"),
        ('"num_modes": 1e-310', "'num_modes' must be a whole number from 0 on, not 1e-310"),
        ('"num_modes": -1', "'num_modes' must be a whole number from 0 on, not -1"),
        ('"num_modes": NaN', "'num_modes' must be a whole number from 0 on, not nan"),
        ('"num_modes": 1' + "0" * 400, "'num_modes' must be a whole number from 0 on, not 100"),
        ('"id": ["a"]', "'id' must be text or a number, not ['a']"),
        ('"prompt": 5', "'prompt') must be text or a list of chat messages, not a int"),
        (r'"prompt": "a\ud800"', r"'\ud800' is half a character"),
        (r'"more": {"deep": ["\udfff"]}', r"'\udfff' is half a character"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_with_file_and_line(tmp_path, field, words):
    # solutions: other people's datasets have all kinds of them
    good = {"prompt": "a", "answer": "1", "num_modes": 2, "solutions": [{"code": "1"}], "id": 7}
    path = jsonl(tmp_path, good, "", '{"prompt": "b", "answer": "1", ' + field + "}")
    message = refusal(load, path)
    assert message.startswith(f"{path}:3: ") and words in message, message


def test_fields_that_are_null_count_as_missing(tmp_path):
    nothing = {"id": None, "num_modes": None, "solutions": None, "task": None}
    given = {"prompt": "a", "answer": "1"}
    row, unsolvable = load(jsonl(tmp_path, given | nothing, given | {"num_modes": 0}))
    assert row["id"] == "0"
    assert row["task"] == ""
    assert unsolvable["num_modes"] == 0  # which is a number


def test_a_whole_character_of_two_halves_is_read(tmp_path):
    (row,) = load(jsonl(tmp_path, r'{"prompt": "\ud83d\ude00", "answer": "\u00e9"}'))
    assert (row["prompt"], row["answer"]) == ("\U0001f600", "\u00e9")


@pytest.mark.parametrize(
    "lines, words",
    [
        (['{"prompt": "a", "answer": "1"}', "", "{broken"], ["rows.jsonl:3", "JSON"]),
        (['{"prompt": "a", "answer": "1"}', "[1, 2]"], ["rows.jsonl:2", "[1, 2]"]),
        ([], ["rows.jsonl", "0 rows"]),
        (["", ""], ["rows.jsonl", "0 rows"]),
        (['{"problem": "a", "gold": "1"}'], ["'prompt'", "'answer'", "problem, gold"]),
    ],
)
def test_a_jsonl_file_that_can_not_be_used_is_refused_with_the_place(tmp_path, lines, words):
    check_words(refusal(load, jsonl(tmp_path, *lines)), *words)


def test_a_jsonl_file_that_is_not_text_or_not_there_is_named(tmp_path):
    assert "nowhere.jsonl" in refusal(load, "nowhere.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe{}")
    assert "binary.jsonl" in refusal(load, str(tmp_path / "binary.jsonl"))


def test_a_byte_order_mark_and_windows_newlines_do_not_matter(tmp_path):
    first = b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n'
    second = b'{"prompt": "b", "answer": "2"}\r\n'
    (tmp_path / "bom.jsonl").write_bytes(first + second)
    assert [row["answer"] for row in load(str(tmp_path / "bom.jsonl"))] == ["1", "2"]


def test_a_prompt_that_is_not_text_is_refused_with_its_row(tmp_path):
    good = {"prompt": "a", "answer": "1"}
    message = refusal(load, jsonl(tmp_path, good, {"prompt": {"b": 1}, "answer": "1"}))
    check_words(message, "rows.jsonl:2", "'prompt'", "not a dict", "name a column")


# --- tasks


def own_task(monkeypatch, rows) -> None:
    """Makes rows() that of the task countdown."""
    monkeypatch.setattr(data.tasks, "module", lambda name: SimpleNamespace(rows=rows))


@pytest.mark.parametrize(
    "bug, words",
    [
        ("random.choice([])", "IndexError"),
        # not taken for a split that does not exist
        ("random.sample([], 1)", "ValueError: 'Sample larger"),
    ],
)
def test_a_task_of_ones_own_needs_no_variants_and_its_bugs_name_their_line(monkeypatch, bug, words):
    own = {}
    text = f"import random\ndef rows(split, n, seed):\n    return {bug}\n"
    exec(compile(text, common.ROOT / "tasks" / "countdown.py", "exec"), own)
    own_task(monkeypatch, own["rows"])
    check_words(refusal(load, "countdown", config="5"), "dataset.config='5'", "no variants")
    message = refusal(load, "countdown")
    check_words(message, "tasks/countdown.py: rows('train', n=-1, seed=0) failed: " + words)
    # not of random.py, where it was raised
    check_words(message, "line 3 of tasks/countdown.py")


GOOD = {"id": "0", "task": "countdown", "prompt": "a", "answer": "b"}
# rollouts are written as JSON
ODD_MESSAGE = {"role": "user", "content": "a", "at": datetime.date(2026, 1, 1)}


@pytest.mark.parametrize(
    "made, words",
    [
        ([], ["its split 'train' has no rows"]),
        ([GOOD, {}], ["row 1 lacks 'id': it has nothing"]),
        ([{**GOOD, 1: 2} | {"answer": 1}, "text"], ["row 1 must be a dict, not 'text'"]),
        ([{"id": "0", "task": "t", "prompt": "p"}], ["lacks 'answer': it has id, task, prompt"]),
        ([GOOD | {"prompt": 5}], ["row 0: the prompt must be text", "not a int"]),
        (
            [GOOD | {"prompt": " "}],
            ["row 0: the prompt is empty or white space", "leave the row out"],
        ),
        ([GOOD | {"task": 5}], ["row 0: 'task' must be a name, not 5"]),
        ([GOOD | {"check": lambda: 0}], ["row 0 can't be sent to a reward", "pickle"]),
        ([GOOD | {"answer": {(0, 1): 2}}], ["row 0 can't be sent to a reward", "keys must be"]),
        ([GOOD | {"prompt": "\ud83d"}], ["row 0 can't be sent to a reward", "surrogates"]),
        ([GOOD | {"prompt": [ODD_MESSAGE]}], ["row 0 can't be sent to a reward", "date"]),
        ([GOOD | {"solutions": ["\ud83d"]}], ["row 0 can't be sent to a reward", "surrogates"]),
        ([GOOD | {"deep": json.loads("[" * 200 + "]" * 200)}], ["row 0: a column is nested deep"]),
        ([GOOD | {"num_modes": "many"}], ["row 0: 'num_modes' must be a whole number from 0 on"]),
    ],
)
def test_what_is_wrong_with_the_rows_of_a_task_is_one_sentence(monkeypatch, made, words):
    own_task(monkeypatch, lambda split, n, seed: made)
    check_words(refusal(load, "countdown"), "tasks/countdown.py", *words)


def test_a_task_may_make_its_rows_one_by_one(monkeypatch):
    own_task(monkeypatch, lambda split, n, seed: (GOOD | {"id": str(i)} for i in range(3)))
    assert [row["id"] for row in load("countdown")] == ["0", "1", "2"]


def test_a_task_draws_its_rows_by_the_seed_of_the_run(monkeypatch):
    own_task(monkeypatch, lambda split, n, seed: [GOOD | {"prompt": str(seed)}])
    easy = ["--easy_dataset.name=countdown", "--easy_dataset.share=0.5"]
    c = load_config(["--seed=7", "--dataset.name=countdown", *easy])
    (pool,), _ = data.training_pools(c, TOKENIZER)
    assert prompts_of(pool + data.easy_rows(c, TOKENIZER)) == ["7", "7"]


def test_the_ids_of_a_task_are_texts_and_no_two_are_alike(monkeypatch):
    """As those of a file: whoever sorts them has no numbers among them."""
    made = [GOOD | {"id": name} for name in (1, 1, None, None, "1", 2.5)]
    own_task(monkeypatch, lambda split, n, seed: made)
    assert [row["id"] for row in load("countdown")] == ["1", "1#1", "2", "3", "1#4", "2.5"]


def test_a_task_that_can_not_be_imported_is_one_sentence(monkeypatch):
    def module(name):
        compile("x = [1\n", "countdown.py", "exec")

    monkeypatch.setattr(data.tasks, "module", module)
    message = refusal(load, "countdown")
    check_words(message, "tasks/countdown.py can't be imported: SyntaxError")
    check_words(message, "countdown.py, line 1")
    assert message.count("line") == 1  # of no other file


def test_tasks_name_a_variant_or_split_they_do_not_have():
    assert "'5'" in refusal(load, "countdown", config="5")
    assert "'validation'" in refusal(load, "countdown", config="tiny", split="validation")


def test_task_rows_bring_their_own_prompt_whatever_its_column():
    """A config for a dataset names the column; --dataset.name=countdown alone leaves that name."""
    rows = load("countdown", config="tiny", split="test", prompt="problem")
    assert len(rows) == 256
    for row in rows:
        assert row["task"] == "countdown"
        assert row["prompt"] and row["answer"]


def test_a_column_of_a_tasks_rows_may_be_the_answer():
    """So that last_number can score Reasoning Gym's rows, whose answers its own graders read."""
    own = load("reasoning_gym", config="gcd", split="test")
    rows = load("reasoning_gym", config="gcd", split="test", answer="answer.entry.answer")
    assert [row["answer"] for row in rows] == [row["answer"]["entry"]["answer"] for row in own]
    assert all(row["answer"].isdecimal() for row in rows)


def test_a_column_that_a_tasks_rows_do_not_have_is_no_answer():
    message = refusal(load, "countdown", config="tiny", answer="gold")
    check_words(message, "has no answer in the column 'gold' (dataset.answer); its columns are id,")


# --- several sources


def mixture(*sources) -> tuple:
    return data.load_mixture(load_config([f"--dataset={list(sources)!r}"]))


def test_a_mixture_is_read_from_files_tasks_and_columns_of_other_names(tmp_path):
    first = jsonl(tmp_path, {"prompt": "1+1", "answer": "2", "level": 3})
    columns = {"problem": ["2+2", "3+3"], "gold": ["4", "6"], "level": [1, 2], "bulk": ["x", "y"]}
    second = parquet(tmp_path, **columns)
    named = {"name": second, "prompt": "problem", "answer": "gold", "more": ["level"], "weight": 3}
    sources, weights = mixture(
        {"name": first, "task": "math"},
        named,
        {"name": "crossword", "split": "test", "weight": 0.5},
    )
    assert weights == [1.0, 3.0, 0.5]
    assert [len(rows) for rows in sources[:2]] == [1, 2]
    assert (sources[0][0]["task"], sources[0][0]["level"]) == ("math", 3)
    row = sources[1][1]
    assert (row["prompt"], row["answer"]) == ("3+3", "6")
    assert (row["level"], row["task"]) == (2, "")
    assert "bulk" not in row
    assert sources[2] == data.load_rows({"name": "crossword", "split": "test"}, seed=42)


def test_one_task_twice_is_two_sources():
    (first, second), weights = mixture({"name": "crossword"}, {"name": "crossword", "weight": 2})
    assert first == second
    assert weights == [1.0, 2.0]


@pytest.mark.parametrize(
    "entry, words",
    [
        ("crossword", ["'crossword'", "dict"]),
        ({}, ["no name"]),
        ({"weight": 1}, ["no name", "{'weight': 1"]),
        ({"name": "crossword", "wieght": 2}, ["'wieght'", "weight"]),
        ({"name": 5}, ["name", "str", "5"]),
        ({"name": "crossword", "split": ["train"]}, ["split", "['train']"]),
        ({"name": "crossword", "config": None}, ["config", "None"]),
        ({"name": "crossword", "weight": 0}, ["weight=0", "above 0"]),
        ({"name": "crossword", "weight": -1.5}, ["weight=-1.5"]),
        ({"name": "crossword", "weight": "2"}, ["weight", "'2'"]),
        ({"name": "crossword", "weight": True}, ["weight", "True"]),
        ({"name": "crossword", "weight": 0.001}, ["weight=0.001", "1000", "might never be drawn"]),
        ({"name": "crossword", "columns": ["prompt"]}, ["'columns'", "prompt, answer, more"]),
        ({"name": "crossword", "question": "q"}, ["'question'", "prompt, answer, more"]),
        ({"name": "crossword", "more": "level"}, ["more", "list", "'level'"]),
        ({"name": "crossword", "more": [5]}, ["more=[5]", "list of names"]),
        ({"name": "crossword", "prompt": ["q"]}, ["prompt", "str", "['q']"]),
        ({"name": "crossword", "split": "dev"}, ["dataset 'crossword'", "'dev'"]),
        ({"name": "no/such"}, ["dataset 'no/such'"]),
    ],
)
def test_a_bad_entry_of_a_mixture_is_named_by_its_place(entry, words):
    message = refusal(mixture, {"name": "crossword"}, entry)
    check_words(message, *words)
    # the latter from the source itself
    assert any(place in message for place in ("source 1", "dataset '", "dataset.more="))


def test_weights_that_are_not_numbers_never_come_as_far_as_a_mixture():
    for weight in (math.nan, math.inf):
        source = {"name": "crossword", "weight": weight}
        assert "weight" in refusal(check_config, load_config([]) | {"dataset": [source]})


def test_a_task_named_as_a_file_is_told_its_name():
    assert "name it 'countdown'" in refusal(load, "tasks/countdown.py")


def test_a_mixture_has_no_evaluation_split_of_its_own():
    c = load_config(["--dataset=[{'name': 'crossword'}]"])
    assert "eval_dataset" in refusal(preflight.checked_eval_rows, c, FILES)


# --- columns beside prompt and answer


def test_further_columns_reach_the_reward(tmp_path):
    path = parquet(tmp_path, prompt=["a", "b"], answer=["1", "1"], level=[3, 5])
    (rows,), _ = mixture({"name": path, "more": ["level"]})
    assert [score("1", row, "hostile:level") for row in rows] == [3.0, 5.0]


def rich_parquet(folder) -> str:
    columns = {"prompt": ["a"], "answer": ["1"], "num_modes": [3], "solutions": [["1", "2"]]}
    return parquet(folder, **columns, level=[7], bulk=["x"])


def test_columns_that_rewards_or_evaluations_know_come_by_themselves_and_others_by_name(tmp_path):
    path = rich_parquet(tmp_path)
    (row,) = load(path, more=["level"])
    assert (row["num_modes"], row["solutions"], row["level"]) == (3, ["1", "2"], 7)
    assert "bulk" not in row
    ((row,),), _ = mixture({"name": path, "more": ["level"]})
    assert row["level"] == 7
    assert "no column 'depth'" in refusal(load, path, more=["depth"])
    lines = jsonl(
        tmp_path, {"prompt": "a", "answer": "1", "level": 7}, {"prompt": "b", "answer": math.nan}
    )
    assert "no row has the column 'depth'" in refusal(load, lines, more=["depth"])
    (tmp_path / "empty.jsonl").touch()
    assert "its 0 rows" in refusal(load, str(tmp_path / "empty.jsonl"), more=["depth"])
    assert "no row has the column 'depth' (\"more\"" in refusal(load, "countdown", more=["depth"])
    (row,) = load(lines, more=["level"])  # NaN is no answer
    assert row["level"] == 7
    assert "must be a list of names" in refusal(load_config, ["--dataset.more=[1]"])


def test_the_other_sources_bring_the_training_datas_columns_where_they_have_them(tmp_path):
    path = rich_parquet(tmp_path)
    easy = [f"--easy_dataset.name={path}", "--easy_dataset.share=1.0"]
    evaluated = [f"--eval_dataset.name={path}", "--eval_dataset.split=train"]
    flags = [f"--dataset.name={path}", "--reward_funcs=['math']", *easy, *evaluated]

    def others(column: str) -> list[dict]:
        c = load_config([*flags, f"--dataset.more=['{column}']"])
        return data.easy_rows(c, TOKENIZER) + preflight.checked_eval_rows(c, FILES)

    assert [row["level"] for row in others("level")] == [7, 7]
    for column in ("depth", "depth.of"):  # they may be of another kind
        for row in others(column):
            assert column not in row and "level" not in row


@pytest.mark.parametrize("task", ["os:system", 3])
def test_a_row_of_data_names_no_code(tmp_path, task):
    (row,) = load(jsonl(tmp_path, {"prompt": "a", "answer": "1", "task": task}))
    assert row["task"] == ""
    assert "rewards.REWARDS" in refusal(rewards.reward_functions, ["auto"], [1.0], [row])
    path = jsonl(tmp_path, {"prompt": "a", "answer": "1"})
    (row,) = load(path, task="my_rewards:mine")  # a config may
    assert row["task"] == "my_rewards:mine"


# --- the easy pool


def test_the_easy_pool_is_read_and_encoded_like_the_rest(tmp_path):
    path = jsonl(tmp_path, {"prompt": "1+1", "answer": "2"})
    assert data.easy_rows(load_config([]), TOKENIZER) == []
    easy = [f"--easy_dataset.name={path}", "--easy_dataset.share=0.5"]
    (row,) = data.easy_rows(load_config([*easy, "--system_prompt=S"]), TOKENIZER)
    assert TOKENIZER.decode(row["prompt_ids"]) == "<|system|>S<|user|>1+1<|assistant|>"


# --- leakage


def numbered(prefix: str, *numbers) -> list[dict]:
    return [{"id": str(i), "prompt": f"{prefix}{number}"} for i, number in enumerate(numbers)]


def test_training_rows_that_are_evaluation_prompts_are_left_out_and_counted(capsys):
    """By their prompts, not by their ids."""
    c = load_config(["--dataset.name=mine"])
    rows = numbered("p", 0, 1, 2, 1)
    easy = numbered("e", 0, 1)
    others = numbered("p", 9) + numbered("P", 1)
    for untouched in ([], others):
        assert data.leave_out_evaluated([rows, easy], untouched, c) == [rows, easy]
    assert capsys.readouterr().out == ""
    evaluated = numbered("p", 1, 9) + numbered("e", 0)
    evaluated[0]["prompt"] = " p1\n"
    left = data.leave_out_evaluated([rows, easy], evaluated, c)
    assert left == [[rows[0], rows[2]], [easy[1]]]
    assert capsys.readouterr().out == (
        "3 of 6 training rows are evaluation prompts too and are left out of training\n"
    )
    c["allow_leakage"] = True
    assert data.leave_out_evaluated([rows, easy], evaluated, c) == [rows, easy]
    assert "warning: 3 of 6" in capsys.readouterr().out


def test_a_prompt_that_was_cut_is_still_that_of_its_problem():
    """A training prompt may be cut where the evaluation's is not: an InfoSeed seed needs room."""
    c = load_config(["--dataset.name=mine"])
    cut = {"id": "0", "prompt": "numbers: 1+2=", "uncut_prompt": "add these numbers: 1+2="}
    whole = {"id": "0", "prompt": "add these numbers: 1+2="}
    other = {"id": "1", "prompt": "3+4="}
    assert data.leave_out_evaluated([[cut, other], []], [whole], c) == [[other], []]
    # or both are cut, not at the same place
    shorter = whole | {"prompt": "these numbers: 1+2=", "uncut_prompt": whole["prompt"]}
    assert data.leave_out_evaluated([[cut, other], []], [shorter], c) == [[other], []]
    # two prompts that were cut to one are one to the model
    same = cut | {"uncut_prompt": "subtract these numbers: 1+2="}
    assert data.leave_out_evaluated([[cut, other], []], [same], c) == [[other], []]


def test_a_source_of_which_nothing_is_left_is_named():
    two = [{"name": "first"}, {"name": "second"}]
    c = load_config([f"--dataset={two}"])
    pools = [numbered("p", 0, 1), numbered("p", 2), []]
    message = refusal(data.leave_out_evaluated, pools, numbered("p", 1, 2), c)
    check_words(message, "2 of 3", "nothing is left of 'second'", "allow_leakage")


@pytest.fixture
def sums(tiny_model_dir, tmp_path):
    """inputs(evaluated, *flags): what a run reads that is evaluated on one of four files."""
    rows = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(6)]
    files = {"train": rows[:3], "easy": rows[3:5], "test": rows[4:], "clean": rows[5:]}
    files["first"] = rows[:1]
    for name, content in files.items():
        (tmp_path / name).mkdir()
        jsonl(tmp_path / name, *content)

    def inputs(evaluated: str, *flags):
        sources = [
            f"--dataset.name={tmp_path / 'train/rows.jsonl'}",
            f"--eval_dataset.name={tmp_path / evaluated / 'rows.jsonl'}",
        ]
        rest = ["--eval_steps=5", "--reward_funcs=['math']", "--reward_workers=0"]
        c = load_config([f"--model={tiny_model_dir}", *sources, *rest, *flags])
        return preflight.load_inputs(c, 1)

    return inputs


def prompts_of(rows: list[dict]) -> list[str]:
    return [row["prompt"] for row in rows]


def test_a_run_trains_on_no_prompt_that_it_is_evaluated_on(sums, capsys):
    assert prompts_of(sums("test").eval_rows) == ["4+1", "5+1"]
    assert "evaluation prompts" not in capsys.readouterr().out
    inputs = sums("first")
    assert prompts_of(inputs.eval_rows) == ["0+1"]
    assert prompts_of(inputs.pools[0]) == ["1+1", "2+1"]
    assert "1 of 3 training rows" in capsys.readouterr().out
    message = refusal(sums, "train")
    check_words(message, "3 of 3 training rows", "nothing is left", "train/rows.jsonl")
    assert len(sums("train", "--allow_leakage=True").pools[0]) == 3


def test_nor_on_one_that_somebody_evaluates_later(sums):
    """Named in the config, for evaluate.py to read; the run itself does not."""
    assert len(sums("not there", "--eval_steps=0", "--allow_leakage=True").pools[0]) == 3
    inputs = sums("first", "--eval_steps=0")
    assert inputs.eval_rows == []
    assert prompts_of(inputs.pools[0]) == ["1+1", "2+1"]


def test_every_seed_is_evaluated_on_the_same_problems(tiny_model_dir):
    named = [f"--model={tiny_model_dir}", "--dataset.name=countdown", "--eval_max_prompts=5"]
    of_seeds = []
    for seed in (1, 2):
        c = load_config([*named, f"--seed={seed}"])
        of_seeds.append(prompts_of(preflight.eval_rows_of(c, sft.tiny_tokenizer())))
    assert of_seeds[0] == of_seeds[1] and len(of_seeds[0]) == 5


def test_the_easy_pools_task_has_its_reward_too(tiny_model_dir):
    """Else every one of its rows would be worth 0."""
    named = ["--dataset.name=countdown", "--easy_dataset.name=graph_coloring"]
    rest = ["--easy_dataset.share=0.5", "--reward_funcs=['auto']", "--max_prompt_length=900"]
    rest += ["--max_completion_length=64"]
    c = load_config([f"--model={tiny_model_dir}", *named, *rest, "--eval_steps=0"])
    inputs = preflight.load_inputs(c, 1)
    assert {function.task for function in inputs.reward_functions} == {
        "countdown",
        "graph_coloring",
    }


def test_a_warm_start_learns_no_held_out_solution(tiny_model_dir, tmp_path, monkeypatch, capsys):
    rows = [{"prompt": f"{i}+1", "answer": str(i), "solutions": [str(i)]} for i in range(3)]
    path = jsonl(tmp_path, *rows)
    learnt = []
    monkeypatch.setattr(sft, "train", lambda *given: learnt.append(given[4]))  # the groups
    out = tmp_path / "out"
    argv = [f"--model={tiny_model_dir}", f"--dataset.name={path}", f"--output_dir={out}"]
    argv += ["--eval_steps=5", "--eval_max_prompts=1"]
    sft.main(load_config(argv))
    assert len(learnt[0]) == 2
    assert "1 of 3 training rows are evaluation prompts too" in capsys.readouterr().out
    sft.main(load_config([*argv, "--eval_steps=0"]))
    assert len(learnt[1]) == 3


def test_without_a_name_eval_dataset_changes_entries_of_the_training_data():
    flags = ["--dataset.name=countdown", "--dataset.config=tiny", "--dataset.answer=gold"]
    source = checks.eval_source(load_config([*flags, "--eval_dataset.config=4"]))
    assert source["name"] == "countdown" and source["config"] == "4"
    assert source["split"] == "test" and source["answer"] == "gold"


def test_the_easy_pool_counts_as_training_data_too(sums, tmp_path, capsys):
    easy = [f"--easy_dataset.name={tmp_path / 'easy/rows.jsonl'}", "--easy_dataset.share=0.5"]
    assert len(sums("clean", *easy).easy) == 2
    assert "evaluation prompts" not in capsys.readouterr().out
    assert prompts_of(sums("test", *easy).easy) == ["3+1"]
    said = capsys.readouterr().out
    assert "1 of 5 training rows" in said
    assert "dataset has 4 prompt(s), fewer than prompts_per_step=" in said
    assert len(sums("test", *easy, "--allow_leakage=True").easy) == 2


# --- what a config may not say


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--easy_dataset.share={0: 0.5}"], ["easy_dataset={'share': {0: 0.5}}", "name"]),
        (["--easy_dataset.name=countdown"], ["easy_dataset={'name': 'countdown'}", "share"]),
        (["--easy_dataset.config=3"], ["easy_dataset={'config': '3'}", "name"]),
        (["--optimizer_options.lr=0.5"], ["optimizer_options.lr", "learning_rate"]),
        (["--optimizer_options.capturable=True"], ["optimizer_options.capturable", "CUDA graphs"]),
        (["--optimizer_options.differentiable=True"], ["optimizer_options.differentiable"]),
        (["--optimizer_options.maximize=True"], ["optimizer_options.maximize", "reward_weights"]),
        (["--optimizer_options={'eps': 1e400}"], ["optimizer_options={'eps': inf", "finite"]),
        (["--vllm_options.block_size=0"], ["vllm_options.block_size=0", "above 0"]),
        (["--vllm_options.max_num_seqs=a"], ["vllm_options.max_num_seqs='a'", "whole number"]),
        (["--easy_dataset.share={0: 1.5}"], ["easy_dataset.share={0: 1.5}", "at most 1"]),
        (["--easy_dataset.share={-1: 0.5}"], ["easy_dataset.share", "{-1: 0.5}"]),
        (["--easy_dataset.share={0: -0.5}"], ["easy_dataset.share={0: -0.5}"]),
        (["--easy_dataset.share={'a': 0.5}"], ["easy_dataset.share", "{'a': 0.5}"]),
        (["--easy_dataset.share={True: 0.5}"], ["easy_dataset.share", "{True: 0.5}"]),
        (["--easy_dataset.share={0: '0.5'}"], ["easy_dataset.share", "'0.5'"]),
        (["--easy_dataset.share=[0.5]"], ["easy_dataset.share", "[0.5]"]),
        (["--easy_schedule={0: 0.5}"], ["easy_schedule", "share"]),
        (["--temperature={0: 0.0}"], ["temperature={0: 0.0}"]),
        (["--temperature={0: -1}"], ["temperature={0: -1.0}"]),
        (["--temperature={0.5: 1.0}"], ["temperature", "{0.5: 1.0}"]),
        (["--temperature={0: 1e999}"], ["temperature={0: inf}"]),
        (["--temperature={0: True}"], ["temperature", "True"]),
        (["--dataset_mixture=[{'id': 'countdown'}]"], ["dataset_mixture", "list of sources"]),
        (["--dataset=[{'name': 'a'}]", "--dataset.name=b"], ["[{'name': 'a'}]", "no entries"]),
        (["--replay.fraction=1.5"], ["replay.fraction=1.5", "at least 0 and below 1"]),
        (["--replay.fraction=-0.1"], ["replay.fraction=-0.1"]),
        (["--replay.size=-1"], ["replay.size=-1"]),
        (["--replay.ucb=-0.5"], ["replay.ucb=-0.5"]),
        (["--replay.ucb=1e999"], ["replay.ucb=inf"]),
        (["--resample_equal_groups=-1"], ["resample_equal_groups=-1"]),
        (["--resample_equal_groups=True"], ["resample_equal_groups", "True"]),
        (["--long_prompts=left"], ["long_prompts='left'", "'truncate'"]),
    ],
)
def test_settings_of_data_that_can_not_work_are_refused_in_a_sentence(flags, words):
    check_words(refusal(load_config, flags), *words)


@pytest.mark.parametrize(
    "flags",
    [
        ["--easy_dataset.name=countdown", "--easy_dataset.share={0: 1, 10: 0.5, 20: 0}"],
        ["--temperature={0: 1, 3: 0.7}"],
        ["--replay.fraction=0", "--replay.ucb=0"],
        ["--replay.fraction=0.999", "--replay.size=1"],
        ["--resample_equal_groups=3"],
        ["--dataset=[{'name': 'countdown'}]"],
    ],
)
def test_settings_of_data_at_the_edge_are_allowed(flags):
    check_config(load_config(flags))


def test_rows_of_one_id_get_their_numbers(tmp_path, capsys):
    rows = [{"id": "algebra", "prompt": str(i), "answer": "1"} for i in range(3)]
    loaded = load(jsonl(tmp_path, *rows))
    assert [row["id"] for row in loaded] == ["algebra", "algebra#1", "algebra#2"]
    assert "2 rows have the id of an earlier row" in capsys.readouterr().out
    rows = [{"id": name, "prompt": "a", "answer": "1"} for name in ("a", "a#2", "a")]
    assert [row["id"] for row in load(jsonl(tmp_path, *rows))] == ["a", "a#2", "a#2#2"]
