"""How packed rows are laid out: every prompt once, every token in one block, each query's keys."""

from itertools import pairwise

import torch
from hypothesis import example, given
from packed_rows import POWERS, A, B, batch_of, examples, group, rows_of, shapes

import learner
import packing


def slow_runs(rows: list) -> list[list]:
    """Runs of neighbouring rows with one prompt."""
    runs = []
    for i, (prompt, _) in enumerate(rows):
        if i and prompt == rows[i - 1][0]:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


@examples
@given(shapes)
@example([(4, n) for n in POWERS])
@example([(i % 6, n) for i, n in enumerate(POWERS * 2)])
def test_a_packed_batch_holds_every_neighbouring_prompt_once_and_every_completion(shape):
    rows = rows_of(shape)
    batch = batch_of(rows, junk=3)
    arguments = batch["ids"], batch["prompt_lengths"], batch["lengths"]
    packed = packing.pack(*arguments)
    runs = slow_runs(rows)
    count = sum(len(rows[r[0]][0]) for r in runs) + sum(len(c) for _, c in rows)
    assert packed.ids.shape == packed.positions.shape == (1, count)
    (unit,) = learner.units_of(batch, len(rows), pack=True)
    assert (unit.cost, unit.saved) == (packed.ids.shape[1], 0)
    begins = {r[0] for r in runs}
    repeats = packing.repeats_prompt(*arguments[:2])
    assert repeats.tolist() == [i not in begins for i in range(len(rows))]
    ids = packed.ids[0].tolist()
    positions = packed.positions[0].tolist()
    last = packed.prompt_end.tolist()
    first = packed.completion_start.tolist()
    seen = set()
    for i, (prompt, completion) in enumerate(rows):
        places = [
            *range(last[i] - len(prompt) + 1, last[i] + 1),
            *range(first[i], first[i] + len(completion)),
        ]
        assert [ids[x] for x in places] == prompt + completion
        assert [positions[x] for x in places] == list(range(len(places)))
        seen.update(places)
    assert seen == set(range(len(ids)))
    assert all(len({last[i] for i in r}) == 1 for r in runs)
    assert len({last[r[0]] for r in runs}) == len(runs)


@examples
@given(shapes)
@example([(4, n) for n in range(1, 19)])
@example([(0, 5)] * 8 + [(0, 16)])
def test_every_token_is_in_one_block_whose_padding_is_less_than_half(shape):
    rows = rows_of(shape)
    batch = batch_of(rows)
    packed = packing.pack(batch["ids"], batch["prompt_lengths"], batch["lengths"])
    place = 0
    for b in packed.blocks:
        size = b.tokens.stop - b.tokens.start
        padded = size if b.queries is None else b.queries.numel()
        assert b.tokens.start == place
        assert size <= padded < 2 * size
        assert padded % b.count == 0
        if b.queries is not None:
            assert b.queries.flatten()[b.real].tolist() == list(range(size))
            assert len(set(b.real.tolist())) == size
        place += size
    assert place == packed.ids.shape[1]
    # a prompt of one row stays with it
    segments = sum(len(run) + (len(run) > 1) for run in slow_runs(rows))
    assert sum(b.count for b in packed.blocks) == segments
    # prompts and rows have up to 35 tokens, what follows up to 18: few kernels, however many
    # lengths there are
    assert len(packed.blocks) <= 6 + 5


@examples
@given(shapes)
def test_attention_sees_exactly_a_rows_own_past(shape):
    """For every query of every block: the places it attends to, from a slow loop over rows."""
    rows = rows_of(shape)
    batch = batch_of(rows)
    arguments = batch["ids"], batch["prompt_lengths"], batch["lengths"]
    packed = packing.pack(*arguments)
    wanted = {}
    for i, (prompt, completion) in enumerate(rows):
        last, first = int(packed.prompt_end[i]), int(packed.completion_start[i])
        places = [*range(last - len(prompt) + 1, last + 1), *range(first, first + len(completion))]
        for n, place in enumerate(places):
            assert wanted.setdefault(place, places[: n + 1]) == places[: n + 1]
    for b in packed.blocks:
        start = b.tokens.start
        Q = (b.tokens.stop - start) // b.count
        queries = torch.arange(b.count * Q).view(b.count, Q) if b.queries is None else b.queries
        Q = queries.shape[1]
        keys = queries + start if b.keys is None else b.keys
        seen = packing.seen_keys(b)
        if seen is None:
            seen = torch.ones(1, 1, Q, Q).tril().bool()
        seen = seen[:, 0].expand(b.count, Q, -1)
        real = range(b.count * Q) if b.real is None else b.real.tolist()
        for i in real:
            s, t = divmod(i, Q)
            assert keys[s][seen[s, t]].tolist() == wanted[int(queries[s, t]) + start]
    plan = packing.pack(*arguments, varlen=True)
    assert plan.blocks == []
    assert all(torch.equal(x, y) for x, y in zip(plan[:4], packed[:4], strict=True))
    assert attended(plan.varlen, plan.ids.shape[1]) == wanted


def attended(plan, count: int) -> dict:
    """Query: the places whose keys varlen_attn shows to it."""
    keys = torch.arange(count) if plan.keys is None else plan.keys
    cu_seq_q, cu_seq_k = plan.cu_seq_q.tolist(), plan.cu_seq_k.tolist()
    places = {}
    for i, (start, end) in enumerate(pairwise(cu_seq_q)):
        own = keys[cu_seq_k[i] : cu_seq_k[i + 1]].tolist()
        assert 0 < end - start <= plan.max_q
        assert len(own) <= plan.max_k
        for query in range(start, end):
            places[query] = own[: len(own) - (end - 1 - query)]
    assert cu_seq_q[0] == cu_seq_k[0] == 0
    assert cu_seq_q[-1] == count
    assert cu_seq_k[-1] == len(keys)
    return places


def test_equal_lengths_need_no_padding_and_no_indices():
    batch = batch_of(group(A, 4, 4) + group(B, 4, 4))
    blocks = packing.pack(batch["ids"], batch["prompt_lengths"], batch["lengths"]).blocks
    (block,) = [b for b in blocks if b.keys is not None]
    assert block.queries is None
    assert block.real is None


def test_the_example_of_the_docstrings():
    ids = torch.tensor([[5, 5, 1, 0], [5, 5, 2, 2], [6, 3, 0, 0]])  # p p a, p p b b, q c
    prompt_lengths = torch.tensor([2, 2, 1])
    lengths = torch.tensor([1, 2, 1])
    cut = packing.segments(ids, prompt_lengths, lengths)
    expected = [[0, 0, 2], [0, 2, 0, 1], [0, 0, 2, 2], [2, 2, 1, 2]]
    assert [values.tolist() for values in cut] == expected
    packed = packing.pack(ids, prompt_lengths, lengths)
    assert packed.ids.tolist() == [[5, 5, 6, 3, 1, 2, 2]]
    assert packed.positions.tolist() == [[0, 1, 0, 1, 2, 2, 3]]
    assert packed.prompt_end.tolist() == [1, 1, 2]
    assert packed.completion_start.tolist() == [4, 5, 3]
