"""Packed rows against padded ones: the same log-probs, entropies, pooled states and gradients,
whatever prompts neighbours share; what can't be packed is refused."""

import copy
import json
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import learner
import loss
import packing
import rollout
from bench import oracle
from bench.oracle import bottom_right_attention
from common import UserError
from policy import Policy

examples = settings(derandomize=True, deadline=None, max_examples=60)
few = settings(derandomize=True, deadline=None, max_examples=30)
BASE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
MODELS = {  # class: what it needs besides
    "Qwen2": {},
    "Qwen3": {},
    "Llama": {},
    "Llama, as many keys as queries": {"num_key_value_heads": 4},
    "Llama, one head of keys": {"num_key_value_heads": 1},
    "Mistral": {"sliding_window": None},
    "Gemma": {"tie_word_embeddings": True},
    "Phi3": {},
    "Olmo2": {},
    "Granite": {},
    "SmolLM3": {},
    "Qwen3Moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "Gemma2": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": 64,
    },
    "Gemma3Text": {"sliding_window": 64, "final_logit_softcapping": None},
}
TOLERANCE = 1e-5  # of values in nats, and of gradients relative to the largest


def model(name: str = "Qwen2", **changes):
    torch.manual_seed(1)
    config = getattr(transformers, f"{name.split(',')[0]}Config")(
        **{**BASE, **MODELS.get(name, {}), **changes}
    )
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in lm.parameters():  # enough to make every token's neighbours matter
            p.copy_(
                1 + 0.1 * torch.randn_like(p)
                if p.ndim == 1 and p.any()
                else p + 0.1 * torch.randn_like(p)
            )
    return lm


@pytest.fixture(scope="module")
def qwen():
    lm = model()
    return {pack: Policy(copy.deepcopy(lm), 0.7, 7, pack=pack) for pack in (True, False)}


def batch_of(rows: list[tuple[list, list]], junk: int = 0) -> dict:
    """From (prompt, completion) token ids; `junk` more columns, and another token wherever a row
    has ended."""
    batch = rollout.to_batch(
        [{"prompt_ids": p, "completion_ids": c, "logprobs": [0.0] * len(c)} for p, c in rows], "cpu"
    )
    ids = torch.nn.functional.pad(batch["ids"], (0, junk))
    ended = torch.arange(ids.shape[1]) >= (batch["prompt_lengths"] + batch["lengths"])[:, None]
    return batch | {
        "ids": torch.where(
            ended, torch.randint(50, ids.shape, generator=torch.Generator().manual_seed(junk)), ids
        )
        if junk
        else ids
    }


def run(policy, batch: dict, **more):
    """(values, {name: gradient}) of one random linear functional of both results."""
    policy.zero_grad()
    outs = policy(batch["ids"], batch["prompt_lengths"], batch["lengths"], **more)
    outs = [x for x in outs if x is not None]
    generator = torch.Generator().manual_seed(0)
    sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outs).backward()
    return [x.detach() for x in outs], {
        name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None
    }


def assert_same(a, b, tolerance=TOLERANCE):
    (values, grads), (wanted, wanted_grads) = a, b
    for x, y in zip(values, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    assert grads.keys() == wanted_grads.keys() and grads
    scale = max(g.abs().max().item() for g in wanted_grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad,
            wanted_grads[name],
            rtol=0,
            atol=tolerance * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def both(lm, batch: dict, tolerance=TOLERANCE, seeds=0, **more):
    """Packed and padded copies of lm say and learn the same."""
    torch.manual_seed(2)
    padded = Policy(copy.deepcopy(lm), 0.7, 7, seeds, pack=False)
    packed = Policy(copy.deepcopy(lm), 0.7, 7, seeds, pack=True)
    packed.load_state_dict(padded.state_dict())
    assert_same(run(packed, batch, **more), run(padded, batch, **more), tolerance)


def tokens(rng, count: int) -> list:
    return rng.choices(range(50), k=count)


def group(prompt: list, *lengths: int, seed: int = 0) -> list:
    rng = random.Random(f"{prompt} {seed}")
    return [(prompt, tokens(rng, n)) for n in lengths]


A = [5, 6, 7]
B = [8, 9, 10, 11, 12]
C = [13]
POWERS = [1, 2, 3, 4, 5, 8, 9, 16, 17]
MIXED = (
    group(A, 3, 1, 6, 2)
    + group(C, 2, 5)
    + group(B, 4)
    + group(A, 5, 2, seed=1)
    + group([1, 2, 3, 4], 1, 1, 1)
)
LAYOUTS = {
    "one group": group(A, 3, 1, 6, 2),
    "groups of prompts of different lengths": group(A, 3, 1) + group(B, 2, 5) + group(C, 4, 4),
    "prompts of one length, other ids": group(A, 3, 2)
    + group([5, 6, 8], 3, 2)
    + group([4, 6, 8], 1, 5),
    "the same prompt again later": group(A, 3, 1) + group(B, 2, 5) + group(A, 4, 2, seed=1),
    "neighbouring groups of one prompt": group(A, 3, 1) + group(A, 2, 5, seed=1),
    "single rows": group(A, 3) + group(B, 2) + group(C, 5) + group(A, 2, seed=1),
    "one row": group(A, 4),
    "one row, one token": group(C, 1),
    "one prompt of one token": group(C, 1, 2, 3),
    "completions of one token": group(A, 1, 1, 1),
    "a group between single rows": group(B, 3) + group(A, 2, 7) + group(C, 4),
    "prompts that begin another": group([5], 2, 3)
    + group([5, 6], 2, 3)
    + group([5, 6, 7], 2, 3)
    + group([5, 6], 1, 4, seed=1),
    "a prompt and its first completion tokens": [
        ([5, 6], [7, 8, 9]),
        ([5, 6], [7, 9]),
        ([5, 6, 7], [8, 9]),
        ([5, 6, 7], [8, 8]),
    ],
    "the same row over and over": [(A, [20, 21])] * 4,
    "completions of powers of two": group(A, *POWERS),
    "prompts of powers of two": [row for n in POWERS for row in group([5 + n] * n, 1, 3)],
    "rows of powers of two": [
        row
        for n in POWERS[1:]
        for row in group(list(range(n // 2 + 1))[: n - 1], n - min(n - 1, n // 2 + 1))
    ],
    "everything": MIXED,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(qwen, layout):
    batch = batch_of(LAYOUTS[layout])
    assert_same(run(qwen[True], batch), run(qwen[False], batch))


# rows of a few prompts that begin with one another, in runs of any length
shapes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 18)), min_size=1, max_size=9)
PROMPTS = [[5], [5, 6], [5, 6, 7, 8], [9, 6, 7, 8], [5, 6, 7, 8, *range(20, 33)], [0]]


def rows_of(shape) -> list:
    rng = random.Random(str(shape))
    return [(PROMPTS[which], rng.choices([0, 7, 8, 20], k=n)) for which, n in shape]


@few
@given(shapes)
def test_any_rows_have_the_log_probs_and_gradients_of_padded_ones(qwen, shape):
    batch = batch_of(rows_of(shape))
    assert_same(run(qwen[True], batch), run(qwen[False], batch))


@pytest.mark.parametrize("name", MODELS)
def test_architectures_that_use_the_interface_can_be_packed(name):
    both(model(name), batch_of(MIXED))


@pytest.mark.parametrize("pool", ["mean", "last"])
@pytest.mark.parametrize("seeds", [0, 3])
def test_pooled_states_are_those_of_padded_rows(pool, seeds):
    lm, batch = model(), batch_of(MIXED)
    both(lm, batch, pool=pool, seeds=seeds)
    pooled, _ = Policy(copy.deepcopy(lm), 0.7, 7)(
        batch["ids"], batch["prompt_lengths"], batch["lengths"], pool=pool
    )
    for found, (prompt, completion) in zip(pooled, MIXED, strict=True):
        own = lm.base_model(torch.tensor([prompt + completion])).last_hidden_state[0, len(prompt) :]
        torch.testing.assert_close(
            found, own.mean(0) if pool == "mean" else own[-1], rtol=TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_the_same(reentrant):
    lm = model().train()
    wanted = run(Policy(copy.deepcopy(lm), 0.7, 7, pack=False), batch_of(MIXED))
    lm.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        lm.enable_input_require_grads()
    policy = Policy(lm, 0.7, 7, pack=True)
    calls, forward = [], lm.base_model.layers[0].self_attn.forward
    lm.base_model.layers[0].self_attn.forward = lambda *a, **k: calls.append(1) or forward(*a, **k)
    assert_same(run(policy, batch_of(MIXED)), wanted)
    assert len(calls) == 2  # it really was recomputed


def test_bfloat16_differs_by_no_more_than_its_rounding_does():
    """Packed and padded are each within 0.1 nats, and 5% of the largest gradient, of float32."""
    lm, batch = model(), batch_of(MIXED)
    exact = run(Policy(copy.deepcopy(lm), 0.7, 7, pack=False), batch)
    for pack in (True, False):
        values, grads = run(Policy(copy.deepcopy(lm).bfloat16(), 0.7, 7, pack=pack), batch)
        assert values[0].dtype == torch.float32
        assert all(g.dtype == torch.bfloat16 for g in grads.values())
        torch.testing.assert_close(values[0], exact[0][0], rtol=0, atol=0.1)
        scale = max(g.abs().max().item() for g in exact[1].values())
        for name, grad in grads.items():
            torch.testing.assert_close(grad.float(), exact[1][name], rtol=0, atol=0.05 * scale)


def test_several_backwards_add_up(qwen):
    """As over the micro-batches of a step: no state is left from one to the next."""
    halves = [batch_of(MIXED[:5]), batch_of(MIXED[5:])]
    apart = [run(qwen[True], half)[1] for half in halves]
    qwen[True].zero_grad()
    # both forwards first
    outs = [qwen[True](h["ids"], h["prompt_lengths"], h["lengths"]) for h in halves]
    for pair in outs:
        generator = torch.Generator().manual_seed(0)
        sum((x * torch.randn(x.shape, generator=generator)).sum() for x in pair).backward()
    for name, p in qwen[True].named_parameters():
        torch.testing.assert_close(p.grad, apart[0][name] + apart[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_what_stands_in_the_padding_changes_nothing(qwen, pack):
    plain, junk = run(qwen[pack], batch_of(MIXED)), run(qwen[pack], batch_of(MIXED, junk=4))
    assert_same(junk, plain, 0.0 if pack else TOLERANCE)


def test_no_row_sees_another(qwen):
    """Not one bit of a row's log-probs changes when the completions of the others do."""
    other = [(p, c if i == 2 else [49 - t for t in c]) for i, (p, c) in enumerate(MIXED)]
    (a, _), (b, _) = run(qwen[True], batch_of(MIXED)), run(qwen[True], batch_of(other))
    assert torch.equal(a[0][2], b[0][2]) and (a[0][[0, 1, 3]] != b[0][[0, 1, 3]]).any(1).all()


# --- one varlen_attn for all segments, as on a GPU: an emulation stands for its kernel


@pytest.fixture
def varlen(monkeypatch):
    calls = []

    def emulated(*arguments, **more):
        calls.append(arguments)
        return bottom_right_attention(*arguments, **more)

    monkeypatch.setattr(packing, "varlen_attn", emulated)
    monkeypatch.setattr(packing, "uses_varlen", lambda lm: True)
    return calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_varlen_attention_a_layer_does_what_padded_rows_do(qwen, varlen, layout):
    batch = batch_of(LAYOUTS[layout])
    assert_same(run(qwen[True], batch), run(qwen[False], batch))
    assert len(varlen) == BASE["num_hidden_layers"]


@pytest.mark.parametrize("name", [name for name in MODELS if "Moe" not in name])
def test_architectures_can_be_packed_for_varlen_attention(varlen, name):
    both(model(name), batch_of(MIXED))
    assert varlen


def test_a_kernel_that_aligns_its_causal_order_otherwise_is_refused_at_the_start(monkeypatch):
    """Top left: the first query of a segment would see one key, not the prompt."""

    monkeypatch.setattr(packing, "uses_varlen", lambda lm: True)
    monkeypatch.setattr(packing, "varlen_attn", bottom_right_attention)
    Policy(model(), 0.7, 7)
    monkeypatch.setattr(oracle, "bottom_right", lambda Q, K: torch.ones(Q, K).bool().tril())
    with pytest.raises(UserError, match="can't have its sequences packed"):
        Policy(model(), 0.7, 7)


def test_keys_are_gathered_for_varlen_only_where_a_prompt_is_shared(qwen, varlen):
    for layout, gathered in (("one group", True), ("single rows", False), ("one row", False)):
        batch = batch_of(LAYOUTS[layout])
        plan = packing.pack(batch["ids"], batch["prompt_lengths"], batch["lengths"], varlen=True)
        assert (plan.varlen.keys is not None) == gathered


def test_varlen_attention_is_for_16_bits_on_a_gpu_that_has_it(monkeypatch):
    def lm(device: str, dtype):
        return SimpleNamespace(device=torch.device(device), dtype=dtype)

    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packing.uses_varlen(lm("cuda", torch.bfloat16))
    assert not packing.uses_varlen(lm("cuda", torch.float32))
    assert not packing.uses_varlen(lm("cpu", torch.bfloat16))
    capability = (7, 5)
    assert not packing.uses_varlen(lm("cuda", torch.bfloat16))


def test_cudnn_is_not_asked_for_attention():
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# --- nobody waits for the device


@pytest.mark.parametrize("kind", ["varlen", "blocks"])
def test_no_layer_and_no_block_waits_for_the_device(kind):
    """On "meta" tensors, which have no values: whatever must look at one raises. So there is no
    .item(), no nonzero, no mask of bools, no copy to the host, forward or backward."""
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen2Config(**BASE), dtype=torch.bfloat16
        ).train()
    lm.set_attn_implementation(packing.NAME)
    batch = batch_of(MIXED)
    arguments = batch["ids"], batch["prompt_lengths"], batch["lengths"]
    packed = packing.to_device(packing.pack(*arguments, varlen=kind == "varlen"), lm.device)
    assert len(packed.blocks) > 4 or packed.varlen
    for checkpointed in (False, True):
        if checkpointed:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        packing.states(lm, packed).sum().backward()
    assert all(p.grad is not None for p in lm.base_model.parameters())
    with pytest.raises(RuntimeError):  # the oracle: these would have been seen
        packed.ids.max().item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        packed.ids[packed.ids > 0]


class Waits(TorchDispatchMode):
    """Counts the operations that make the host wait for a GPU."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), more=None):
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in arguments[1]
        )
        to_host = name == "_to_copy" and "device" in (more or {})
        self.count += any(name.startswith(n) for n in self.NAMES) or masks or to_host
        return function(*arguments, **(more or {}))


def waits(layers: int, rows: list, kind: str, monkeypatch) -> int:
    """Of one forward and backward of a Policy, planning apart."""
    monkeypatch.setattr(packing, "uses_varlen", lambda lm: kind == "varlen")
    monkeypatch.setattr(packing, "varlen_attn", bottom_right_attention)
    policy = Policy(model(num_hidden_layers=layers).train(), 0.7, 7)
    monkeypatch.setattr(packing, "varlen_attn", dense_attention)
    plan, counter = policy.plan, Waits()

    def planned(*host):
        before = counter.count
        found = plan(*host)
        counter.count = before  # on the host, where nobody waits
        return found

    policy.plan = planned
    batch = batch_of(rows)
    with counter:
        logps, entropy = policy(batch["ids"], batch["prompt_lengths"], batch["lengths"])
        (logps.sum() + entropy.sum()).backward()
    return counter.count


def dense_attention(q, k, v, ends_q, ends_k, *more, **options):
    """Of the right shape, without a wait."""
    return q * k.mean() + v.mean()


@pytest.mark.parametrize("kind", ["varlen", "blocks"])
def test_waits_for_the_device_do_not_grow_with_layers_or_blocks(kind, monkeypatch):
    few_blocks = group(A, 3, 3)
    monkeypatch.setattr(loss, "on_gpu", lambda x: True)  # its vocabulary head, not compiled
    monkeypatch.setattr(loss, "compiled", lambda function: function)
    least = waits(1, few_blocks, kind, monkeypatch)
    assert least <= 8
    assert waits(5, few_blocks, kind, monkeypatch) == least
    assert waits(1, MIXED, kind, monkeypatch) == least  # also with more chunks of the head


def test_a_plan_goes_to_the_device_in_one_copy(qwen):
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), more=None):
            if str((more or {}).get("device")) == "meta":
                copies.append(function)
            return function(*arguments, **(more or {}))

    batch = batch_of(MIXED)
    plan = qwen[True].plan(batch["ids"], batch["prompt_lengths"], batch["lengths"])
    with Copies():
        moved = packing.to_device(plan, torch.device("meta"))
    assert len(copies) == 1
    found, wanted = [], []
    packing.map_tensors(found.append, moved)
    packing.map_tensors(wanted.append, plan)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in wanted]
    assert type(moved) is type(plan) and type(moved.packed) is packing.Packed
    assert moved.packed.blocks[0].tokens == plan.packed.blocks[0].tokens


# --- the layout itself


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
    assert (
        packed.ids.shape
        == packed.positions.shape
        == (1, sum(len(rows[r[0]][0]) for r in runs) + sum(len(c) for _, c in rows))
    )
    assert learner.unit_tokens(batch, len(rows), pack=True) == ([packed.ids.shape[1]], [0])
    assert packing.continues(*arguments[:2]).tolist() == [
        i not in {r[0] for r in runs} for i in range(len(rows))
    ]
    ids = packed.ids[0].tolist()
    positions = packed.positions[0].tolist()
    last = packed.last.tolist()
    first = packed.first.tolist()
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
        assert b.tokens.start == place and size <= padded < 2 * size and padded % b.count == 0
        if b.queries is not None:
            assert b.queries.flatten()[b.real].tolist() == list(range(size))
            assert len(set(b.real.tolist())) == size
        place += size
    assert place == packed.ids.shape[1]
    # a prompt of one row stays with it
    assert sum(b.count for b in packed.blocks) == sum(
        len(run) + (len(run) > 1) for run in slow_runs(rows)
    )
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
        last, first = int(packed.last[i]), int(packed.first[i])
        places = [*range(last - len(prompt) + 1, last + 1), *range(first, first + len(completion))]
        for n, place in enumerate(places):
            assert wanted.setdefault(place, places[: n + 1]) == places[: n + 1]
    for b in packed.blocks:
        start, Q = b.tokens.start, (b.tokens.stop - b.tokens.start) // b.count
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
    ends_q, ends_k = plan.ends_q.tolist(), plan.ends_k.tolist()
    places = {}
    for i, (start, end) in enumerate(pairwise(ends_q)):
        own = keys[ends_k[i] : ends_k[i + 1]].tolist()
        assert 0 < end - start <= plan.longest_q and len(own) <= plan.longest_k
        for query in range(start, end):
            places[query] = own[: len(own) - (end - 1 - query)]
    assert ends_q[0] == ends_k[0] == 0 and ends_q[-1] == count and ends_k[-1] == len(keys)
    return places


def test_equal_lengths_need_no_padding_and_no_indices():
    batch = batch_of(group(A, 4, 4) + group(B, 4, 4))
    blocks = packing.pack(batch["ids"], batch["prompt_lengths"], batch["lengths"]).blocks
    assert [(b.queries is None, b.real is None) for b in blocks if b.keys is not None] == [
        (True, True)
    ]


# --- what is refused


def states(lm, rows=MIXED, pack=True):
    batch = batch_of(rows)
    return Policy(lm, 1.0, 64, pack=pack)(batch["ids"], batch["prompt_lengths"], batch["lengths"])


LONGEST = max(len(p) + len(c) for p, c in MIXED)


@pytest.mark.parametrize(
    "name, changes",
    [("Mistral", {}), ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0})],
)
def test_a_sliding_window_is_refused_where_it_would_cut_and_only_there(name, changes):
    both(model(name, sliding_window=LONGEST, **changes), batch_of(MIXED))
    narrow = model(name, sliding_window=LONGEST - 1, **changes)
    with pytest.raises(UserError, match=r"sliding window.*pack_sequences=False"):
        states(copy.deepcopy(narrow))
    states(narrow, pack=False)


GPT_OSS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 64,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    "name, changes, words",
    [("Gemma2", {"attn_logit_softcapping": 30.0}, "softcap"), ("GptOss", GPT_OSS, "s_aux")],
)
def test_attention_that_wants_more_than_causal_order_is_refused(name, changes, words):
    with pytest.raises(UserError, match=rf"uses {words}.*pack_sequences=False"):
        states(model(name, **changes))
    states(model(name, **changes), pack=False)


def test_attention_dropout_is_no_matter_outside_training():
    both(model(attention_dropout=0.5), batch_of(MIXED))


def test_a_mask_and_dropout_are_refused():
    q = torch.zeros(1, 4, 3, 8)
    packed = packing.pack(torch.tensor([[1, 2, 3]]), torch.tensor([1]), torch.tensor([2]))
    module = torch.nn.Linear(1, 1)
    with pytest.raises(UserError, match="uses a mask"):
        packing.attention(module, q, q, q, torch.ones(1, 1, 3, 3), packed=packed)
    with pytest.raises(UserError, match="uses dropout"):
        packing.attention(module, q, q, q, None, packed=packed, dropout=0.1)


# what stands between the layers' tokens: states that run on, position biases of their own,
# attention that is not told of the packing
OTHERS = {
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "StableLm": {},
    "FalconH1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_n_groups": 1,
        "mamba_d_ssm": 64,
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_is_more_than_causal_attention_is_refused_before_it_trains(name):
    lm = model(name, **OTHERS[name])
    usual = lm.config._attn_implementation
    with pytest.raises(UserError, match=r"can't have its sequences packed.*pack_sequences=False"):
        Policy(lm, 1.0, 64)
    assert lm.config._attn_implementation == usual
    states(lm, pack=False)


@pytest.mark.parametrize("name, window", [("sliding_window", 63), ("attention_chunk_size", 63)])
def test_a_window_that_is_narrower_than_a_row_may_be_is_refused_from_the_config_alone(name, window):
    """Some models have it in their masks only."""
    config = SimpleNamespace(model_type="m", **{name: window})
    packing.check_window(config, window)
    with pytest.raises(
        UserError, match=rf"{name}=63 and rows may have 64 tokens.*pack_sequences=False"
    ):
        packing.check_window(config, window + 1)
    packing.check_window(SimpleNamespace(model_type="m", **{name: None}), 10**6)


def test_a_packed_model_can_not_be_called_by_itself_and_can_again_once_it_is_set_back():
    lm = model()
    ids = torch.tensor([[5, 6, 7]])
    wanted = lm(ids).logits
    policy = Policy(lm, 1.0, 64)
    for call in (policy.lm, policy.lm.base_model):
        with pytest.raises(ValueError, match=r"policy\.Policy"):
            call(ids)
    lm.set_attn_implementation("sdpa")
    assert torch.equal(lm(ids).logits, wanted)


def test_a_saved_model_does_not_know_that_it_was_packed(tmp_path):
    lm = model()
    ids = torch.tensor([[5, 6, 7]])
    wanted = lm(ids).logits
    Policy(lm, 1.0, 64).lm.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"
    assert torch.equal(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, wanted
    )


def test_a_policy_that_is_not_packed_leaves_the_model_alone():
    lm = model()
    Policy(lm, 1.0, 64, pack=False)
    assert lm.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(
    "name, changes",
    [
        ("Granite", {"logits_scaling": 4.0}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Gemma2", {"final_logit_softcapping": 30.0}),
        ("Phi", {}),
    ],
)
def test_a_model_whose_logits_are_more_than_its_head_says_is_refused(name, changes, pack):
    lm = model(name, **changes)
    with pytest.raises(UserError, match="has a bias, a cap or a scale on the logits"):
        Policy(lm, 1.0, 64, pack=pack)
