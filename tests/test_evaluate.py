"""evaluate.evaluate_problems with an engine that needs no model: what it asks for, what it counts,
and that any number of ranks finds the same."""

from types import SimpleNamespace

import pytest
import torch
from digit_engine import FAKE_REWARD, TOKENIZER, FakeEngine, rows_of
from row_files import refusal

import evaluate
import rollout
import scoring
import sft
from checks import FLAGS as FLAGS_OF
from common import load_config
from ranks import World

ROWS = rows_of("differ", "luck", "same", "broken", "luck")
FLAGS = [
    "--reward_funcs=['fake']",
    "--reward_workers=0",
    "--eval_num_generations=4",
    "--eval_temperature=0.3",
    "--max_completion_length=9",
]


def evaluated(rank: int, size: int, gather, monkeypatch, seed: int = 0) -> tuple:
    """(what this rank returns, the calls of its engine). gather: stands in for the collective."""
    engine = FakeEngine()
    monkeypatch.setattr(evaluate, "gather_objects", gather)
    exam = evaluate.Exam(engine, TOKENIZER, [0], ROWS, [FAKE_REWARD])
    world = World(rank, size, torch.device("cpu"))
    return evaluate.evaluate_problems(exam, load_config(FLAGS), world, seed), engine.calls


def alone(monkeypatch, seed: int = 0) -> tuple:
    return evaluated(0, 1, lambda value: [value], monkeypatch, seed)


def test_an_evaluation_samples_at_its_own_temperature_and_counts_what_is_right(monkeypatch):
    records, (call,) = alone(monkeypatch)
    assert (call["n"], call["temperature"], call["max_tokens"]) == (4, 0.3, 9)
    by_id = {record["id"]: record for record in records}
    assert list(by_id) == ["q0", "q1", "q2", "q3", "q4"]
    # every other one is right, all are, all fail
    counts = {
        name: (by_id[name]["correct"], by_id[name]["failures"]) for name in ("q0", "q2", "q3")
    }
    assert counts == {"q0": (2, 0), "q2": (4, 0), "q3": (0, 4)}


def test_a_run_evaluates_its_held_out_rows_and_always_with_the_same_seeds(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(evaluate, "gather_objects", lambda value: [value])
    monkeypatch.setattr(evaluate, "deciding_functions", lambda rows, c: [FAKE_REWARD])
    inputs = SimpleNamespace(
        eval_rows=ROWS[:2], pools=[ROWS[2:]], easy=ROWS[2:], tokenizer=TOKENIZER, stop_ids=[0]
    )
    c = load_config([*FLAGS, "--seed=7"])
    records = evaluate.evaluate(engine, inputs, c, World(0, 1, torch.device("cpu")))
    assert [record["id"] for record in records] == [row["id"] for row in ROWS[:2]]
    (call,) = engine.calls
    assert call["prompts_ids"] == [row["prompt_ids"] for row in ROWS[:2]]
    assert call["seeds"] == [rollout.prompt_seed("eval", 0, i) for i in range(2)]
    metrics = evaluate.summarize(records, 4)
    assert metrics["eval/mean@4"] == metrics["eval/pass@1"]


def test_answers_that_differ_are_counted_where_a_task_tells_them_apart(monkeypatch):
    """Not the right ones, of which several may be the same."""
    found = [(4, {"a"}), (3, {"a", "b"}), (0, set()), (4, None), (1, None)]
    monkeypatch.setattr(scoring, "correct_modes", lambda *args: found)
    records, _ = alone(monkeypatch)
    assert [record["distinct"] for record in records] == [1, 2, 0, None, None]


def test_a_problem_is_solved_from_its_first_right_answer_on_and_failures_are_of_answers():
    records = []
    for correct, failures, distinct, modes in ((0, 3, 0, 4), (1, 0, 1, 0), (4, 1, 2, 4)):
        record = {"correct": correct, "failures": failures}
        records.append(record | {"distinct": distinct, "num_modes": modes})
    assert evaluate.summarize(records, 4) == {
        "eval/mean@4": pytest.approx(5 / 12),
        "eval/pass@1": pytest.approx(5 / 12),
        "eval/pass@4": pytest.approx(2 / 3),
        "eval/distinct@4": 1.0,
        "eval/coverage@4": 0.25,  # of the two whose number of answers is known
        "eval/reward_failures": 4,
    }


def test_two_ranks_share_the_problems_and_both_know_all_records(monkeypatch):
    whole, (call,) = alone(monkeypatch)
    shares, asked = [], []
    for rank in range(2):
        share, calls = evaluated(rank, 2, lambda value: [value], monkeypatch)
        shares.append(share)
        asked += calls[0]["seeds"]
    assert [len(share) for share in shares] == [3, 2]
    assert sorted(asked) == sorted(call["seeds"])
    for rank in range(2):
        found, _ = evaluated(rank, 2, lambda value: shares, monkeypatch)
        assert found == whole  # in the same order, so files of other ranks match line by line


def test_another_evaluation_seed_draws_other_samples(monkeypatch):
    records, (call,) = alone(monkeypatch)
    others, (other,) = alone(monkeypatch, seed=1)
    assert {record["seed"] for record in records} == {0}
    assert {record["seed"] for record in others} == {1}
    assert set(call["seeds"]).isdisjoint(other["seeds"])


def test_a_running_mean_is_the_mean_at_first_and_forgets_by_a_tenth():
    assert evaluate.running_mean([1.0, 3.0]) == pytest.approx([1.0, 3.9 / 1.9])
    assert evaluate.running_mean([0.0] * 200 + [1.0])[-1] == pytest.approx(0.1)
    assert evaluate.running_mean([]) == []


def test_the_shown_group_is_the_first_whose_rewards_differ():
    tokenizer = sft.tiny_tokenizer()
    texts = ["1", "2", "3", "4"]
    rollouts = []
    for i, text in enumerate(texts):
        ids = tokenizer.convert_tokens_to_ids([text])
        prompt = tokenizer.convert_tokens_to_ids(list("ab")[i // 2 : i // 2 + 1])
        rollouts.append({"prompt_ids": prompt, "completion_ids": ids, "finish_reason": "stop"})
    shown = rollout.show(tokenizer, rollouts, torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    assert shown.splitlines() == [
        "prompt (1 tokens): 'b'",
        "  reward 1.000, 1 tokens (stop): '4'",
        "  reward 0.000, 1 tokens (stop): '3'",
    ]
    equal = rollout.show(tokenizer, rollouts, torch.ones(2, 2))
    assert equal.splitlines() == [
        "prompt (1 tokens): 'a'",
        "  reward 1.000, 1 tokens (stop): '1'",
        "  reward 1.000, 1 tokens (stop): '2'",
    ]
    same = [rollouts[0], rollouts[1], rollouts[2], rollouts[0]]  # the last is the first again
    assert rollout.show(tokenizer, same, torch.ones(1, 4)).endswith("'3'")
    assert rollout.show(tokenizer, rollouts[:1] * 3, torch.ones(1, 3)).count("reward") == 1


def test_an_evaluation_with_no_seed_or_no_place_to_write_is_refused_before_anything_loads(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluate, "load_checked_files", lambda c: pytest.fail("it goes on"))
    c, own = load_config([]), FLAGS_OF["evaluate"]
    assert "--seeds=0 must be at least 1" in refusal(evaluate.main, c, own | {"seeds": 0})
    taken = tmp_path / "eval.jsonl"
    taken.with_suffix(".jsonl.tmp").mkdir()  # where it would be written first
    said = refusal(evaluate.main, c, own | {"output": str(taken)})
    assert "--output" in said and "is a folder or a device, not a file" in said
