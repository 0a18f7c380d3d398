"""Which rows a step takes: the stream, a mixture's stream, the easy pool."""

import copy
import json
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stream

few_examples = settings(max_examples=40)
fewer_examples = settings(max_examples=25)


def sources_of(*sizes) -> list[list[dict]]:
    """A source of rows for each size."""
    sources = []
    for s, size in enumerate(sizes):
        sources.append([{"id": f"{s}.{i}", "source": s} for i in range(size)])
    return sources


def stream_of(sources: list, weights: list, count: int, seed=0, first: int = 0) -> list[dict]:
    """`count` prompts from number `first` on, in steps of 10."""
    rows = []
    for step in range(first // 10, (first + count) // 10):
        rows += stream.prompts_for_step(sources, weights, step, 10, seed)
    return rows


# --- one source


@few_examples
@given(st.integers(1, 40), st.sampled_from([4, 8, 12]), st.integers(0, 20), st.integers(0, 3))
def test_a_step_in_parts_takes_the_same_prompts_in_the_same_order(count, size, step, seed):
    """So ranks that share a step out, and steps of another size, see one stream."""
    rows = [list(range(count))]
    whole = stream.prompts_for_step(rows, [1.0], step, size, seed)
    for parts in (2, 4):
        taken = []
        for part in range(parts):
            place = step * parts + part
            taken += stream.prompts_for_step(rows, [1.0], place, size // parts, seed)
        assert taken == whole


@few_examples
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3))
def test_every_row_comes_once_per_epoch_even_if_epochs_end_inside_a_step(count, size, seed):
    rows = []
    for step in range(math.ceil(3 * count / size)):
        rows += stream.prompts_for_step([range(count)], [1.0], step, size, seed)
    for epoch in range(3):
        assert sorted(rows[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_a_resumed_run_needs_nothing_to_see_the_prompts_it_would_have_seen():
    rows = [list(range(23))]
    ahead = [stream.prompts_for_step(rows, [1.0], step, 8, 7) for step in range(20)]
    stream.epoch_order.cache_clear()
    for step in reversed(range(20)):
        assert stream.prompts_for_step(rows, [1.0], step, 8, 7) == ahead[step]


def test_epochs_and_seeds_have_their_own_order_and_rows_stay_as_they_are():
    rows = [{"id": i} for i in range(50)]
    before = copy.deepcopy(rows)
    first = stream.prompts_for_step([rows], [1.0], 0, 50, 0)
    assert first != rows
    assert first != stream.prompts_for_step([rows], [1.0], 1, 50, 0)
    assert first != stream.prompts_for_step([rows], [1.0], 0, 50, 1)
    assert rows == before


# --- a mixture


@fewer_examples
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=5), st.integers(0, 3), st.integers(0, 5))
def test_every_thousand_prompts_hold_each_sources_share_to_the_row(weights, seed, block):
    sources = sources_of(*[7] * len(weights))
    rows = stream_of(sources, weights, 1000, seed, first=1000 * block)
    counts = Counter(row["source"] for row in rows)
    assert counts.total() == 1000
    for s, weight in enumerate(weights):
        assert abs(counts[s] - 1000 * weight / sum(weights)) < 1


def test_shares_that_come_out_even_are_exact_and_mixed_all_over_the_block():
    sources = sources_of(5, 50, 500)
    for block in range(3):
        rows = stream_of(sources, [5, 3.0, 2], 1000, first=1000 * block)
        assert Counter(row["source"] for row in rows) == {0: 500, 1: 300, 2: 200}
        for part in range(0, 1000, 250):  # 125 expected, standard deviation below 8
            assert 93 < sum(row["source"] == 0 for row in rows[part : part + 250]) < 157


def test_a_share_that_does_not_come_out_even_is_rounded_to_the_nearest():
    blocks = []
    for block in range(3):
        rows = stream_of(sources_of(5, 5), [2, 1], 1000, first=1000 * block)
        blocks.append([row["source"] for row in rows])
        assert Counter(blocks[-1]) == {0: 667, 1: 333}
    rows = stream_of(sources_of(5, 5), [1, 2], 1000)
    assert Counter(row["source"] for row in rows) == {0: 333, 1: 667}
    # every block has its own order
    assert blocks[0] != blocks[1]
    assert blocks[1] != blocks[2]
    assert blocks[2] != blocks[0]


@fewer_examples
@given(st.integers(0, 400), st.integers(0, 3), st.sampled_from([4, 8, 12, 1004]))
def test_a_mixtures_step_in_parts_takes_the_same_prompts_in_the_same_order(step, seed, size):
    sources = sources_of(3, 40, 11)
    weights = [0.2, 0.7, 0.1]
    whole = stream.prompts_for_step(sources, weights, step, size, seed)
    for parts in (2, 4):
        taken = []
        for part in range(parts):
            place = step * parts + part
            taken += stream.prompts_for_step(sources, weights, place, size // parts, seed)
        assert taken == whole


def test_every_row_of_a_source_comes_once_per_pass_over_it_across_blocks():
    sources = sources_of(37, 1003)
    rows = stream_of(sources, [1, 2], 6000)
    for s, source in enumerate(sources):
        ids = [row["id"] for row in rows if row["source"] == s]
        size = len(source)
        for first in range(0, len(ids) - size + 1, size):
            assert sorted(ids[first : first + size]) == sorted(row["id"] for row in source)
        assert ids[:size] != ids[size : 2 * size]


def test_a_mixture_is_a_pure_function_of_seed_and_step():
    sources = sources_of(13, 29)
    weights = [1, 3]
    before = json.dumps(sources)
    ahead = [stream.prompts_for_step(sources, weights, step, 16, 7) for step in range(150)]
    stream.epoch_order.cache_clear()
    stream.block_of_pools.cache_clear()
    for step in random.Random(0).sample(range(150), 150):
        assert stream.prompts_for_step(sources, weights, step, 16, 7) == ahead[step]
    other = [stream.prompts_for_step(sources, weights, step, 16, 8) for step in range(150)]
    assert other != ahead
    # nor do the sources take turns alike
    turns = [[[row["source"] for row in step] for step in run] for run in (ahead, other)]
    assert turns[0] != turns[1]
    assert json.dumps(sources) == before


def test_sources_of_the_same_rows_go_their_own_ways():
    twice = [[{"id": i, "source": s} for i in range(100)] for s in range(2)]
    rows = stream_of(twice, [1, 1], 200)
    first = [row["id"] for row in rows if row["source"] == 0][:90]
    second = [row["id"] for row in rows if row["source"] == 1][:90]
    assert first != second


# --- the easy pool

EASY = [{"id": f"easy {i}", "prompt": f"easy {i}"} for i in range(30)]
HARD = [{"id": f"hard {i}", "prompt": f"hard {i}"} for i in range(8)]


def mixed(step: int, share: float, seed: int = 1) -> list[dict]:
    return stream.with_easy_prompts(HARD, EASY, step, share, seed)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_the_share_of_easy_prompts_is_the_probability(share):
    """16,000 draws at fixed seeds: within 4 standard deviations, which a right implementation
    misses once in 16,000 seeds. And all 30 easy rows come equally often: chi-square of 29 degrees
    of freedom below its mean plus 4 standard deviations."""
    steps = [mixed(step, share, 5) for step in range(2000)]
    easy = Counter(row["id"] for step in steps for row in step if row in EASY)
    deviation = math.sqrt(share * (1 - share) / 16000)
    assert abs(easy.total() / 16000 - share) < 4 * deviation
    expected = easy.total() / 30
    chi_square = sum((easy[row["id"]] - expected) ** 2 / expected for row in EASY)
    assert chi_square < 29 + 4 * math.sqrt(58)
    for step in steps:
        for place in range(8):
            assert step[place] in EASY or step[place] is HARD[place]


def test_the_easy_pool_is_a_pure_function_and_none_or_all_at_its_ends():
    first = [mixed(step, 0.5) for step in range(20)]
    for step in reversed(range(20)):
        assert mixed(step, 0.5) == first[step]
    assert len({json.dumps(rows) for rows in first}) == 20
    assert first != [mixed(step, 0.5, seed=2) for step in range(20)]
    assert mixed(3, 0.0) == HARD
    assert stream.with_easy_prompts(HARD, [], 3, 1.0, 1) == HARD
    for step in range(50):
        assert all(row in EASY for row in mixed(step, 1))
    assert [row["id"] for row in HARD] == [f"hard {i}" for i in range(8)]


def test_a_larger_share_keeps_the_easy_prompts_of_a_smaller_one():
    """So a share that falls takes easy prompts away and exchanges none."""
    for step in range(20):
        for few, many in zip(mixed(step, 0.2), mixed(step, 0.6)):
            assert few == many or few not in EASY
