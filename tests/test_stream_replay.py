"""The replay buffer against numpy, the formula and slow loops."""

import copy
import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prompts import prompt_key
from stream import Replay, keep_value

examples = settings(max_examples=40)
ROWS = [{"id": str(i), "prompt": f"Prompt {i}"} for i in range(12)]
KEYS = [prompt_key(row) for row in ROWS]


def batches(seed: int, steps: int, P: int = 4, G: int = 4) -> list[tuple]:
    """`steps` times P different rows and rewards (P, G) in eighths, whose means fp32 holds
    exactly."""
    rng = random.Random(seed)
    found = []
    for _ in range(steps):
        rows = rng.sample(ROWS, P)
        rewards = [[rng.randint(0, 8) / 8 for _ in range(G)] for _ in range(P)]
        found.append((rows, torch.tensor(rewards)))
    return found


def empty(size: int = 12) -> Replay:
    return Replay(ROWS, size, 0.5, {})


def filled(seed: int, steps: int = 6, size: int = 12, ucb: float = 0.5) -> Replay:
    buffer = Replay(ROWS, size, ucb, {})
    for rows, rewards in batches(seed, steps):
        buffer.update(rows, rewards)
    return buffer


# --- what it remembers


@examples
@given(st.integers(0, 9999), st.integers(1, 15))
def test_mean_and_variance_of_the_gaps_equal_those_of_numpy_in_which_old_visits_fade(seed, steps):
    gaps = {}
    buffer = empty()
    for rows, rewards in batches(seed, steps):
        for row, group in zip(rows, rewards.tolist()):
            gaps.setdefault(prompt_key(row), []).append(max(group) - sum(group) / len(group))
        buffer.update(rows, rewards)
    assert set(buffer.state["prompts"]) == set(gaps)
    assert buffer.state["total"] == 4 * steps
    for key, (visits, mean, variance) in buffer.state["prompts"].items():
        assert visits == len(gaps[key])
        weights = faded(visits)
        wanted_mean = np.average(gaps[key], weights=weights)
        deviations = np.square(gaps[key] - wanted_mean)
        wanted = [wanted_mean, np.average(deviations, weights=weights)]
        assert [mean, variance] == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def faded(visits: int) -> list[float]:
    """The weight of each visit: equal for four, and each later one has a quarter of all."""
    weights = [1 / min(visits, 4)] * min(visits, 4)
    for _ in range(visits - 4):
        weights = [weight * 3 / 4 for weight in weights] + [1 / 4]
    return weights


def test_a_prompt_that_is_solved_by_now_falls_behind_one_that_still_teaches_a_little():
    buffer = Replay(ROWS, 12, 0.0, {})
    solved = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    for _ in range(20):
        buffer.update(ROWS[:1], solved[:1])
    buffer.update(ROWS[1:2], torch.tensor([[0.25, 0.0]]))
    assert buffer.mix(ROWS[2:4], 0.5) == [ROWS[2], ROWS[0]]
    for _ in range(6):
        buffer.update(ROWS[:1], solved[1:])
    assert buffer.mix(ROWS[2:4], 0.5) == [ROWS[2], ROWS[1]]


def test_a_group_teaches_the_gap_between_its_best_and_its_mean():
    buffer = empty()
    rewards = [[1.0, 0, 0, 0], [1.0, 1, 1, 1], [0.0, 0, 0, 0], [1.0, 1, 0, 0]]
    buffer.update(ROWS[:4], torch.tensor(rewards))
    means = [buffer.state["prompts"][key][:2] for key in KEYS[:4]]
    assert means == [(1, 0.75), (1, 0.0), (1, 0.0), (1, 0.5)]


def test_a_prompt_twice_in_a_step_is_two_visits():
    buffer = empty()
    buffer.update([ROWS[0], ROWS[0]], torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert buffer.state == {"total": 2, "prompts": {KEYS[0]: (2, 0.25, 0.0625)}}


def test_prompts_that_differ_in_spaces_are_one_and_in_case_are_not():
    texts = ("What is 1+1?", "What  is\n1+1? ", " What is 1+1?")
    rows = [{"prompt": text} for text in texts]
    assert len({prompt_key(row) for row in rows}) == 1
    assert prompt_key({"prompt": "Sort: Ab"}) != prompt_key({"prompt": "Sort: aB"})
    assert prompt_key(rows[0]) != prompt_key({"prompt": "What is 1 + 1?"})
    buffer = Replay(rows, 12, 0.5, {})
    buffer.update(rows, torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]]))
    ((visits, mean, _),) = buffer.state["prompts"].values()
    assert visits == 3
    assert mean == pytest.approx(1 / 3)
    assert buffer.state["total"] == 3
    assert buffer.mix([ROWS[0], ROWS[1]], 0.5) == [ROWS[0], rows[0]]
    # it is in the step already, with a space more
    assert buffer.mix([ROWS[0], rows[2]], 1.0) == [ROWS[0], rows[2]]
    assert prompt_key({"prompt": "\ud83d"})  # JSON can hold half a character


def test_a_group_of_equal_rewards_has_taught_exactly_nothing():
    rewards = torch.tensor([[0.7] * 12, [0.9] * 12])
    assert (rewards.amax(1) != rewards.mean(1)).any()  # in float32
    buffer = Replay(ROWS, 12, 0.5, {})
    buffer.update(ROWS[:2], rewards)
    assert set(buffer.state["prompts"].values()) == {(1, 0.0, 0.0)}


# --- what it chooses


@examples
@given(st.integers(0, 9999), st.sampled_from([0.0, 0.5, 3.0]))
def test_a_score_is_the_mean_gap_plus_c_times_the_root_of_log_total_over_visits(seed, ucb):
    buffer = filled(seed, ucb=ucb)
    for key, (visits, mean, _) in buffer.state["prompts"].items():
        wanted = mean + ucb * math.sqrt(math.log(24) / visits)
        assert buffer.ucb_score(key) == pytest.approx(wanted, rel=1e-12)


def test_the_bonus_brings_back_what_was_hardly_tried_and_without_it_the_mean_decides():
    state = {"total": 40, "prompts": {KEYS[0]: [39, 0.5, 0.1], KEYS[1]: [1, 0.4, 0.0]}}
    for ucb, first in ((0.0, ROWS[0]), (0.5, ROWS[1])):
        assert Replay(ROWS, 12, ucb, state).mix(ROWS[2:4], 0.5) == [ROWS[2], first]


def replaced(fraction: float, P: int) -> int:
    """Of P rows: none, all, or as near to the fraction as leaves one old and one new."""
    if fraction in (0, 1):
        return int(fraction * P)

    def distance(n):
        return abs(n - fraction * P), n % 2  # a half goes to the even one

    return min(range(1, P), key=distance, default=0)


@examples
@given(
    st.integers(0, 9999),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]),
    st.integers(1, 8),
)
def test_mixing_keeps_the_size_takes_the_highest_scores_and_repeats_no_prompt(
    seed, steps, fraction, P
):
    buffer = filled(seed, steps)
    batch = random.Random(seed).sample(ROWS, P)
    state = copy.deepcopy(buffer.state)
    before = list(batch)
    mixed = buffer.mix(batch, fraction)
    present = {prompt_key(row) for row in batch}
    candidates = [key for key in state["prompts"] if key not in present]
    candidates.sort(key=lambda key: (-buffer.ucb_score(key), key))
    wanted = replaced(fraction, P)
    taken = min(wanted, len(candidates))
    first = P - wanted
    assert len(mixed) == P
    assert len({prompt_key(row) for row in mixed}) == P
    assert mixed[:first] == batch[:first]
    assert [prompt_key(row) for row in mixed[first : first + taken]] == candidates[:taken]
    assert mixed[first + taken :] == batch[first + taken :]
    # choosing changes nothing
    assert batch == before
    assert buffer.state == state


def test_a_remembered_prompt_that_the_step_has_at_its_end_does_not_come_twice():
    buffer = Replay(ROWS, 12, 0.5, {"total": 1, "prompts": {KEYS[3]: [1, 0.5, 0.0]}})
    assert buffer.mix(ROWS[:4], 0.5) == ROWS[:4]


def test_a_fraction_of_0_an_empty_buffer_and_a_fraction_of_1():
    assert filled(0).mix(ROWS[:4], 0.0) == ROWS[:4]
    assert empty().mix(ROWS[:4], 1.0) == ROWS[:4]
    buffer = empty()
    buffer.update(ROWS[4:8], torch.tensor([[1.0, 0.0]] * 4))
    assert sorted(row["id"] for row in buffer.mix(ROWS[:4], 1.0)) == ["4", "5", "6", "7"]


# --- what it forgets


@examples
@given(st.integers(0, 9999), st.integers(1, 8))
def test_it_is_never_larger_than_its_size_and_the_lowest_promise_goes(seed, size):
    """Promise: mean gap plus standard deviation, worked out here from a buffer without a bound in
    the same state."""
    buffer = empty(size)
    for rows, rewards in batches(seed, 10):
        unbounded = Replay(ROWS, 99, 0.5, buffer.state)
        unbounded.update(rows, rewards)
        buffer.update(rows, rewards)
        everything = unbounded.state["prompts"]
        kept = buffer.state["prompts"]
        assert len(kept) == min(size, len(everything))
        kept_promises = []
        gone_promises = [0.0]
        for key, (_, mean, variance) in everything.items():
            value = mean + math.sqrt(variance)
            assert keep_value(everything[key]) == value
            if key in kept:
                assert kept[key] == everything[key]
                kept_promises.append(value)
            else:
                gone_promises.append(value)
        assert min(kept_promises) >= max(gone_promises)


def test_what_has_reliably_taught_nothing_goes_before_what_teaches_now_and_then():
    state = {"total": 8, "prompts": {KEYS[0]: [4, 0.1, 0.0], KEYS[1]: [4, 0.1, 0.2]}}
    buffer = Replay(ROWS, 2, 0.5, state)
    buffer.update([ROWS[2]], torch.tensor([[1.0, 0.0]]))
    assert set(buffer.state["prompts"]) == {KEYS[1], KEYS[2]}


def test_prompts_that_left_the_dataset_are_forgotten_and_those_of_the_easy_pool_never_remembered():
    state = json.loads(json.dumps(filled(0).state))
    before = copy.deepcopy(state)
    smaller = Replay(ROWS[:5], 12, 0.5, state)
    assert set(smaller.state["prompts"]) == set(state["prompts"]) & set(KEYS[:5])
    assert smaller.state["total"] == 24
    smaller.update([{"prompt": "of the easy pool"}, ROWS[0]], torch.tensor([[1.0, 0.0]] * 2))
    assert set(smaller.state["prompts"]) <= set(KEYS[:5])
    assert smaller.state["total"] == 26
    for row in smaller.mix(ROWS[:1] * 4, 1.0):
        assert row in ROWS[:5]
    assert state == before  # what a checkpoint holds is not worked on


# --- across a restart, and what it leaves alone


@examples
@given(st.integers(0, 9999), st.integers(0, 12), st.integers(2, 12))
def test_a_buffer_restored_from_json_goes_on_exactly_as_the_one_that_was_never_stopped(
    seed, stop, size
):
    through = empty(size)
    for step, (rows, rewards) in enumerate(batches(seed, 14)):
        if step == stop:
            saved = json.loads(json.dumps(through.state))
            # another order of the same prompts
            saved["prompts"] = dict(sorted(saved["prompts"].items()))
            restored = Replay(copy.deepcopy(ROWS), size, 0.5, saved)
        chosen = through.mix(rows, 0.5)
        if step >= stop:
            assert restored.mix(rows, 0.5) == chosen
            restored.update(chosen, rewards)
        through.update(chosen, rewards)
    assert restored.state == through.state


def test_inputs_come_back_unchanged_and_an_earlier_state_stays_what_it_was():
    ((rows, rewards),) = batches(3, 1)
    buffer = filled(5)
    state = buffer.state
    before = copy.deepcopy((ROWS, rows, state, rewards))
    buffer.update(rows, rewards)
    buffer.mix(rows, 0.5)
    assert (ROWS, rows, state) == before[:3]
    assert torch.equal(rewards, before[3])
    assert buffer.state != state
