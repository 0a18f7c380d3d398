"""Packed rows against padded ones: the same log-probs, entropies, pooled states and gradients,
whatever prompts neighbours share; and no layer makes the host wait for a GPU."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given
from packed_rows import (
    BASE,
    LAYOUTS,
    MIXED,
    MODELS,
    TOLERANCE,
    A,
    assert_same,
    batch_of,
    both,
    few,
    group,
    model,
    rows_of,
    run,
    shapes,
)
from torch.utils._python_dispatch import TorchDispatchMode

import loss
import packing
from bench import oracle
from bench.oracle import bottom_right_attention
from common import UserError
from policy import Policy


@pytest.fixture(scope="module")
def qwen():
    lm = model()
    return {pack: Policy(copy.deepcopy(lm), 0.7, 7, pack=pack) for pack in (True, False)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(qwen, layout):
    batch = batch_of(LAYOUTS[layout])
    assert_same(run(qwen[True], batch), run(qwen[False], batch))


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
    lm = model()
    batch = batch_of(MIXED)
    both(lm, batch, pool=pool, seeds=seeds)
    policy = Policy(copy.deepcopy(lm), 0.7, 7)
    pooled, _ = policy(batch["ids"], batch["prompt_lengths"], batch["lengths"], pool=pool)
    for state, (prompt, completion) in zip(pooled, MIXED, strict=True):
        hidden = lm.base_model(torch.tensor([prompt + completion])).last_hidden_state
        own = hidden[0, len(prompt) :]
        wanted = own.mean(0) if pool == "mean" else own[-1]
        torch.testing.assert_close(state, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_the_same(reentrant):
    lm = model().train()
    wanted = run(Policy(copy.deepcopy(lm), 0.7, 7, pack=False), batch_of(MIXED))
    lm.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        lm.enable_input_require_grads()
    policy = Policy(lm, 0.7, 7, pack=True)
    calls = []
    forward = lm.base_model.layers[0].self_attn.forward

    def counted(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    lm.base_model.layers[0].self_attn.forward = counted
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
    plain = run(qwen[pack], batch_of(MIXED))
    junk = run(qwen[pack], batch_of(MIXED, junk=4))
    assert_same(junk, plain, 0.0 if pack else TOLERANCE)


def test_no_row_sees_another(qwen):
    """Not one bit of a row's log-probs changes when the completions of the others do."""
    other = [(p, c if i == 2 else [49 - t for t in c]) for i, (p, c) in enumerate(MIXED)]
    (logps, _), _ = run(qwen[True], batch_of(MIXED))
    (other_logps, _), _ = run(qwen[True], batch_of(other))
    assert torch.equal(logps[2], other_logps[2])
    assert (logps[[0, 1, 3]] != other_logps[[0, 1, 3]]).any(1).all()


# --- one varlen_attn for all segments, as on a GPU: an emulation stands for its kernel


@pytest.fixture
def varlen(monkeypatch):
    calls = []

    def emulated(*arguments, **more):
        # by default the kernel is not causal, and refuses fewer heads of keys
        assert (more["window_size"], more["enable_gqa"]) == ((-1, 0), True)
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
        arguments = batch["ids"], batch["prompt_lengths"], batch["lengths"]
        plan, _ = packing.pack(*arguments, varlen=True)
        assert (plan.varlen.keys is not None) == gathered


def test_varlen_attention_is_for_16_bits_on_a_gpu_that_has_it(monkeypatch):
    def lm(device: str, dtype, **attention):
        config = SimpleNamespace(hidden_size=64, num_attention_heads=4, **attention)
        return SimpleNamespace(device=torch.device(device), dtype=dtype, config=config)

    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packing.uses_varlen(lm("cuda", torch.bfloat16))
    assert packing.uses_varlen(lm("cuda", torch.float16))
    assert not packing.uses_varlen(lm("cuda", torch.float32))
    assert not packing.uses_varlen(lm("cpu", torch.bfloat16))
    # OpenLLaMA-3B's heads, wider ones, and those of DeepSeek-V3, which FlashAttention refuses
    for odd in ({"head_dim": 100}, {"head_dim": 264}, {"v_head_dim": 16}):
        assert not packing.uses_varlen(lm("cuda", torch.bfloat16, **odd))
    assert packing.uses_varlen(lm("cuda", torch.bfloat16, head_dim=256))
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
    packed, _ = packing.pack(*arguments, varlen=kind == "varlen")
    packed = packing.to_device(packed, lm.device)
    assert len(packed.blocks) > 4 or packed.varlen
    for checkpointed in (False, True):
        if checkpointed:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        packing.hidden_states(lm, packed).sum().backward()
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
    plan = policy.plan
    counter = Waits()

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


@pytest.mark.parametrize("varlen", [False, True])
def test_a_plan_goes_to_the_device_in_one_copy(qwen, varlen, monkeypatch):
    monkeypatch.setattr(packing, "uses_varlen", lambda lm: varlen)
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
    assert type(moved) is type(plan)
    assert type(moved.packed) is packing.Packed
    assert [b.tokens for b in moved.packed.blocks] == [b.tokens for b in plan.packed.blocks]
    assert (moved.packed.varlen is not None) == varlen


class Away(torch.Tensor):
    """On the CPU, but says that it is on a GPU."""

    device = torch.device("cuda")


def test_rows_come_to_the_host_with_their_shapes_and_in_their_order():
    rows = [torch.arange(6).view(2, 3), torch.tensor([7, 8]), torch.tensor([[9]])]
    found = packing.on_host(*(x.as_subclass(Away) for x in rows))
    assert [x.tolist() for x in found] == [x.tolist() for x in rows]
