"""Rows, prompts and rewards: what goes into a step."""

import http.server
import json
import math
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import jinja2
import pyarrow.parquet
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import data
import preflight
import prompts
import rewards
import scoring
import sft
import stream
from common import UserError, check_config, load_config, scheduled
from preflight import dry_run, load_inputs, load_model_files, stop_token_ids

TOKENIZER = sft.tiny_tokenizer()


@pytest.fixture(autouse=True)
def no_cache_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")


def jsonl(folder: Path, *rows) -> str:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
        encoding="utf-8",
    )
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
def test_ranks_together_take_the_same_prompts_in_the_same_order(
    count, prompts_per_step, step, seed
):
    rows = list(range(count))
    whole = stream.prompts_for_step(rows, step, prompts_per_step, seed, 0, 1)
    for world in (2, 4):
        assert [
            row
            for rank in range(world)
            for row in stream.prompts_for_step(rows, step, prompts_per_step, seed, rank, world)
        ] == whole


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3))
def test_every_row_comes_once_per_epoch_even_if_epochs_end_inside_a_step(
    count, prompts_per_step, seed
):
    steps = math.ceil(3 * count / prompts_per_step)
    stream = [
        row
        for step in range(steps)
        for row in stream.prompts_for_step(range(count), step, prompts_per_step, seed, 0, 1)
    ]
    for epoch in range(3):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_a_resumed_run_needs_nothing_to_see_the_prompts_it_would_have_seen():
    rows = list(range(23))
    ahead = [stream.prompts_for_step(rows, step, 8, 7, 1, 2) for step in range(20)]
    stream.epoch_order.cache_clear()
    assert [
        stream.prompts_for_step(rows, step, 8, 7, 1, 2) for step in reversed(range(20))
    ] == ahead[::-1]


def test_epochs_and_seeds_have_their_own_order_and_rows_stay_as_they_are():
    rows = [{"id": i} for i in range(50)]
    first, second = (
        stream.prompts_for_step(rows, 0, 50, 0, 0, 1),
        stream.prompts_for_step(rows, 1, 50, 0, 0, 1),
    )
    assert (
        first != second and first != stream.prompts_for_step(rows, 0, 50, 1, 0, 1) and first != rows
    )
    assert rows == [{"id": i} for i in range(50)]


# --- a mixture


def sources_of(*sizes) -> list[list[dict]]:
    return [[{"id": f"{s}.{i}", "source": s} for i in range(size)] for s, size in enumerate(sizes)]


def stream_of(sources: list, weights: list, count: int, seed=0, first: int = 0) -> list[dict]:
    """`count` prompts in steps of 10."""
    return [
        row
        for step in range(first // 10, (first + count) // 10)
        for row in stream.prompts_for_step(sources, step, 10, seed, 0, 1, weights)
    ]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=5), st.integers(0, 3), st.integers(0, 5))
def test_every_thousand_prompts_hold_each_sources_share_to_the_row(weights, seed, block):
    counts = Counter(
        row["source"]
        for row in stream_of(
            sources_of(*[7] * len(weights)), weights, 1000, seed, first=1000 * block
        )
    )
    assert counts.total() == 1000
    assert all(abs(counts[s] - 1000 * w / sum(weights)) < 1 for s, w in enumerate(weights))


def test_shares_that_come_out_even_are_exact_and_mixed_all_over_the_block():
    sources = sources_of(5, 50, 500)
    for block in range(3):
        rows = stream_of(sources, [5, 3.0, 2], 1000, first=1000 * block)
        assert Counter(row["source"] for row in rows) == {0: 500, 1: 300, 2: 200}
        for part in range(0, 1000, 250):  # 125 expected, standard deviation below 8
            assert 93 < sum(row["source"] == 0 for row in rows[part : part + 250]) < 157


def test_a_share_that_does_not_come_out_even_is_rounded_to_the_nearest_and_every_block_has_its_own_order():
    blocks = [
        [row["source"] for row in stream_of(sources_of(5, 5), [2, 1], 1000, first=1000 * block)]
        for block in range(3)
    ]
    assert [Counter(block) for block in blocks] == [{0: 667, 1: 333}] * 3 and blocks[0] != blocks[
        1
    ] != blocks[2] != blocks[0]
    assert Counter(row["source"] for row in stream_of(sources_of(5, 5), [1, 2], 1000)) == {
        0: 333,
        1: 667,
    }


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(0, 400), st.integers(0, 3), st.sampled_from([4, 8, 12, 1004]))
def test_ranks_together_take_a_mixtures_prompts_in_the_same_order(step, seed, prompts_per_step):
    sources, weights = sources_of(3, 40, 11), [0.2, 0.7, 0.1]
    whole = stream.prompts_for_step(sources, step, prompts_per_step, seed, 0, 1, weights)
    for world in (2, 4):
        assert [
            row
            for rank in range(world)
            for row in stream.prompts_for_step(
                sources, step, prompts_per_step, seed, rank, world, weights
            )
        ] == whole


def test_every_row_of_a_source_comes_once_per_pass_over_it_across_blocks():
    sources = sources_of(37, 1003)
    rows = stream_of(sources, [1, 2], 6000)
    for s, source in enumerate(sources):
        own = [row["id"] for row in rows if row["source"] == s]
        for first in range(0, len(own) - len(source) + 1, len(source)):
            assert sorted(own[first : first + len(source)]) == sorted(row["id"] for row in source)
        assert own[: len(source)] != own[len(source) : 2 * len(source)]


def test_a_mixture_is_a_pure_function_of_seed_and_step():
    sources, weights = sources_of(13, 29), [1, 3]
    before = json.dumps(sources)
    ahead = [stream.prompts_for_step(sources, step, 16, 7, 1, 2, weights) for step in range(150)]
    stream.epoch_order.cache_clear()
    stream.block_of_sources.cache_clear()
    order = random.Random(0).sample(range(150), 150)
    assert [stream.prompts_for_step(sources, step, 16, 7, 1, 2, weights) for step in order] == [
        ahead[step] for step in order
    ]
    assert [
        stream.prompts_for_step(sources, step, 16, 8, 1, 2, weights) for step in range(150)
    ] != ahead
    assert json.dumps(sources) == before


def test_sources_of_the_same_rows_go_their_own_ways_and_one_source_is_as_without_a_mixture():
    twice = [[{"id": i, "source": s} for i in range(100)] for s in range(2)]
    rows = stream_of(twice, [1, 1], 200)
    first, second = ([row["id"] for row in rows if row["source"] == s][:90] for s in range(2))
    assert first != second
    assert stream_of(twice[:1], [1.0], 150) == [
        row for step in range(15) for row in stream.prompts_for_step(twice[0], step, 10, 0, 0, 1)
    ]


def mixture(*entries, **settings) -> tuple:
    return data.load_mixture(
        load_config(
            [
                f"--dataset_mixture={list(entries)!r}",
                *(f"--{key}={value}" for key, value in settings.items()),
            ]
        )
    )


def test_a_mixture_is_read_from_files_tasks_and_columns_of_other_names(tmp_path):
    first = jsonl(tmp_path, {"prompt": "1+1", "answer": "2", "level": 3})
    second = parquet(
        tmp_path, problem=["2+2", "3+3"], gold=["4", "6"], level=[1, 2], bulk=["x", "y"]
    )
    sources, weights = mixture(
        {"id": first, "task": "math"},
        {
            "id": second,
            "columns": {"prompt": "problem", "answer": "gold", "more": ["level"]},
            "weight": 3,
        },
        {"id": "crossword", "split": "test", "weight": 0.5},
    )
    assert weights == [1.0, 3.0, 0.5] and [len(rows) for rows in sources[:2]] == [1, 2]
    assert (sources[0][0]["task"], sources[0][0]["level"]) == ("math", 3)
    assert {key: sources[1][1][key] for key in ("prompt", "answer", "level", "task")} == {
        "prompt": "3+3",
        "answer": "6",
        "level": 2,
        "task": "",
    }
    assert "bulk" not in sources[1][0]
    assert sources[2] == data.load_rows("crossword", "", "test", "prompt", "answer", 42)


def test_further_columns_reach_the_reward(tmp_path, monkeypatch):
    path = parquet(tmp_path, prompt=["a", "b"], answer=["1", "1"], level=[3, 5])
    (rows,), _ = mixture({"id": path, "columns": {"more": ["level"]}})
    monkeypatch.setitem(rewards.REWARDS, "level", lambda completion, answer, level, **row: level)
    assert scoring.score(
        [{"text": "1"}] * 2, rows, {"reward_funcs": ["level"], "reward_weights": [1.0]}
    )[0].tolist() == [[3.0], [5.0]]


def test_columns_that_rewards_or_evaluations_know_come_by_themselves_and_others_by_name(tmp_path):
    path = parquet(
        tmp_path,
        prompt=["a"],
        answer=["1"],
        num_modes=[3],
        solutions=[["1", "2"]],
        level=[7],
        bulk=["x"],
    )
    settings = [f"--dataset.name={path}", "--dataset.more=['level']", "--eval_steps=0"]
    ((row,),) = data.load_mixture(load_config(settings))[0]
    assert (row["num_modes"], row["solutions"], row["level"], "bulk" in row) == (
        3,
        ["1", "2"],
        7,
        False,
    )
    c = load_config(
        [
            *settings,
            f"--easy_dataset.name={path}",
            "--easy_schedule={0: 1.0}",
            f"--eval_dataset.name={path}",
            "--eval_dataset.split=train",
        ]
    )
    assert (
        data.easy_rows(c, TOKENIZER)[0]["level"]
        == preflight.load_eval_rows(c | {"reward_funcs": ["math"]}, TOKENIZER)[0]["level"]
        == 7
    )
    assert mixture({"id": path}, dataset_more_columns="['level']")[0][0][0]["level"] == 7
    missing = load_config([*settings, "--dataset.more=['depth']"])
    assert "no column 'depth'" in refusal(
        data.load_mixture, missing
    )  # of the training data; the others may be of another kind
    assert (
        "depth"
        not in preflight.load_eval_rows(
            c | {"reward_funcs": ["math"], "dataset_more_columns": ["depth"]}, TOKENIZER
        )[0]
    )
    assert "must be a list of names" in refusal(load_config, ["--dataset.more=[1]"])


@pytest.mark.parametrize("task", ["os:system", 3])
def test_a_row_of_data_names_no_code(tmp_path, task):
    path = jsonl(tmp_path, {"prompt": "a", "answer": "1", "task": task})
    ((row,),) = mixture({"id": path})[0]
    assert row["task"] == "" and "rewards.REWARDS" in refusal(
        scoring.columns_of, ["auto"], [1.0], [row]
    )
    own = jsonl(tmp_path, {"prompt": "a", "answer": "1"})
    assert (
        mixture({"id": own, "task": "my_rewards:mine"})[0][0][0]["task"] == "my_rewards:mine"
    )  # a config may


@pytest.mark.parametrize(
    "solutions, words",
    [
        (None, 'none of its rows has "solutions"'),
        (["x" * 99], "1 of 1 solutions are longer: nothing is left"),
    ],
)
def test_solutions_that_can_not_be_learnt_from_are_a_sentence(solutions, words):
    c = load_config(["--max_completion_length=20"])
    assert words in refusal(
        sft.demonstrations, [{"id": "r", "prompt_ids": [1], "solutions": solutions}], TOKENIZER, c
    )


def test_solutions_that_are_too_long_are_counted(capsys):
    c = load_config(["--max_completion_length=20"])
    rows = [
        {"id": "r", "prompt_ids": [1], "solutions": ["short", "x" * 99]},
        {"id": "s", "prompt_ids": [1], "solutions": None},
    ]
    ((group, _),) = sft.demonstrations(rows, TOKENIZER, c)
    assert (
        len(group) == 1
        and "max_completion_length=20: 1 of 2 solutions are longer and are left out"
        in capsys.readouterr().out
    )


def test_one_task_twice_is_two_sources():
    (first, second), weights = mixture({"id": "crossword"}, {"id": "crossword", "weight": 2})
    assert first == second and weights == [1.0, 2.0]


@pytest.mark.parametrize(
    "entry, words",
    [
        ("crossword", ["'crossword'", "'id'"]),
        ({}, ["'id'"]),
        ({"weight": 1}, ["'id'", "{'weight': 1}"]),
        ({"id": "crossword", "wieght": 2}, ["'wieght'", "weight"]),
        ({"id": 5}, ["id=5", "text"]),
        ({"id": "crossword", "split": ["train"]}, ["split=['train']", "text"]),
        ({"id": "crossword", "config": None}, ["config=None"]),
        ({"id": "crossword", "weight": 0}, ["weight=0", "above 0"]),
        ({"id": "crossword", "weight": -1.5}, ["weight=-1.5"]),
        ({"id": "crossword", "weight": "2"}, ["weight='2'"]),
        ({"id": "crossword", "weight": True}, ["weight=True"]),
        ({"id": "crossword", "weight": 0.001}, ["weight=0.001", "1000", "never be drawn"]),
        ({"id": "crossword", "columns": ["prompt"]}, ["columns=['prompt']"]),
        (
            {"id": "crossword", "columns": {"question": "q"}},
            ["columns={'question': 'q'}", "'more'"],
        ),
        (
            {"id": "crossword", "columns": {"more": "level"}},
            ["columns={'more': 'level'}", "a list"],
        ),
        (
            {"id": "crossword", "columns": {"prompt": ["q"]}},
            ["columns={'prompt': ['q']}", "'prompt' must be a column's name"],
        ),
        ({"id": "crossword", "split": "dev"}, ["'dev'"]),
        ({"id": "no/such"}, ["'no/such'"]),
    ],
)
def test_a_bad_entry_of_a_mixture_is_named_by_its_place(entry, words):
    message = refusal(mixture, {"id": "crossword"}, entry)
    assert all(word in message for word in words), message
    assert (
        "dataset_mixture[1]" in message or "dataset_name=" in message
    )  # the latter from the source itself


def test_weights_that_are_not_numbers_never_come_as_far_as_a_mixture():
    for weight in (math.nan, math.inf):
        assert "weight" in refusal(
            data.load_mixture,
            load_config([]) | {"dataset_mixture": [{"id": "crossword", "weight": weight}]},
        )


def test_a_mixture_has_no_evaluation_split_of_its_own():
    c = load_config(["--dataset_mixture=[{'id': 'crossword'}]"])
    assert "eval_dataset_name" in refusal(preflight.load_eval_rows, c, TOKENIZER)


# --- the easy pool

EASY = [{"id": f"easy {i}", "prompt": f"easy {i}"} for i in range(30)]
HARD = [{"id": f"hard {i}", "prompt": f"hard {i}"} for i in range(8)]


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.9])
def test_the_share_of_easy_prompts_is_the_probability(probability):
    """16,000 draws at fixed seeds: within 4 standard deviations, which a right implementation misses once in 16,000 seeds. And all
    30 easy rows come equally often: chi-square of 29 degrees of freedom below its mean plus 4 standard deviations."""
    steps = [stream.with_easy_prompts(HARD, EASY, step, probability, 5) for step in range(2000)]
    easy = Counter(row["id"] for step in steps for row in step if row in EASY)
    assert abs(easy.total() / 16000 - probability) < 4 * math.sqrt(
        probability * (1 - probability) / 16000
    )
    expected = easy.total() / 30
    assert sum((easy[row["id"]] - expected) ** 2 / expected for row in EASY) < 29 + 4 * math.sqrt(
        58
    )
    for place in range(8):
        assert all(step[place] in EASY or step[place] is HARD[place] for step in steps)


def test_the_easy_pool_is_a_pure_function_and_none_or_all_at_its_ends():
    first = [stream.with_easy_prompts(HARD, EASY, step, 0.5, 1) for step in range(20)]
    assert [
        stream.with_easy_prompts(HARD, EASY, step, 0.5, 1) for step in reversed(range(20))
    ] == first[::-1]
    assert len({json.dumps(step) for step in first}) == 20 and first != [
        stream.with_easy_prompts(HARD, EASY, step, 0.5, 2) for step in range(20)
    ]
    assert (
        stream.with_easy_prompts(HARD, EASY, 3, 0.0, 1)
        == HARD
        == stream.with_easy_prompts(HARD, [], 3, 1.0, 1)
    )
    assert all(
        row in EASY
        for step in range(50)
        for row in stream.with_easy_prompts(HARD, EASY, step, 1, 1)
    )
    assert [row["id"] for row in HARD] == [f"hard {i}" for i in range(8)]


def test_a_larger_probability_keeps_the_easy_prompts_of_a_smaller_one():
    """So a schedule that falls takes prompts away and exchanges none."""
    for step in range(20):
        few, many = (
            stream.with_easy_prompts(HARD, EASY, step, probability, 1) for probability in (0.2, 0.6)
        )
        assert all(a == b for a, b in zip(few, many) if a in EASY)


def test_a_schedule_holds_its_last_value_and_says_otherwise_before_its_first():
    schedule = {100: 0.1, 5: 0.5, 200: 0.0}  # in no order
    assert [scheduled(schedule, step, 0.7) for step in (0, 4, 5, 6, 99, 100, 199, 200, 10**9)] == [
        0.7,
        0.7,
        0.5,
        0.5,
        0.5,
        0.1,
        0.1,
        0.0,
        0.0,
    ]
    assert scheduled({}, 3, 0.7) == 0.7 and scheduled({0: 1}, 0, 0.7) == 1


def test_the_easy_pool_is_read_and_encoded_like_the_rest(tmp_path):
    path = jsonl(tmp_path, {"prompt": "1+1", "answer": "2"})
    assert data.easy_rows(load_config([]), TOKENIZER) == []
    (row,) = data.easy_rows(
        load_config(
            [f"--easy_dataset.name={path}", "--easy_schedule={0: 0.5}", "--system_prompt=S"]
        ),
        TOKENIZER,
    )
    assert TOKENIZER.decode(row["prompt_ids"]) == "<|system|>S<|user|>1+1<|assistant|>"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--easy_schedule={0: 0.5}"], ["easy_schedule={0: 0.5}", "easy_dataset_name=''"]),
        (["--easy_dataset.name=countdown"], ["easy_schedule={}", "easy_dataset_name='countdown'"]),
        (
            ["--easy_dataset.name=countdown", "--easy_schedule={0: 1.5}"],
            ["easy_schedule={0: 1.5}", "at most 1"],
        ),
        (
            ["--easy_dataset.name=countdown", "--easy_schedule={-1: 0.5}"],
            ["easy_schedule={-1: 0.5}"],
        ),
        (
            ["--easy_dataset.name=countdown", "--easy_schedule={0: -0.5}"],
            ["easy_schedule={0: -0.5}"],
        ),
        (
            ["--easy_dataset.name=countdown", "--easy_schedule={'a': 0.5}"],
            ["easy_schedule={'a': 0.5}"],
        ),
        (
            ["--easy_dataset.name=countdown", "--easy_schedule={True: 0.5}"],
            ["easy_schedule={True: 0.5}"],
        ),
        (
            ["--easy_dataset.name=countdown", "--easy_schedule={0: '0.5'}"],
            ["easy_schedule={0: '0.5'}"],
        ),
        (["--easy_schedule=[0.5]"], ["easy_schedule", "dict"]),
        (["--temperature_schedule={0: 0.0}"], ["temperature_schedule={0: 0.0}"]),
        (["--temperature_schedule={0: -1}"], ["temperature_schedule={0: -1}"]),
        (["--temperature_schedule={0.5: 1.0}"], ["temperature_schedule={0.5: 1.0}"]),
        (["--temperature_schedule={0: 1e999}"], ["temperature_schedule={0: inf}"]),
        (["--temperature_schedule={0: True}"], ["temperature_schedule={0: True}"]),
        (
            ["--dataset_mixture=[{'id': 'countdown'}]", "--dataset.name=countdown"],
            ["dataset_mixture", "dataset.name='countdown'"],
        ),
        (["--replay.fraction=1.5"], ["replay_fraction=1.5", "at least 0 and at most 1"]),
        (["--replay.fraction=-0.1"], ["replay_fraction=-0.1"]),
        (["--replay.size=-1"], ["replay_size=-1"]),
        (["--replay.ucb=-0.5"], ["replay_ucb=-0.5"]),
        (["--replay.ucb=1e999"], ["replay_ucb=inf"]),
        (["--resample_equal_groups=-1"], ["resample_equal_groups=-1"]),
        (["--resample_equal_groups=True"], ["resample_equal_groups", "True"]),
        (["--long_prompts=left"], ["long_prompts='left'", "'truncate'"]),
    ],
)
def test_settings_of_data_that_can_not_work_are_refused_in_a_sentence(flags, words):
    message = refusal(load_config, flags)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "flags",
    [
        ["--easy_dataset.name=countdown", "--easy_schedule={0: 1, 10: 0.5, 20: 0}"],
        ["--temperature_schedule={0: 1, 3: 0.7}"],
        ["--replay.fraction=0", "--replay.ucb=0"],
        ["--replay.fraction=1", "--replay.size=1"],
        ["--resample_equal_groups=3"],
        ["--dataset_mixture=[{'id': 'countdown'}]"],
    ],
)
def test_settings_of_data_at_the_edge_are_allowed(flags):
    check_config(load_config(flags))


# --- files and datasets


def parquet(folder: Path, **columns) -> str:
    datasets.Dataset.from_dict(columns).to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


def test_a_parquet_file_gives_the_rows_of_a_jsonl_file(tmp_path):
    rows = [
        {
            "prompt": f"{i}+1",
            "answer": {"numbers": [i, 1], "target": i + 1},
            "id": f"row {i}",
            "task": "countdown",
        }
        for i in range(5)
    ]
    path = parquet(tmp_path, **{key: [row[key] for row in rows] for key in rows[0]})
    assert load(path) == rows == load(jsonl(tmp_path, *rows))


def test_rows_of_a_parquet_file_without_prompt_or_answer_are_left_out_and_counted(tmp_path, capsys):
    path = parquet(tmp_path, prompt=["a", None, "", "d", "e"], answer=["1", "1", "1", None, ""])
    assert [row["prompt"] for row in load(path)] == ["a"] and "4 of 5" in capsys.readouterr().out
    message = refusal(load, parquet(tmp_path, prompt=["", None], answer=["1", "1"]))
    assert all(
        word in message for word in ("none of its 2 rows", "'prompt'", "'answer'", "rows.parquet")
    ), message


def test_a_folder_of_save_to_disk_is_read_with_or_without_splits(tmp_path):
    columns = {"prompt": ["1+1", "2+2"], "answer": ["2", "4"], "bulk": [[0.5] * 9] * 2}
    dataset = datasets.Dataset.from_dict(columns)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=dataset, test=dataset.select([1])).save_to_disk(tmp_path / "two")
    rows = [
        {"id": "0", "task": "", "prompt": "1+1", "answer": "2"},
        {"id": "1", "task": "", "prompt": "2+2", "answer": "4"},
    ]
    assert load(str(tmp_path / "one")) == load(str(tmp_path / "two")) == rows
    assert [
        row["prompt"]
        for row in data.load_rows(str(tmp_path / "two"), "", "test", "prompt", "answer", 0)
    ] == ["2+2"]
    message = refusal(data.load_rows, str(tmp_path / "two"), "", "dev", "prompt", "answer", 0)
    assert all(word in message for word in (str(tmp_path / "two"), "'dev'", "train, test")), message


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path, kind):
    path = parquet(tmp_path, problem=["1+1"], gold=["2"])
    if kind == "folder":
        datasets.Dataset.from_dict({"problem": ["1+1"], "gold": ["2"]}).save_to_disk(
            path := str(tmp_path / "folder")
        )
    for columns, missing in ((("prompt", "gold"), "'prompt'"), (("problem", "answer"), "'answer'")):
        message = refusal(data.load_rows, path, "", "train", *columns, 0)
        assert all(word in message for word in (repr(path), missing, "problem, gold")), message
    assert "'level'" in refusal(
        data.load_rows, path, "", "train", "problem", "gold", 0, "", ("level",)
    )


def test_prompts_of_a_dataset_that_are_not_text_are_refused(tmp_path):
    message = refusal(
        load, parquet(tmp_path, prompt=[[{"role": "user", "content": "hi"}]], answer=["1"])
    )
    assert "'prompt'" in message and "list" in message


def test_files_that_are_not_there_or_not_what_they_seem_are_one_sentence(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "dataset_info.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name in ("broken.parquet", "nowhere.parquet", "folder", "empty"):
        message = refusal(load, str(tmp_path / name))
        assert name in message and "not a task" not in message


FILES = {
    "README.md": "---\nconfigs:\n- config_name: sums\n  data_files:\n  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n---\n",
    "train.jsonl": '{"question": "1+1", "gold": "2", "bulk": 1}\n',
    "test.jsonl": '{"question": "2+2", "gold": "4", "bulk": 1}\n',
}


class FakeHub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as one small dataset needs. `troubles`: what happens to the first requests, a status or 0, hanging up."""

    troubles, asked = [], []

    def do_GET(self):
        path, body, code, more = self.path.split("?")[0], "", 200, {}
        self.asked.append((self.command, path))
        if self.troubles:
            code = self.troubles.pop(0)
        elif "/resolve/" in path:
            body = FILES.get(path.rpartition("/")[2], "")
            code, more = (
                (200 if body else 404),
                {"ETag": path, "X-Repo-Commit": "a" * 40, "X-Error-Code": "EntryNotFound"},
            )
        elif "/tree/" in path:
            body = json.dumps(
                [
                    {"type": "file", "path": name, "size": len(text), "oid": "1"}
                    for name, text in FILES.items()
                ]
            )
        elif path.startswith("/api/datasets/"):
            body = json.dumps(
                {
                    "id": "some/sums",
                    "sha": "a" * 40,
                    "siblings": [{"rfilename": name} for name in FILES],
                }
            )
        if code:
            self.send_response(code)
            for name, value in (more | {"Content-Length": len(body)}).items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body.encode() if self.command == "GET" else b"")

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """(FakeHub, list of the pauses that were made), in the place of huggingface.co for this test."""
    server, pauses = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub), []
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    FakeHub.troubles, FakeHub.asked = [], []
    yield FakeHub, pauses
    server.shutdown()
    server.server_close()


def of_hub(config="sums", split="train", name="some/sums") -> list[dict]:
    return data.load_rows(name, config, split, "question", "gold", 0)


def test_a_dataset_of_the_hub_is_asked_for_again_when_the_hub_is_busy_and_then_kept(
    hub, monkeypatch
):
    fake, pauses = hub
    fake.troubles = [503, 503, 500]
    assert of_hub() == [
        {"id": "0", "task": "", "prompt": "1+1", "answer": "2", "question": "1+1", "gold": "2"}
    ]
    assert (
        fake.asked[:4] == [("HEAD", "/datasets/some/sums/resolve/main/README.md")] * 4
        and 0 < pauses[0] < pauses[1]
    )
    assert [row["prompt"] for row in of_hub(split="test")] == ["2+2"]
    assert all(
        word in refusal(of_hub, "sums", "dev")
        for word in ("'some/sums'", "dataset_split='dev'", "train")
    )
    assert all(
        word in refusal(of_hub, "products")
        for word in ("'some/sums'", "dataset_config='products'", "sums")
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    requests = len(fake.asked)
    assert [row["prompt"] for row in of_hub()] == ["1+1"] and len(
        fake.asked
    ) == requests  # what was read once is there without a network
    assert all(
        word in refusal(of_hub, "", "train", "some/other")
        for word in ("'some/other'", "HF_HUB_OFFLINE")
    )


@pytest.mark.parametrize("trouble", [503, 0])
def test_a_hub_that_stays_out_of_reach_is_one_sentence_after_growing_pauses(hub, trouble):
    fake, pauses = hub
    fake.troubles = [trouble] * 99
    message = refusal(of_hub)
    assert "'some/sums'" in message and (
        not trouble or (len(pauses) >= 4 and pauses == sorted(pauses))
    ), (message, pauses)


@pytest.fixture
def no_network(hub, monkeypatch):
    """The pauses that were made, where nothing listens at the hub's address."""
    with socket.socket() as closed:  # bound, so that nobody else gets it, and not listening
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", nowhere)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nowhere)
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        yield hub[1]


def test_a_dataset_without_a_network_is_one_sentence_and_nobody_waits(no_network, capsys):
    assert "can't be reached" in refusal(of_hub) and no_network == []
    assert capsys.readouterr().out.count("can't be reached") == 1


def test_a_model_without_a_network_is_one_sentence_and_nobody_waits(no_network, capsys):
    assert "model='some/model'" in refusal(load_model_files, "some/model")
    assert no_network == [] and capsys.readouterr().out.count("can't be reached") == 1


def test_jsonl_rows_come_with_id_task_prompt_answer_and_their_own_columns(tmp_path):
    path = jsonl(
        tmp_path,
        {"prompt": "1+1", "answer": "2", "level": 3},
        "",
        {"prompt": "ü", "answer": 0, "id": 7, "task": "countdown"},
    )
    first, second = load(path)
    assert first == {"id": "0", "task": "", "prompt": "1+1", "answer": "2", "level": 3}
    assert (second["id"], second["task"], second["prompt"], second["answer"]) == (
        "7",
        "countdown",
        "ü",
        0,
    )


def test_other_columns_are_renamed_to_prompt_and_answer(tmp_path):
    (row,) = data.load_rows(
        jsonl(tmp_path, {"problem": "1+1", "gold": "2"}), "", "train", "problem", "gold", 0
    )
    assert (row["prompt"], row["answer"]) == ("1+1", "2")
    (row,) = data.load_rows(
        jsonl(tmp_path, {"prompt": "1+1", "completion": "2"}),
        "",
        "train",
        "prompt",
        "completion",
        0,
    )
    assert (
        scoring.score(
            [{"text": r"\boxed{2}"}], [row], {"reward_funcs": ["math"], "reward_weights": [1.0]}
        )[0].item()
        == 1
    )


def test_rows_without_prompt_or_answer_are_left_out_and_counted(tmp_path, capsys):
    path = jsonl(
        tmp_path,
        {"prompt": "a", "answer": "1"},
        {"prompt": "b"},
        {"prompt": "", "answer": "1"},
        {"prompt": "c", "answer": ""},
        {"prompt": "d", "answer": None},
    )
    assert [row["prompt"] for row in load(path)] == ["a"]
    assert "4 of 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    "field, words",
    [
        ('"num_modes": "3"', "'num_modes' must be a number from 0 on, not '3'"),
        ('"num_modes": true', "'num_modes' must be a number from 0 on, not True"),
        ('"num_modes": -1', "'num_modes' must be a number from 0 on, not -1"),
        ('"num_modes": NaN', "'num_modes' must be a number from 0 on, not nan"),
        ('"num_modes": 1' + "0" * 400, "'num_modes' must be a number from 0 on, not 100"),
        ('"solutions": "a text"', "'solutions' must be a list of texts, not 'a text'"),
        ('"solutions": [3]', "'solutions' must be a list of texts, not [3]"),
        ('"id": ["a"]', "'id' must be text or a number, not ['a']"),
        ('"prompt": ["a"]', "'prompt') must be text, not a list"),
        (r'"prompt": "a\ud800"', r"'\ud800' is not a character but half of one"),
        (r'"more": {"deep": ["\udfff"]}', r"'\udfff' is not a character but half of one"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_with_file_and_line(tmp_path, field, words):
    good = {"prompt": "a", "answer": "1", "num_modes": 2, "solutions": ["1"], "id": 7}
    path = jsonl(tmp_path, good, "", '{"prompt": "b", "answer": "1", ' + field + "}")
    message = refusal(load, path)
    assert message.startswith(f"{path}:3: ") and words in message, message


def test_fields_that_are_null_count_as_missing(tmp_path):
    nothing = {"id": None, "num_modes": None, "solutions": None, "task": None}
    (row,) = load(jsonl(tmp_path, {"prompt": "a", "answer": "1"} | nothing))
    assert row["id"] == "0" and row["task"] == ""


def test_a_whole_character_of_two_halves_is_read(tmp_path):
    (row,) = load(jsonl(tmp_path, r'{"prompt": "\ud83d\ude00", "answer": "\u00e9"}'))
    assert (row["prompt"], row["answer"]) == ("\U0001f600", "\u00e9")


def test_a_field_of_the_wrong_type_in_a_parquet_file_is_refused_with_its_row(tmp_path):
    path = parquet(tmp_path, prompt=["a", "b"], answer=["1", "1"], num_modes=["2", "3"])
    message = refusal(load, path)
    assert path in message and "row 0" in message and "'num_modes' must be a number" in message


def test_a_parquet_file_with_bytes_for_text_is_one_sentence(tmp_path):
    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    prompts = pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)
    path = str(tmp_path / "rows.parquet")
    table = pyarrow.table({"prompt": prompts, "answer": ["1"]})
    pyarrow.parquet.write_table(table, path)
    assert path in refusal(load, path) and "UTF-8" in refusal(load, path)


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
    message = refusal(load, jsonl(tmp_path, *lines))
    assert all(word in message for word in words), message


def test_a_jsonl_file_that_is_not_text_or_not_there_is_named(tmp_path):
    assert "nowhere.jsonl" in refusal(load, "nowhere.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe{}")
    assert "binary.jsonl" in refusal(load, str(tmp_path / "binary.jsonl"))


def test_a_byte_order_mark_and_windows_newlines_do_not_matter(tmp_path):
    (tmp_path / "bom.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n{"prompt": "b", "answer": "2"}\r\n'
    )
    assert [row["answer"] for row in load(str(tmp_path / "bom.jsonl"))] == ["1", "2"]


def test_a_prompt_that_is_not_text_is_refused_with_its_row(tmp_path):
    message = refusal(
        load, jsonl(tmp_path, {"prompt": "a", "answer": "1"}, {"prompt": ["b"], "answer": "1"})
    )
    assert "'prompt'" in message and "list" in message


def test_datasets_in_offline_mode_are_one_sentence():
    message = refusal(load, "nobody/nothing")
    assert "'nobody/nothing'" in message and "countdown" in message and "HF_HUB_OFFLINE" in message
    assert "dataset_name" in refusal(load, "")


def test_a_task_of_ones_own_needs_no_variants_and_its_bugs_stay_visible(monkeypatch):
    module = SimpleNamespace(
        rows=lambda split, n, seed: [
            {"id": "0", "task": "countdown", "prompt": "a", "answer": split + None * 1}
        ]
    )
    monkeypatch.setattr(data.tasks, "module", lambda name: module)
    assert "dataset_config='5'" in refusal(load, "countdown", "5") and "no variants" in refusal(
        load, "countdown", "5"
    )
    with pytest.raises(TypeError, match="NoneType"):
        load("countdown")


def test_tasks_name_a_variant_or_split_they_do_not_have():
    assert "'5'" in refusal(load, "countdown", "5")
    assert "'validation'" in refusal(
        data.load_rows, "countdown", "tiny", "validation", "prompt", "answer", 0
    )


def test_task_rows_bring_their_own_prompt_and_answer_whatever_the_columns():
    rows = data.load_rows("countdown", "tiny", "test", "problem", "gold", 0)
    assert len(rows) == 256 and all(
        row["task"] == "countdown" and row["prompt"] and row["answer"] for row in rows
    )


# --- prompts

ROW = {"id": "1", "task": "", "prompt": "1+1?", "answer": "2"}


def test_the_chat_template_is_rendered_with_the_assistants_turn_open():
    assert (
        prompts.render_prompt(ROW, TOKENIZER, "Be brief.")
        == "<|system|>Be brief.<|user|>1+1?<|assistant|>"
    )
    assert prompts.render_prompt(ROW, TOKENIZER, "") == "<|user|>1+1?<|assistant|>"
    (encoded,) = prompts.encode_prompts([ROW], TOKENIZER, "", 100, "error")
    assert encoded["prompt_ids"] == [3, *(TOKENIZER.convert_tokens_to_ids(list("1+1?"))), 4]


def test_a_base_model_sees_the_bare_text_and_its_own_special_tokens():
    base = sft.tiny_tokenizer()
    base.chat_template = None
    assert prompts.render_prompt(ROW, base, "Q: ") == "Q: 1+1?"
    (encoded,) = prompts.encode_prompts([ROW], base, "", 100, "error")
    assert base.decode(encoded["prompt_ids"]) == "1+1?"


def test_prompts_over_the_limit_stop_the_run_or_are_dropped_and_counted(capsys):
    rows = [
        {**ROW, "id": str(n), "prompt": "1" * n} for n in (3, 9, 8, 20)
    ]  # + 2 tokens of the template
    message = refusal(prompts.encode_prompts, rows, TOKENIZER, "", 10, "error")
    assert all(part in message for part in ("max_prompt_length=10", "2 of 4", "'20'", "22 tokens"))
    assert [
        len(row["prompt_ids"]) for row in prompts.encode_prompts(rows, TOKENIZER, "", 10, "drop")
    ] == [5, 10]
    assert "2 of 4" in capsys.readouterr().out
    assert "4 of 4" in refusal(
        prompts.encode_prompts, rows, TOKENIZER, "", 4, "drop"
    )  # an empty dataset is never the result
    assert "prompt_ids" not in rows[0]


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and 150 merges, so that a text falls into other tokens when something is cut off or put before it; TEMPLATE of sft.py."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    text = [
        "".join(random.Random(i).choices("abü\N{PILE OF POO}1+ ", k=200)) for i in range(20)
    ] + ["What is one and one? Be brief."] * 20
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.train_from_iterator(
        text,
        tokenizers.trainers.BpeTrainer(
            vocab_size=256 + 150 + len(special),
            special_tokens=special,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=sft.TEMPLATE
    )


BPE = bpe_tokenizer()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 9999))
def test_cutting_ends_whatever_the_tokenizer_makes_of_the_shorter_text(count, limit, seed):
    rng, calls = random.Random(seed), []

    def encode(rows):  # any length at all
        calls.append(rows[0]["prompt"])
        assert len(calls) <= count
        return [[0] * rng.randint(1, 60)]

    found = prompts.cut_left(
        {**ROW, "prompt": "x" * count}, TOKENIZER, limit, encode, lambda row, ids: len(ids)
    )
    assert [len(text) for text in calls] == sorted({len(text) for text in calls}, reverse=True)
    assert found is None or len(found["prompt_ids"]) <= limit


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.text(sft.CHARACTERS, min_size=1, max_size=50),
    st.integers(1, 60),
    st.sampled_from(["", "Be brief."]),
)
def test_a_prompt_that_is_cut_keeps_its_end_its_system_prompt_and_the_assistants_header(
    text, limit, system
):
    """A token per character: to the character what fits."""
    row, before = {**ROW, "prompt": text}, len(f"{system}{text}") + (3 if system else 2)
    room = limit - before + len(text)
    if room < 1:
        assert "even without the users' messages" in refusal(
            prompts.encode_prompts, [row], TOKENIZER, system, limit, "truncate"
        )
        return
    (encoded,) = prompts.encode_prompts([row], TOKENIZER, system, limit, "truncate")
    assert (
        TOKENIZER.decode(encoded["prompt_ids"])
        == (f"<|system|>{system}" if system else "") + f"<|user|>{text[-room:]}<|assistant|>"
    )
    assert len(encoded["prompt_ids"]) == min(before, limit)
    assert {key: encoded[key] for key in row} == {**row, "prompt": text[-room:]} and row == {
        **ROW,
        "prompt": text,
    }


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.text("abü\N{PILE OF POO}1+ ?\n\N{SNOWMAN}e", min_size=1, max_size=50),
    st.integers(4, 40),
    st.sampled_from(["", "Be brief."]),
)
def test_the_same_holds_where_cutting_a_text_changes_its_tokens(text, limit, system):
    row = {**ROW, "prompt": text}
    head = (f"<|system|>{system}" if system else "") + "<|user|>"
    try:
        (encoded,) = prompts.encode_prompts([row], BPE, system, limit, "truncate")
    except UserError:
        shortest = len(BPE(head + text[-1] + "<|assistant|>")["input_ids"])
        return (
            pytest.fail("room for a character was not used") if shortest <= limit - 4 else None
        )  # at most 4 bytes, a token each
    shown = BPE.decode(encoded["prompt_ids"])
    assert (
        len(encoded["prompt_ids"]) <= limit and shown == head + encoded["prompt"] + "<|assistant|>"
    )
    assert text.endswith(encoded["prompt"]) and encoded["prompt"]
    if (
        encoded["prompt"] != text
    ):  # little room is wasted: a character's bytes, and merges that the cut makes possible
        assert len(encoded["prompt_ids"]) > limit - 8


def test_a_character_cut_in_two_leaves_no_rubbish():
    (encoded,) = prompts.encode_prompts(
        [{**ROW, "prompt": "\N{SNOWMAN}" * 9}], BPE, "", 9, "truncate"
    )
    assert (
        encoded["prompt"] == "\N{SNOWMAN}" * 2 and len(encoded["prompt_ids"]) == 8
    )  # three bytes each, room for seven


def test_a_base_models_prompt_is_cut_behind_the_system_prompt():
    base = sft.tiny_tokenizer()
    base.chat_template = None
    (encoded,) = prompts.encode_prompts(
        [{**ROW, "prompt": "123456789"}], base, "Q: ", 8, "truncate"
    )
    assert base.decode(encoded["prompt_ids"]) == "Q: 56789"


def test_cut_and_dropped_prompts_are_counted_and_the_others_stay_in_their_order(capsys):
    rows = [{**ROW, "id": str(n), "prompt": "1" * n} for n in (3, 9, 8, 20)]
    assert [
        len(row["prompt_ids"])
        for row in prompts.encode_prompts(rows, TOKENIZER, "", 10, "truncate")
    ] == [5, 10, 10, 10]
    out = capsys.readouterr().out
    assert "2 of 4" in out and "2 have lost the beginning" in out and "0 are left out" in out
    assert [row["id"] for row in prompts.encode_prompts(rows, TOKENIZER, "", 10, "drop")] == [
        "3",
        "8",
    ]
    assert (
        "0 have lost the beginning" in (out := capsys.readouterr().out) and "2 are left out" in out
    )
    assert prompts.encode_prompts(rows, TOKENIZER, "", 22, "truncate") == prompts.encode_prompts(
        rows, TOKENIZER, "", 22, "error"
    )
    assert capsys.readouterr().out == ""


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.characters = tokenizer, 0

    def __call__(self, texts, **kwargs):
        self.characters += sum(map(len, [texts] if isinstance(texts, str) else texts))
        return self.tokenizer(texts, **kwargs)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


ENDLESS = {**ROW, "id": "endless", "prompt": "What is 1+1? " * 800_000}  # ten megabytes


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BPE])
@pytest.mark.parametrize("seeds", [False, True])
def test_ten_megabytes_are_refused_dropped_or_cut_without_being_tokenised(tokenizer, seeds, capsys):
    tokenizer = Counting(tokenizer)
    flags = ["--model=x", f"--info_seed_enabled={seeds}", "--max_prompt_length=60"]

    def encoded(long_prompts: str) -> list[dict]:
        c = load_config([*flags, f"--long_prompts={long_prompts}"])
        return data.encode([ENDLESS, ROW], tokenizer, c)

    message = refusal(encoded, "error")
    assert "1 of 2 prompts" in message and "'endless' has 10400021 characters" in message
    assert [row["id"] for row in encoded("drop")] == [ROW["id"]]
    cut, other = encoded("truncate")
    assert ENDLESS["prompt"].endswith(cut["prompt"]) and 30 < len(cut["prompt_ids"]) <= 60
    assert other["id"] == ROW["id"] and "1 have lost the beginning" in capsys.readouterr().out
    assert tokenizer.characters < 500_000


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.text("ab1 \n\u00fc\u0301\N{SNOWMAN}\N{PILE OF POO}", min_size=1, max_size=6),
    st.integers(50, 2000),
    st.integers(1, 12),
    st.sampled_from(["tiny", "bpe", "nfc", "unk", "words"]),
)
def test_a_prompt_that_fits_is_never_said_to_be_too_long(part, size, limit, kind):
    """The tiny tokenizer drops what it does not know; others join characters or unknown ones."""
    text, tokenizer = part * (size // len(part)), SHRINKING[kind]
    tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    if prompts.CharacterLimit(tokenizer, limit).exceeded_by(text):
        assert tokens > limit


def shrinking_tokenizers() -> dict:
    nfc = tokenizers.Tokenizer.from_str(BPE.backend_tokenizer.to_str())
    nfc.normalizer = tokenizers.normalizers.NFC()
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "1": 4}
    unk = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", fuse_unk=True)
    )
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = {"nfc": nfc, "unk": unk, "words": words}
    found = {"tiny": TOKENIZER, "bpe": BPE}
    for name, tokenizer in wrapped.items():
        found[name] = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return found


SHRINKING = shrinking_tokenizers()


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    st.lists(st.text("abü1+ ?\n\N{SNOWMAN}", min_size=1, max_size=9), min_size=1, max_size=9),
    st.integers(6, 20),
    st.sampled_from([TOKENIZER, BPE]),
)
def test_a_long_prompt_is_cut_as_if_all_of_it_had_been_tokenised(parts, limit, tokenizer):
    row = {**ROW, "prompt": "".join(random.Random(limit).choices(parts, k=2000)) + "1"}
    (found,) = prompts.encode_prompts([row], tokenizer, "", limit, "truncate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts.CharacterLimit, "exceeded_by", lambda *_: False)
        (wanted,) = prompts.encode_prompts([row], tokenizer, "", limit, "truncate")
    assert found == wanted


# --- chat templates

OWN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"


def test_a_chat_template_comes_as_text_or_as_a_file(tiny_model_dir, tmp_path):
    (tmp_path / "template.jinja").write_text(OWN)
    for given_as in (OWN, str(tmp_path / "template.jinja")):
        tokenizer = load_model_files(str(tiny_model_dir), given_as).tokenizer
        assert prompts.render_prompt(ROW, tokenizer, "S") == "[system]S[user]1+1?[me]"
    assert load_model_files(str(tiny_model_dir)).tokenizer.chat_template == sft.TEMPLATE


def test_a_base_model_can_be_given_a_template(tiny_model_dir):
    base = sft.tiny_tokenizer()
    base.chat_template = None
    prompts.set_chat_template(base, OWN)
    assert (
        prompts.encode_prompts([ROW], base, "", 100, "error")[0]["prompt_ids"]
        == base("[user]1+1?[me]")["input_ids"]
    )


@pytest.mark.parametrize(
    "template, words",
    [
        ("nowhere.jinja", ["'nowhere.jinja'", "No such file"]),
        (".", ["'.'", "directory"]),
        ("{% for %}", ["TemplateSyntaxError"]),
        ("{{ messages[0]['content'] }", ["TemplateSyntaxError"]),
        ("{{ raise_exception('one\ntwo') }}", ["one two"]),
        ("{{ nobody.content }}", ["UndefinedError"]),
        ("{{ 'Answer:' }}", ["leaves the user's message out"]),
        ("{}", ["leaves the user's message out"]),
        (
            "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}{% endfor %}",
            ["leaves the user's message out"],
        ),
    ],
)
def test_a_chat_template_that_can_not_be_used_is_one_sentence(template, words):
    message = refusal(prompts.set_chat_template, sft.tiny_tokenizer(), template)
    assert "chat_template" in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    "attack",
    [
        "''.__class__.__mro__",
        "messages.__class__.__base__.__subclasses__()",
        "cycler.__init__.__globals__.os.system('touch {path}')",
        "messages.append(1)",
        "self.__init__.__globals__.os",
        "raise_exception.__globals__['os'].system('touch {path}')",
        "'x'.format.__globals__.os",
        "range(10**9)|list",
        "messages[0].update(content='x')",
    ],
)
def test_a_hostile_chat_template_runs_nothing(attack, tmp_path):
    """Templates come with models of strangers: transformers renders them in a sandbox, and this is where it is relied on."""
    text = (
        "{{ " + attack.replace("{path}", str(tmp_path / "ran")) + " }}{{ messages[0]['content'] }}"
    )
    message = refusal(prompts.set_chat_template, sft.tiny_tokenizer(), text)
    assert any(word in message for word in ("SecurityError", "UndefinedError", "OverflowError")), (
        message
    )
    assert not (tmp_path / "ran").exists()
    spy = sft.tiny_tokenizer()
    prompts.set_chat_template(
        spy,
        "{{ messages.__class__ }}{{ '{0.__class__}'.format(messages) }}{{ messages[0]['content'] }}{{ raise_exception.__globals__ }}",
    )
    assert prompts.render_prompt(ROW, spy, "") == "1+1?"


def test_a_template_that_refuses_a_row_is_one_sentence():
    strict = sft.tiny_tokenizer()
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + sft.TEMPLATE
    )
    assert prompts.encode_prompts([ROW], strict, "", 100, "error")
    message = refusal(prompts.encode_prompts, [ROW], strict, "Be brief.", 100, "error")
    assert all(
        word in message
        for word in ("system_prompt='Be brief.'", "System role not supported", "row '1'")
    ), message
    with pytest.raises(jinja2.TemplateError):  # what it came as
        strict.apply_chat_template([{"role": "system", "content": ""}], tokenize=False)


@pytest.mark.parametrize(
    "template, stop_ids, sentence",
    [
        (sft.TEMPLATE, [0], "the chat template ends a turn with '<|end|>'"),
        (sft.TEMPLATE, [3, 0], "the chat template ends a turn with '<|end|>'"),
        (
            sft.TEMPLATE,
            [3],
            "warning: the chat template ends a turn with '<|end|>', which does not end a completion",
        ),
        (
            sft.TEMPLATE.replace("<|end|>", "\n"),
            [0],
            "warning: the chat template ends a turn with '\\n', which does not end a completion",
        ),
        (
            sft.TEMPLATE.replace("<|end|>", "<|end|>\\n"),
            [0],
            "the chat template ends a turn with '<|end|>'",
        ),  # as Qwen does
        (OWN, [0], "the chat template ends a turn with nothing"),
        (None, [0], "a base model: no chat template"),
        (
            "{{ messages[0]['content'] }}",
            [0],
            "the chat template leaves the assistant's message out",
        ),
    ],
)
def test_it_is_said_whether_a_turns_end_ends_a_completion(template, stop_ids, sentence):
    tokenizer = sft.tiny_tokenizer()
    tokenizer.chat_template = template
    assert prompts.end_of_turn(tokenizer, stop_ids) == sentence


def test_the_tokens_that_end_a_completion_are_the_tokenizers_and_the_models(
    tmp_path, tiny_model_dir
):
    tokenizer = sft.tiny_tokenizer()
    assert stop_token_ids(str(tiny_model_dir), tokenizer, 101) == [0]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 0]}')
    assert stop_token_ids(str(tmp_path), tokenizer, 101) == [0, 4]
    tokenizer.eos_token = None
    assert stop_token_ids(str(tmp_path), tokenizer, 101) == [4, 0]
    (tmp_path / "generation_config.json").write_text("{}")
    assert "end-of-sequence" in refusal(stop_token_ids, str(tmp_path), tokenizer, 101)


def test_a_dry_run_shows_the_prompt_and_what_ends_a_completion(tiny_model_dir, tmp_path, capsys):
    path = jsonl(tmp_path, {"prompt": "1+1?", "answer": "2"})
    flags = [
        f"--model={tiny_model_dir}",
        f"--dataset.name={path}",
        "--reward_funcs=['math']",
        "--reward_workers=0",
        "--system_prompt=S",
        "--max_completion_length=99",
    ]
    dry_run(load_config(flags), 1, torch.float32, {})
    out = capsys.readouterr().out
    assert (
        "a completion ends with: 0 '<|end|>'; the chat template ends a turn with '<|end|>'" in out
        and "'<|system|>S<|user|>1+1?<|assistant|>'" in out
    )
    dry_run(load_config([*flags, f"--chat_template={OWN}"]), 1, torch.float32, {})
    out = capsys.readouterr().out
    assert (
        "the chat template ends a turn with nothing" in out and "'[system]S[user]1+1?[me]'" in out
    )


# --- leakage


def test_leakage_is_of_prompts_not_of_ids_and_is_counted(capsys):
    rows = [{"id": str(i), "prompt": f"p{i}"} for i in range(5)]
    data.refuse_leakage(rows, [{"id": "0", "prompt": "p9"}, {"id": "1", "prompt": "P1"}], False)
    data.refuse_leakage(rows, [], False)
    leaky = [{"id": "a", "prompt": "p9"}, {"id": "b", "prompt": "p1"}, {"id": "c", "prompt": "p4"}]
    assert all(
        word in refusal(data.refuse_leakage, rows, leaky, False)
        for word in ("2 of 3", "'b'", "allow_leakage")
    )
    assert capsys.readouterr().out == ""
    data.refuse_leakage(rows, leaky, True)
    assert "2 of 3" in capsys.readouterr().out


def test_a_run_whose_evaluation_prompts_are_trained_on_is_refused_also_by_the_easy_pool(
    tiny_model_dir, tmp_path, capsys
):
    sums = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(6)]
    for folder, rows in (
        ("train", sums[:3]),
        ("easy", sums[3:5]),
        ("test", sums[4:]),
        ("clean", sums[5:]),
    ):
        (tmp_path / folder).mkdir()
        jsonl(tmp_path / folder, *rows)

    def inputs(evaluated: str, *flags):
        common = {
            "model": tiny_model_dir,
            "dataset_name": tmp_path / "train/rows.jsonl",
            "eval_dataset_name": tmp_path / evaluated / "rows.jsonl",
        }
        more = ["--eval_steps=5", "--reward_funcs=['math']", "--reward_workers=0", *flags]
        return load_inputs(
            load_config([*(f"--{key}={value}" for key, value in common.items()), *more]), 1
        )

    easy = [f"--easy_dataset.name={tmp_path / 'easy/rows.jsonl'}", "--easy_schedule={0: 0.5}"]
    assert [row["prompt"] for row in inputs("test").eval_rows] == ["4+1", "5+1"]
    assert "3 of 3 evaluation prompts" in refusal(inputs, "train")
    assert "1 of 2 evaluation prompts" in refusal(inputs, "test", *easy)
    assert (
        len(inputs("clean", *easy).easy) == 2
        and "evaluation prompts" not in capsys.readouterr().out
    )
    assert (
        len(inputs("test", *easy, "--allow_leakage=True").eval_rows) == 2
        and "1 of 2 evaluation prompts" in capsys.readouterr().out
    )


def test_the_tiny_tokenizer_has_a_token_per_character_and_survives_saving(tiny_model_dir):
    """AutoTokenizer chooses the class by the model beside it, not by what was saved."""
    loaded = load_model_files(str(tiny_model_dir)).tokenizer
    text = "".join(sft.CHARACTERS) + "  a\n\n b it's <|end|> 10\n"
    for tokenizer in (TOKENIZER, loaded):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (
            tokenizer.decode(ids) == text
            and len(ids) == len(text) - len("<|end|>") + 1
            and len(tokenizer) == 101
        )
        assert ids[:96] == list(range(5, 101))
    assert (
        loaded.chat_template == TOKENIZER.chat_template
        and loaded.eos_token_id == TOKENIZER.eos_token_id == 0
    )


# --- rewards


@pytest.mark.parametrize(
    "text, content",
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{a{b{c}}d} end}", "a{b{c}}d"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{never", None),
        ("4", None),
        (r"\boxed 4", None),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{3}}", "3"),
        ("", None),
    ],
)
def test_the_last_complete_box_counts(text, content):
    assert rewards.last_boxed(text) == content


def test_a_megabyte_of_open_boxes_is_answered():
    """A scan that is quadratic would take hours: beyond the time limit of every test."""
    for text in (
        r"\boxed{" * 100_000,
        "{" * 500_000,
        r"\boxed{" + "}" * 500_000,
        r"\boxed{" + "9" * 500_000 + "}",
    ):
        assert rewards.math_reward(text, "4") == 0.0


@pytest.mark.parametrize(
    "box, answer, expected",
    [
        (r"\frac{1}{2}", "0.5", 1),
        ("0.5", r"\frac{1}{2}", 1),
        (r"\frac12", "1/2", 1),
        ("4", "4", 1),
        ("4.0", "4", 1),
        ("5", "4", 0),
        (r"2\sqrt{3}", r"\sqrt{12}", 1),
        (r"\{1, 2\}", r"\{2,1\}", 1),
        ("(1,2)", "(2,1)", 0),
        ("x+1", "1+x", 1),
        ("", "4", 0),
        ("-3", "3", 0),
        ("4", 4, 1),
    ],
)
def test_math_reward_compares_values_not_spellings(box, answer, expected):
    assert rewards.math_reward(f"I get \\boxed{{{box}}}.", answer) == expected


def test_math_reward_gives_nothing_outside_a_box_or_for_an_earlier_box():
    assert rewards.math_reward("The answer is 4.", "4") == 0.0
    assert rewards.math_reward(r"\boxed{4}, no, \boxed{5}", "4") == 0.0


def test_math_reward_survives_hostile_text():
    for box in (
        "__import__('os').system('false')",
        "\x00",
        r"\frac{1}{0}",
        "(" * 9,
        "\ud83d",
        r"\text{" * 9,
        "9" * 1000,
        "None",
    ):
        assert rewards.math_reward(f"\\boxed{{{box}}}", "4") == 0.0


ROLLOUTS = [{"text": text} for text in ("2*3+4", "2+3+4", r"\boxed{10}", "3*4-2")]
ROWS = [
    {
        "id": str(i),
        "task": "countdown",
        "prompt": "",
        "answer": {"numbers": [2, 3, 4], "target": 10},
    }
    for i in range(2)
]


def test_score_is_prompt_major_and_weighs_the_rewards(monkeypatch):
    monkeypatch.setitem(
        rewards.REWARDS,
        "length",
        lambda completion, answer, id, **row: len(completion) + 100 * int(id),
    )
    total, metrics = scoring.score(
        ROLLOUTS, ROWS, {"reward_funcs": ["countdown", "length"], "reward_weights": [2.0, -0.5]}
    )
    assert (
        torch.equal(total, torch.tensor([[2 - 2.5, -2.5], [-55.0, 2 - 52.5]]))
        and total.dtype == torch.float32
    )
    no_failures = {
        f"reward/{name}/{kind}": 0
        for name in ("countdown", "length")
        for kind in ("timeouts", "errors")
    }
    assert (
        metrics
        == {"reward/failures": 0, "reward/countdown/mean": 0.5, "reward/length/mean": 56.25}
        | no_failures
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error_with_reward_value_and_row_and_counts_as_0(
    monkeypatch, value
):
    monkeypatch.setitem(
        rewards.REWARDS,
        "odd",
        lambda completion, answer, **row: value if completion == "3*4-2" else 0.5,
    )
    total, metrics = scoring.score(
        ROLLOUTS, ROWS, {"reward_funcs": ["odd"], "reward_weights": [1.0]}
    )
    assert total.tolist() == [[0.5, 0.5], [0.5, 0.0]]
    assert metrics == {
        "reward/failures": 1,
        "reward/odd/mean": 0.375,
        "reward/odd/timeouts": 0,
        "reward/odd/errors": 1,
    }
    _, (failed,) = scoring.measure(ROLLOUTS, ROWS, scoring.columns_of(["odd"], [1.0], ROWS), {})
    assert (failed["reward"], failed["id"], failed["kind"], failed["completion"]) == (
        "odd",
        "1",
        "error",
        "3*4-2",
    ) and f"gave {value}" in failed["reason"]


def correct_modes(texts: list[str], rows: list[dict]) -> list:
    rollouts, columns = (
        [{"text": text} for text in texts],
        scoring.columns_of(["countdown"], [1.0], rows),
    )
    right = scoring.correct(scoring.measure(rollouts, rows, columns, {})[0], columns)
    return scoring.correct_modes(rollouts, rows, right, {})


def test_correct_modes_count_right_answers_and_different_ones():
    texts = ["2*3+4", "4+3*2", "3*4-2", "1", "2", "3", "4", "2+3+4"]
    found = correct_modes(texts, ROWS)
    assert found == [(3, {"2*3+4", "3*4-2"}), (0, set())]
    assert correct_modes(texts, [{**row, "task": ""} for row in ROWS]) == [(3, None), (0, None)]
