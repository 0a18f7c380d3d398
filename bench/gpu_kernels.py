"""Checks of bench.gpu: attention of packed rows, the vocabulary head, how often the host waits."""

import warnings

import torch

import loss
import packing
from bench.gpu import SHAPES, Finding, Shape
from bench.oracle import bottom_right_attention
from bench.shapes import (
    batch_of,
    distance,
    gib_of,
    random_model,
    seconds_of,
    wait_for,
)

# relative errors that are allowed in bfloat16, compared with float32
VALUES = 0.01
GRADIENTS = 0.02
G = 8  # completions per prompt


def prepare_stand_in(setting) -> None:
    """On a CPU, replaces varlen_attn by the emulation."""
    if setting.device == "cpu":
        packing.varlen_attn = bottom_right_attention


def random_qkv(shape: Shape, queries: int, keys: int, setting) -> list:
    """(queries, heads, d), (keys, kv heads, d) twice, bfloat16, with gradients."""
    d = shape.hidden // shape.heads
    torch.manual_seed(1)

    def leaf(tokens: int, heads: int) -> torch.Tensor:
        values = torch.randn(tokens, heads, d, device=setting.device, dtype=torch.bfloat16)
        return values.requires_grad_()

    return [leaf(queries, shape.heads), leaf(keys, shape.kv_heads), leaf(keys, shape.kv_heads)]


def against_exact(attend, exact, leaves: list) -> list[float]:
    """Relative errors of the output and of each leaf's gradient."""
    out = attend(*leaves)  # (queries, heads, d)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, grad)
    raised = [x.detach().float().requires_grad_() for x in leaves]  # the same numbers in float32
    exact_out = exact(*raised)
    exact_grads = torch.autograd.grad(exact_out, raised, grad.float())
    errors = [distance(out, exact_out)]
    for found, wanted in zip(grads, exact_grads, strict=True):
        errors.append(distance(found, wanted))
    return errors


def show(errors: list[float]) -> str:
    return ", ".join(f"{error:.1e}" for error in errors)


def small(errors: list[float]) -> bool:
    """Whether the errors of an output and of its gradients are small."""
    return errors[0] < VALUES and max(errors[1:]) < GRADIENTS


def alignment(setting):
    """varlen_attn's causal mask if a segment has more keys than queries: the last query must see
    all keys. A mask aligned at the top left would be wrong everywhere after a shared prompt."""
    prepare_stand_in(setting)
    options = {"window_size": (-1, 0), "enable_gqa": True}
    # the cases of packed rows: as many keys as queries, far more, a single query, one key more
    queries = torch.tensor([5, 130, 64, 1, 300])
    keys = torch.tensor([5, 400, 64, 77, 301])

    def ends(counts):
        """Where segments begin, and where the last one ends: (segments + 1,) int32."""
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(setting.device)

    plan = (ends(queries), ends(keys), 300, 400)

    def attend(*qkv):
        return packing.varlen_attn(*qkv, *plan, **options)

    def exactly(*qkv):
        return bottom_right_attention(*qkv, *plan, **options)

    for name, shape in SHAPES.items():
        if setting.device == "cpu" and name != "tiny":
            continue  # a loop in Python would take a minute for nothing
        leaves = random_qkv(shape, int(queries.sum()), int(keys.sum()), setting)
        errors = against_exact(attend, exactly, leaves)
        what = f"heads of {shape.hidden // shape.heads}, more keys than queries"
        wanted = f"< {VALUES}, < {GRADIENTS} (out; dq, dk, dv)"
        yield Finding(what, small(errors), show(errors), wanted)


def packed_on_device(batch: dict, setting, varlen: bool) -> packing.Packed:
    """A batch packed for one varlen_attn per layer, or for blocks."""
    rows = packing.on_host(batch["ids"], batch["prompt_lengths"], batch["lengths"])
    packed, _ = packing.pack(*rows, varlen=varlen)
    return packing.with_masks(packing.to_device(packed, torch.device(setting.device)))


def attention(setting):
    """One layer's attention over 8 completions per prompt, both ways."""
    prepare_stand_in(setting)
    shape = SHAPES[setting.shape]
    for tokens in (2048, 8192, 16384) if setting.device == "cuda" else (1300,):
        batch = batch_of(shape.vocabulary, tokens, max(1, tokens // 4096), G, setting.device)
        exact = packed_on_device(batch, setting, varlen=True)
        M = exact.ids.shape[1]  # packed tokens: each prompt once
        leaves = random_qkv(shape, M, M, setting)

        def exactly(q, k, v, plan=exact.varlen):
            if plan.keys is not None:  # a shared prompt's keys, before each completion's own
                k = k[plan.keys]
                v = v[plan.keys]
            ends = (plan.cu_seq_q, plan.cu_seq_k)
            return bottom_right_attention(q, k, v, *ends, plan.max_q, plan.max_k)

        for varlen in (True, False):
            packed = packed_on_device(batch, setting, varlen)
            yield one_attention(packed, leaves, exactly, setting)


def one_attention(packed, leaves: list, exactly, setting) -> Finding:
    """Whether packing.attention is right, and what it costs."""
    module = torch.nn.Module()  # stands for the layer; nothing of it is read

    def attend(*qkv):
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)  # (1, heads, M, d): transformers' order
        return packing.attention(module, q, k, v, None, packed=packed)[0][0]  # (M, heads, d)

    errors = against_exact(attend, exactly, leaves)
    grad = torch.randn_like(leaves[0])

    def both():
        torch.autograd.grad(attend(*leaves), leaves, grad)

    plain = [x.detach() for x in leaves]  # nothing is kept for a backward
    forward = seconds_of(lambda: attend(*plain), setting.device) * 1e3
    whole = seconds_of(both, setting.device) * 1e3
    mib = gib_of(both, setting.device) * 1024
    way = "blocks" if packed.varlen is None else "varlen"
    good = small(errors)
    measured = f"{forward:.2f} + {whole - forward:.2f} ms, {mib:.0f} MiB, {show(errors)}"
    if setting.device == "cuda" and packed.varlen is not None:
        # right but slow if torch has fallen back to a kernel of its own
        names = kernels_of(both)
        good = good and any("flash" in name for name in names)
        measured += f", {'; '.join(names[:3])}"
    figures = {"forward_ms": forward, "backward_ms": whole - forward, "mib": mib, "errors": errors}
    what = f"{packed.ids.shape[1]:,} tokens, {way}"
    return Finding(what, good, measured, f"< {VALUES}, < {GRADIENTS}", figures)


def kernels_of(work) -> list[str]:
    """Names of the GPU kernels that take the most time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    return [event.key[:60] for event in events]


# --- the head


def head(setting):
    """Log-probs, entropies and gradients at the real vocabulary, with softmaxes kept and not."""
    if setting.device == "cpu":
        # the path that a GPU takes, uncompiled
        loss.on_gpu = lambda x: True
        loss.compiled = lambda function: function
    shape = SHAPES[setting.shape]
    V = shape.vocabulary
    n, chunk = (4096, 1024) if setting.device == "cuda" else (100, 32)  # tokens, tokens at a time
    torch.manual_seed(2)
    hidden = torch.randn(n, shape.hidden, device=setting.device, dtype=torch.bfloat16)
    # at this scale log-probs are neither uniform nor certain
    weight = torch.randn(V, shape.hidden, device=setting.device) * 0.05
    leaves = (hidden.requires_grad_(), weight.bfloat16().requires_grad_())
    targets = torch.randint(V, (n,), device=setting.device)
    ups = torch.randn(2, n, device=setting.device)  # gradients of log-probs and of entropies
    exact = exact_head(leaves, targets, ups, 0.7)
    room = loss.room_for_softmaxes
    for kept in (True, False):
        loss.room_for_softmaxes = room if kept else (lambda hidden: 0)

        def work():
            outs = loss.token_logps(*leaves, targets, 0.7, chunk)  # log-probs, entropies (n,)
            return (*outs, *torch.autograd.grad(outs, leaves, list(ups)))

        errors = [distance(a, b) for a, b in zip(work(), exact, strict=True)]
        milliseconds = seconds_of(work, setting.device) * 1e3
        gib = gib_of(work, setting.device)
        what = f"{n:,} tokens, V {V:,}, {'kept' if kept else 'computed again'}"
        # values are computed in float32, gradients are returned in bfloat16
        good = max(errors[:2]) < 1e-3 and max(errors[2:]) < GRADIENTS
        flops = 1e3 * 6 * n * shape.hidden * V / milliseconds  # 2 forward, 4 backward
        measured = f"{milliseconds:.1f} ms, {flops / 1e12:.0f} Tflop/s, {gib:.1f} GiB"
        figures = {"ms": milliseconds, "gib": gib, "errors": errors, "flops": flops}
        wanted = f"< 0.001, < {GRADIENTS} of float64"
        yield Finding(what, good, f"{measured}, {show(errors)}", wanted, figures)


def exact_head(leaves, targets, ups, temperature: float, chunk: int = 256) -> tuple:
    """The head in float64, few tokens at a time: logps, entropies, gradients of hidden, weight."""
    hidden, weight = (x.detach().double() for x in leaves)
    weight.requires_grad_()
    weight.grad = torch.zeros_like(weight)  # (V, width), added up over the chunks
    logps = []
    entropies = []
    grads = []
    for i in range(0, len(targets), chunk):
        here = slice(i, i + chunk)
        h = hidden[here].clone().requires_grad_()  # (chunk, width)
        log_p = (h @ weight.T / temperature).log_softmax(1)  # (chunk, V)
        logp = log_p.gather(1, targets[here, None])[:, 0]  # (chunk,)
        entropy = -(log_p.exp() * log_p).sum(1)  # (chunk,)
        up = ups[:, here].double()
        (logp @ up[0] + entropy @ up[1]).backward()
        logps.append(logp.detach())
        entropies.append(entropy.detach())
        grads.append(h.grad)
    return torch.cat(logps), torch.cat(entropies), torch.cat(grads), weight.grad


# --- waits


def waits_of(work, device) -> int:
    """How often the host waits for the GPU during `work`; 0 on a CPU."""
    if device != "cuda":
        work()
        return 0
    work()  # compiles and sets up what is needed at first use
    wait_for(device)
    torch.cuda.set_sync_debug_mode("warn")  # torch then warns at every wait
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # else a line's second warning is not shown
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


def waits(setting):
    """The host's waits in a forward and backward of one micro-batch with gradient checkpointing:
    they must be few, and no more with more layers or groups."""
    from policy import Policy

    prepare_stand_in(setting)
    counts = {}  # (layers, groups): waits
    for layers in (2, 6):
        shape = SHAPES[setting.shape]._replace(layers=layers)
        lm = random_model(shape, setting.device).train()
        lm.gradient_checkpointing_enable({"use_reentrant": False})
        policy = Policy(lm, 1.0, 512)
        for groups in (1, 4):
            batch = batch_of(shape.vocabulary, 1300 * groups, groups, G, setting.device)

            def work(policy=policy, batch=batch):
                logps, entropy = policy(batch["ids"], batch["prompt_lengths"], batch["lengths"])
                (logps.sum() + entropy.sum()).backward()

            counts[layers, groups] = waits_of(work, setting.device)
    good = len(set(counts.values())) == 1 and max(counts.values()) <= 8
    measured = []
    for (layers, groups), n in counts.items():
        measured.append(f"{n} ({layers} layers, {groups} groups)")
    yield Finding("forward and backward", good, ", ".join(measured), "the same, at most 8")
