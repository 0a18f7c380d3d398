"""How packed rows are laid out: what neighbours share once, every token in one block, each query's
keys."""

from itertools import pairwise

import torch
from hypothesis import example, given
from packed_rows import POWERS, A, B, batch_of, examples, group, rows_of, shapes, shared_by

import learner
import packing


def slow_shares(rows: list) -> list[int]:
    """What each row shares with the row before it."""
    return [shared_by(before, row) for before, row in pairwise([None, *rows])]


@examples
@given(shapes)
@example([(4, n) for n in POWERS])
@example([(i % 8, n) for i, n in enumerate(POWERS * 2)])
def test_a_packed_batch_holds_once_what_neighbours_share_and_every_other_token(shape):
    rows = rows_of(shape)
    batch = batch_of(rows, junk=3)
    arguments = batch["ids"], batch["prompt_lengths"], batch["lengths"]
    packed, table = packing.pack(*arguments)
    shares = slow_shares(rows)
    assert packing.shared_tokens(*arguments).tolist() == shares
    count = sum(len(p) + len(c) for p, c in rows) - sum(shares)
    assert packed.ids.shape == packed.positions.shape == (1, count)
    (unit,) = learner.units_of(batch, len(rows), pack=True)
    assert unit.cost == count
    ids = packed.ids[0].tolist()
    positions = packed.positions[0].tolist()
    seen = set()
    before = []
    for places, share, (prompt, completion) in zip(table.tolist(), shares, rows, strict=True):
        size = len(prompt) + len(completion)
        assert set(places[size:]) <= {places[size - 1]}
        places = places[:size]
        assert [ids[x] for x in places] == prompt + completion
        assert [positions[x] for x in places] == list(range(size))
        assert places[:share] == before[:share]
        assert not seen.intersection(places[share:])
        seen.update(places)
        before = places
    assert seen == set(range(count))


@examples
@given(shapes)
@example([(4, n) for n in range(1, 19)])
@example([(0, 5)] * 8 + [(0, 16)])
def test_every_token_is_in_one_block_whose_padding_is_less_than_half(shape):
    rows = rows_of(shape)
    batch = batch_of(rows)
    packed, _ = packing.pack(batch["ids"], batch["prompt_lengths"], batch["lengths"])
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
    assert sum(b.count for b in packed.blocks) == len(rows)
    # rows have up to 35 tokens, and so have segments: few kernels, however many lengths there are
    assert len(packed.blocks) <= 6 + 6


@examples
@given(shapes)
def test_attention_sees_exactly_a_rows_own_past(shape):
    """For every query of every block: the places it attends to, from a slow loop over rows."""
    rows = rows_of(shape)
    batch = batch_of(rows)
    arguments = batch["ids"], batch["prompt_lengths"], batch["lengths"]
    packed, table = packing.pack(*arguments)
    wanted = {}
    for places, (prompt, completion) in zip(table.tolist(), rows, strict=True):
        places = places[: len(prompt) + len(completion)]
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
    plan, same_table = packing.pack(*arguments, varlen=True)
    assert plan.blocks == []
    assert torch.equal(plan.ids, packed.ids)
    assert torch.equal(plan.positions, packed.positions)
    assert torch.equal(same_table, table)
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
    packed, _ = packing.pack(batch["ids"], batch["prompt_lengths"], batch["lengths"])
    (block,) = [b for b in packed.blocks if b.keys is not None]
    assert block.queries is None
    assert block.real is None


def test_the_example_of_the_docstring():
    ids = torch.tensor([[5, 5, 1, 0], [5, 5, 2, 2], [6, 3, 0, 0]])  # p p a, p p b b, q c
    packed, places = packing.pack(ids, torch.tensor([2, 2, 1]), torch.tensor([1, 2, 1]))
    assert packed.ids.tolist() == [[6, 3, 5, 5, 1, 2, 2]]
    assert packed.positions.tolist() == [[0, 1, 0, 1, 2, 2, 3]]
    assert places.tolist() == [[2, 3, 4, 4], [2, 3, 5, 6], [0, 1, 1, 1]]
