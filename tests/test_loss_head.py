"""Log-probs of tokens from a vocabulary head in chunks, against the full softmax in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from loss_steps import close, randn, value_and_grad
from torch._dynamo.testing import CompileCounter

import loss
from bench import arms as bench_arms


def full_logps(hidden, weight, targets, temperature):
    """(logps, entropy) with all logits at once."""
    log_p = (hidden @ weight.T / temperature).log_softmax(1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("use", ["logps", "entropy", "both"])
def test_chunked_logps_equal_the_full_softmax_in_value_and_gradient(chunk, temperature, use):
    """Against float64 autograd: the function itself computes in float32, so gradcheck can't run on
    it."""
    n = 23
    H = 5
    V = 37
    hidden = randn(n, H)
    weight = randn(V, H, seed=1)
    targets = torch.arange(n) * 5 % V
    up = {"logps": (1, 0), "entropy": (0, 1), "both": (1, 1)}[use]
    up = [randn(n, seed=2 + k, scale=factor) for k, factor in enumerate(up)]

    def run(f, hidden, weight):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logps, entropy = f(*leaves, targets, temperature)
        total = 0.0
        if use != "entropy":
            total = total + (up[0].to(logps) * logps).sum()
        if use != "logps":
            total = total + (up[1].to(entropy) * entropy).sum()
        return logps, entropy, *torch.autograd.grad(total, leaves)

    ours = run(lambda *a: loss.token_logps(*a, chunk), hidden, weight)
    full = run(full_logps, hidden.double(), weight.double())
    for a, b in zip(ours, full):
        assert a.dtype == torch.float32
        close(a, b)


def test_frozen_head_and_no_entropy_give_the_same_log_probs_and_hidden_gradient():
    hidden = randn(10, 4)
    weight = randn(20, 4, seed=1)
    targets = torch.arange(10)
    value, grad = value_and_grad(lambda h: full_logps(h, weight, targets, 1.0)[0].sum(), hidden)
    logps, entropy = loss.token_logps(hidden, weight, targets, 1.0, 3, want_entropy=False)
    assert entropy is None
    close(logps.sum(), value)

    def chunked(h):
        return loss.token_logps(h, weight, targets, 1.0, 3, want_entropy=False)[0].sum()

    close(value_and_grad(chunked, hidden)[1], grad)


def test_no_tokens_give_empty_log_probs_and_zero_gradients():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), randn(6, 4).requires_grad_()
    logps, entropy = loss.token_logps(hidden, weight, torch.zeros(0, dtype=torch.long), 1.0, 3)
    (logps.sum() + entropy.sum()).backward()
    assert logps.shape == entropy.shape == (0,)
    assert hidden.grad.shape == (0, 4)
    assert (weight.grad == 0).all()


def test_huge_logits_stay_finite():
    hidden = (randn(5, 3) * 100).requires_grad_()
    weight = (randn(7, 3, seed=1) * 100).requires_grad_()
    logps, entropy = loss.token_logps(hidden, weight, torch.arange(5), 1.0, 2)
    for x in (logps, entropy, *torch.autograd.grad(logps.sum() + entropy.sum(), (hidden, weight))):
        assert x.isfinite().all()
    close(logps, full_logps(hidden.double(), weight.double(), torch.arange(5), 1.0)[0])


def test_bfloat16_results_are_float32_and_gradients_bfloat16():
    hidden = randn(30, 16)
    weight = randn(50, 16, seed=1, scale=0.3)
    targets = torch.arange(30)
    exact = value_and_grad(lambda h: loss.token_logps(h, weight, targets, 1.0, 8)[0].sum(), hidden)
    h = hidden.bfloat16().requires_grad_()
    logps, _ = loss.token_logps(h, weight.bfloat16(), targets, 1.0, 8)
    logps.sum().backward()
    assert logps.dtype == torch.float32
    assert h.grad.dtype == torch.bfloat16
    close(logps.sum(), exact[0], 0.01)
    close(h.grad, exact[1], 0.02)  # bfloat16 has 8 bits


# --- softmaxes kept for the backward, and chunks that nobody asks for

# KEPT_BYTES of 29 tokens in chunks of 8, V = 37
KEEPING = {"none": 0, "two chunks": 2 * 8 * 37 * 4, "all": 2**28}
# bfloat16 has 8 bits: a float32 rounding can move its last one
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 0.02}


def head_case(dtype, n=29, H=16, V=37):
    hidden = randn(n, H).to(dtype).requires_grad_()
    weight = randn(V, H, seed=1, scale=0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.arange(n) * 5 % V


def head_grads(leaves, targets, up, temperature=1.0):
    """Gradients of hidden and weight under up-stream gradients of (logps, entropy or None)."""
    grad_logps, grad_entropy = up
    want_entropy = grad_entropy is not None
    logps, entropy = loss.token_logps(*leaves, targets, temperature, 8, want_entropy)
    if not want_entropy:
        return torch.autograd.grad(logps, leaves, grad_logps)
    return torch.autograd.grad((logps, entropy), leaves, up)


def exact_head(leaves, targets, up, temperature):
    """(logps, entropy) of the full softmax in float64, and the gradients that head_grads is to
    give."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    logps, entropy = full_logps(*exact, targets, temperature)
    total = (logps * up[0]).sum()
    if up[1] is not None:
        total = total + (entropy * up[1]).sum()
    return (logps, entropy), torch.autograd.grad(total, exact)


def upstream(entropy):
    """Gradients of (logps, entropy) of 29 tokens; what is "some" is not 0."""
    of_entropy = {"none": None, "zero": torch.zeros(29)}.get(entropy, randn(29, seed=3))
    return randn(29, seed=2), of_entropy


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", ["none", "zero", "some"])
def test_kept_and_recomputed_softmaxes_give_the_same_values_and_gradients(
    monkeypatch, dtype, temperature, entropy
):
    *leaves, targets = head_case(dtype)
    up = upstream(entropy)
    grads = {}
    values = {}
    computed = {}
    calls = []
    real = loss.head_logits

    def counted(*args):
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(loss, "head_logits", counted)
    for name, size in KEEPING.items():
        calls.clear()
        monkeypatch.setattr(loss, "KEPT_BYTES", size)
        grads[name] = head_grads(leaves, targets, up, temperature)
        values[name] = loss.token_logps(*leaves, targets, temperature, 8)
        computed[name] = len(calls)
    # of gradient's forward and backward, and of the values
    assert computed == {"none": 4 + 4 + 4, "two chunks": 4 + 2 + 4, "all": 4 + 4}
    for name in KEEPING:
        assert all(map(torch.equal, values[name], values["none"]))
        for a, b in zip(grads[name], grads["none"]):
            close(a, b, ROUNDING[dtype])
    _, exact = exact_head(leaves, targets, up, temperature)
    for a, b in zip(grads["two chunks"], exact):
        close(a, b, 1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("size", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("entropy", [False, True])
def test_a_second_backward_through_the_same_graph_gives_the_same_gradients(
    monkeypatch, size, entropy
):
    monkeypatch.setattr(loss, "KEPT_BYTES", size)
    *leaves, targets = head_case(torch.float32)
    logps, H = loss.token_logps(*leaves, targets, 0.6, 8)
    total = (randn(29, seed=2) * logps).sum() + (randn(29, seed=3) * H).sum() * entropy
    first, second, third = (torch.autograd.grad(total, leaves, retain_graph=True) for _ in range(3))
    for a, b, c in zip(first, second, third):
        close(b, a, 1e-6)
        assert torch.equal(b, c)


@pytest.mark.parametrize("size", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("entropy", ["none", "zero", "some", "only"])
def test_rows_and_chunks_without_gradient_contribute_exactly_nothing(monkeypatch, size, entropy):
    """Chunks 0 and 2 of 4 ask for nothing, and in the others every third row does not either; where
    chunks 0 and 2 are NaN nobody sees it."""
    monkeypatch.setattr(loss, "KEPT_BYTES", size)
    hidden, weight, targets = head_case(torch.float32)
    silent = (torch.arange(29) // 8 % 2 == 0) | (torch.arange(29) % 3 == 0)
    of_logps, of_entropy = upstream(entropy)
    of_logps = of_logps.masked_fill(silent | torch.tensor(entropy == "only"), 0)
    if of_entropy is not None:
        of_entropy = of_entropy.masked_fill(silent, 0)
    up = (of_logps, of_entropy)
    grad_hidden, grad_weight = head_grads((hidden, weight), targets, up, 0.6)
    assert (grad_hidden[silent] == 0).all()
    assert (grad_hidden[~silent] != 0).any(1).all()
    odd = torch.arange(29) // 8 % 2 == 1  # chunks 1 and 3, alone
    odd_up = [g if g is None else g[odd] for g in up]
    alone = head_grads((hidden[odd], weight), targets[odd], odd_up, 0.6)
    close(grad_hidden[odd], alone[0])
    close(grad_weight, alone[1])
    broken = hidden.detach().masked_fill(~odd[:, None], math.nan).requires_grad_()
    for a, b in zip(head_grads((broken, weight), targets, up, 0.6), (grad_hidden, grad_weight)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("which", [0, 1])
def test_a_nan_gradient_of_one_token_is_not_taken_for_none(which):
    *leaves, targets = head_case(torch.float32)
    up = torch.zeros(29), torch.zeros(29)
    up[which][11] = math.nan
    grad_hidden, grad_weight = head_grads(leaves, targets, up)
    assert grad_hidden[11].isnan().all() and grad_weight.isnan().all()


def test_nothing_is_kept_where_no_gradient_is_asked_for(monkeypatch):
    contexts = []
    real = loss.ChunkedLogps.forward

    def recorded(ctx, *args):
        contexts.append(ctx)
        return real(ctx, *args)

    monkeypatch.setattr(loss.ChunkedLogps, "forward", staticmethod(recorded))
    hidden, weight, targets = head_case(torch.float32)
    with torch.no_grad():
        loss.token_logps(hidden, weight, targets, 1.0, 8)
    loss.token_logps(hidden.detach(), weight.detach(), targets, 1.0, 8)
    loss.token_logps(hidden, weight.detach(), targets, 1.0, 8)
    assert [len(ctx.kept) for ctx in contexts] == [0, 0, 4]


# --- the head on a GPU: its functions, not yet compiled, on a CPU


@pytest.fixture
def as_on_gpu(monkeypatch):
    monkeypatch.setattr(loss, "on_gpu", lambda x: True)
    monkeypatch.setattr(loss, "compiled", lambda function: function)


@pytest.mark.parametrize("size", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", ["none", "zero", "some"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_head_of_a_gpu_has_the_values_and_gradients_of_the_full_softmax(
    as_on_gpu, monkeypatch, size, temperature, entropy, dtype
):
    monkeypatch.setattr(loss, "KEPT_BYTES", size)
    *leaves, targets = head_case(dtype)
    up = upstream(entropy)
    values, grads = exact_head(leaves, targets, up, temperature)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for a, b in zip(head_grads(leaves, targets, up, temperature), grads):
        assert a.dtype == dtype
        close(a, b, tolerance)
    for a, b in zip(loss.token_logps(*leaves, targets, temperature, 8), values):
        close(a, b, tolerance)


@pytest.mark.parametrize("size", [0, 2**28], ids=["recomputed", "kept"])
def test_a_confident_token_keeps_its_small_gradient_in_16_bits(as_on_gpu, monkeypatch, size):
    """p of the target is 0.9997, which bfloat16 takes for 1: what is left is 1 - p."""
    monkeypatch.setattr(loss, "KEPT_BYTES", size)
    weight = torch.zeros(5, 4)
    weight[0, 0] = 1.0
    hidden = torch.tensor([[9.5, 0.0, 0.0, 0.0]])
    leaves = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    targets = torch.tensor([0])
    found = torch.autograd.grad(loss.token_logps(*leaves, targets, 1.0, 8)[0].sum(), leaves)
    wanted = torch.autograd.grad(full_logps(*exact, targets, 1.0)[0].sum(), exact)
    for a, b in zip(found, wanted):
        assert (a - b).norm() < 0.01 * b.norm()


def test_the_head_of_a_gpu_is_compiled_a_few_times_for_all_chunks_and_temperatures(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(loss, "on_gpu", lambda x: True)
    made = {}

    def compiled(function):
        if function not in made:
            made[function] = torch.compile(function, backend=counter, dynamic=True, fullgraph=True)
        return made[function]

    monkeypatch.setattr(loss, "compiled", compiled)
    torch._dynamo.reset()
    for size in (0, 2**28):
        monkeypatch.setattr(loss, "KEPT_BYTES", size)
        for n in (29, 30, 17, 23):
            for temperature in (1.0, 0.7, 0.9, 1.1):
                *leaves, targets = head_case(torch.bfloat16, n=n)
                logps, entropy = loss.token_logps(*leaves, targets, temperature, 8)
                (logps.sum() + entropy.sum()).backward()
    assert counter.frame_count <= 2 * 2 * 2  # two functions, kept or not; chunks of 1 apart
    assert counter.frame_count >= 4


def test_kept_probabilities_take_a_quarter_of_what_is_free_on_a_gpu(monkeypatch):
    hidden = SimpleNamespace(is_cuda=True, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**30)
    assert loss.room_for_softmaxes(hidden) == 2 * 2**30
    assert loss.room_for_softmaxes(torch.zeros(1)) == loss.KEPT_BYTES


def learn(tokens: int, vocabulary: int = 16384) -> None:
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    logps, entropy = loss.token_logps(hidden, weight, torch.arange(tokens), 1.0, chunk=32)
    (logps.sum() + entropy.sum()).backward()


@pytest.mark.parametrize("kept", [0, 40])
def test_memory_does_not_grow_with_tokens_times_vocabulary(kept, monkeypatch):
    """2,048 tokens hold at most 16 MiB and the softmaxes kept at once; keeping their logits even
    once would take 128 MiB."""
    monkeypatch.setattr(loss, "KEPT_BYTES", kept * 2**20)
    _, gib = bench_arms.weighed(lambda: learn(2048))
    assert kept / 2 < 1024 * gib < 16 + kept
