"""One training step for tests of losses, and its loss in three ways.

make_step builds a step: rewards with ties, ragged rows, four kinds of log-probs, answers. ours() is
the loss of all its rows through the learner's own functions, accumulate() the same through its
micro-batches, literal() the slow loops of slow_loss.py. Each gives a SimpleNamespace: value, grad
(2, N, T) by log-probs and entropies, low, high, kl.
"""

import functools
import math
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from hypothesis import settings
from hypothesis import strategies as st
from slow_loss import slow_advantages, slow_step

import learner
import loss
from common import load_config, scheduled
from policy import completion_mask
from ranks import start_distributed

torch.set_num_threads(1)
INF = math.inf
LOW = 0.2  # clip range
HIGH = 0.28
CAP = 1.5  # of the sampler's ratio
CISPO = 1.3  # cap of cispo's ratio
L = 8  # max_completion_length
CONSTANTS = dict(
    epsilon=LOW,
    epsilon_high=HIGH,
    importance_sampling_cap=CAP,
    max_completion_length=L,
    cispo_epsilon_max=CISPO,
    maxent_tau=0.4,
    maxent_q_temperature=0.7,
    seed_grpo_alpha=0.7,
    token_entropy_coef=0.3,
)


def close(a, b, tolerance=1e-5, least=1e-3):
    """Equal up to `tolerance` relative to the largest entry of b or to `least`; NaN never equal."""
    a = torch.as_tensor(a).double()
    b = torch.as_tensor(b).double()
    assert b.isfinite().all()
    largest = b.abs().max().item() if b.numel() else 0
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(least, largest))


def randn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def value_and_grad(f, x, *args, **kwargs):
    leaf = x.clone().requires_grad_()
    value = f(leaf, *args, **kwargs)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@functools.cache
def resolve(flags: tuple) -> dict:
    return load_config([f"--{key}={value}" for key, value in (CONSTANTS | dict(flags)).items()])


def config(G: int, case: dict) -> dict:
    # G is set afterwards: a config with G = 1 is refused
    c = resolve(tuple(case.items()))
    return c | {"num_generations": G, "pkpo_k": min(G, scheduled(c["pkpo_k"], 0))}


# --- steps

examples = settings(derandomize=True, deadline=None, max_examples=40)
# some of them often, for ties and groups of equal rewards
REWARDS = st.sampled_from([0.0, 0.1, 1.0, 1.0, -0.5])


@st.composite
def groups(draw, least=1):
    """Rewards (P, G), G at least `least`."""
    P = draw(st.integers(1, 3))
    G = draw(st.integers(least, 5))
    group = st.lists(REWARDS, min_size=G, max_size=G)
    return torch.tensor(draw(st.lists(group, min_size=P, max_size=P)))


def decided(rewards):
    """No row lies at the mean of an unequal group, where rounding, of either sign, would decide
    whether it counts as clipped."""
    for advantages in slow_advantages(rewards.double().tolist(), "none"):
        if any(advantages) and min(abs(v) for v in advantages) <= 1e-6:
            return False
    return True


def make_step(rewards, lengths, seed):
    """rewards (P, G); log-probs (N, T) of policy, old policy, reference and sampler and the
    policy's entropies, 0 outside the completions; the answers: clusters (P, G), correct modes
    (P,)."""
    lengths = torch.tensor(lengths)
    N = len(lengths)
    T = int(lengths.max())
    P, G = rewards.shape
    mask = torch.arange(T) < lengths[:, None]
    logps = (randn(N, T, seed=seed, scale=0.5) - 1.5) * mask
    old = logps + randn(N, T, seed=seed + 1, scale=0.4) * mask
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        rewards=rewards,
        P=P,
        G=G,
        lengths=lengths,
        mask=mask,
        logps=logps,
        entropy=randn(N, T, seed=seed + 4).abs() * mask,
        old=old,
        ref=logps + randn(N, T, seed=seed + 2, scale=0.4) * mask,
        sampler=old + randn(N, T, seed=seed + 3, scale=0.4) * mask,
        clusters=torch.randint(3, (P, G), generator=generator),
        modes=torch.randint(4, (P,), generator=generator),
    )


def changed(step, **values):
    return SimpleNamespace(**{**vars(step), **values})


@st.composite
def steps(draw):
    rewards = draw(groups().filter(decided))
    lengths = draw(st.lists(st.integers(1, 5), min_size=rewards.numel(), max_size=rewards.numel()))
    return make_step(rewards, lengths, draw(st.integers(0, 10_000)))


EXAMPLE = changed(
    make_step(
        torch.tensor([[1.0, 0, 0, 1], [0, 0.1, 0.1, -1], [0.1, 0.1, 0.1, 0.1]]),
        [3, 1, 4, 2, 5, 5, 1, 2, 3, 3, 1, 5],
        7,
    ),
    modes=torch.tensor([3, 0, 2]),
)


def scores(logps, step, norm):
    return loss.sequence_scores(logps * step.mask, step.lengths, norm, L).view(step.P, step.G)


# --- their loss in one micro-batch


def group_of(step, c):
    """What learner.measure_groups would find, and it does in accumulate()."""
    shape = (step.P, step.G)

    def mean(x):
        return (x.sum(1) / step.lengths).view(shape)

    found = {}
    if c["beta"] > 0:
        ref_scores = loss.sequence_scores(
            step.ref, step.lengths, c["maxent_score_norm"], L, c["maxent_score_scale"]
        )
        found["ref_scores"] = ref_scores.view(shape)
    if c["unlikeliness_coef"] > 0:
        found["seq_logps"] = step.sampler.sum(1).view(shape)
    if c["policy_entropy_bonus_coef"] > 0:
        found["entropies"] = mean(step.entropy)
    if c["objective"] == "seed_grpo":
        found["clusters"] = step.clusters
        found["mean_logps"] = mean(step.sampler)
    if c["xdr_mode_adaptive_tau"]:
        found["correct_modes"] = step.modes
    lengths = step.lengths.view(shape).to(step.rewards.dtype)
    return learner.GroupMeasures(step.rewards, step.rewards, lengths, **found)


def targets_of(step, c):
    return learner.group_targets(group_of(step, c), c["maxent_tau"], c["beta"], c)


def step_loss(logps, entropy, step, c):
    """(loss, tokens clipped below, above, sum of k3) of all rows in one micro-batch, through the
    learner's functions."""
    targets = targets_of(step, c)
    norm = learner.step_counts(targets, step.lengths.view(step.P, step.G))
    part = {
        "lengths": step.lengths,
        "old_logps": step.old,
        "sampler_logps": step.sampler,
    }
    if targets.advantages is not None:
        part["advantages"] = targets.advantages.flatten()
    if c["beta"] > 0:
        part["ref_logps"] = step.ref
    # as the policy's forward leaves them
    logps = logps * step.mask
    entropy = entropy * step.mask
    total, *counts = learner.token_loss(logps, entropy, part, c["beta"], c, norm)
    if learner.couples_rows(c):
        row_scores = learner.loss_scores(logps, step.lengths, c).view(step.P, step.G)
        total = total + learner.group_loss(row_scores, targets, c, norm)
    return total, *counts


def run(f, step, case, dtype=torch.float32):
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (step.logps, step.entropy)]
    value, low, high, kl = f(*leaves, step, config(step.G, case))
    grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return SimpleNamespace(
        value=value.item(), grad=torch.stack(grads), low=int(low), high=int(high), kl=float(kl)
    )


ours = partial(run, step_loss)
literal = partial(run, slow_step, dtype=torch.float64)


def assert_same(a, b):
    """Equal to 1e-5 of the largest gradient entry, and of the loss or of what its terms add up to;
    the clip counts exactly."""
    close(a.grad, b.grad, least=1e-2)  # p - w is a difference of numbers near 1 / G
    assert abs(a.value - b.value) <= 1e-5 * max(abs(b.value), b.grad.abs().sum().item())
    assert (a.low, a.high) == (b.low, b.high)
    # in fp32, exp(-d) + d - 1 loses the digits of a small d
    if a.kl is not None and b.kl is not None:
        assert abs(a.kl - b.kl) <= 1e-5 * max(0.1, b.kl)


def same_to_the_bit(a, b):
    return a.value == b.value and torch.equal(a.grad, b.grad)


def compare(step, case):
    assert_same(ours(step, case), literal(step, case))


# --- their loss in micro-batches


class Table:
    """An engine that looks log-probs and entropies up by the row's number, which it finds as its
    first token id."""

    def __init__(self, logps, entropy):
        self.tables = [x.clone().requires_grad_() for x in (logps, entropy)]
        self.rows = set()  # what was looked up

    def __call__(self, ids, prompt_lengths, lengths, want_entropy=True):
        mask = completion_mask(lengths)
        self.rows.update(ids[:, 0].tolist())
        return [table[ids[:, 0], : mask.shape[1]] * mask for table in self.tables]

    def backward(self, loss, scale_wrt_gas):
        loss.backward()

    def gradient(self):
        return torch.stack([torch.zeros_like(x) if x.grad is None else x.grad for x in self.tables])


def batch_of(step, pad, first):
    """Rows whose prompt is one token, the row's number. first: before the first update."""
    N, T = step.mask.shape
    wide = torch.zeros(N, pad)
    batch = {
        "ids": torch.arange(N)[:, None].expand(N, 1 + T + pad),
        "prompt_lengths": torch.ones(N, dtype=torch.long),
        "lengths": step.lengths,
        "sampler_logps": torch.cat([step.sampler, wide], 1),
    }
    if not first:
        batch["old_logps"] = torch.cat([step.old, wide], 1)
    return batch


def measured_group(engine, batch, step, c):
    """learner.measure_groups, which asks no reward function for the answers: the step has them."""
    reference = Table(step.ref, step.entropy) if c["beta"] > 0 else None
    collected = SimpleNamespace(
        prompts=range(step.P), rollouts=[], right=None, rewards=step.rewards
    )
    modes = [(0, set(range(k))) for k in step.modes.tolist()]
    with (
        patch("scoring.answer_clusters", lambda *a: step.clusters),
        patch("scoring.correct_modes", lambda *a: modes),
    ):
        return learner.measure_groups(engine, reference, batch, collected, step.rewards, c)


def accumulate(step, case, plan=None, budget=10**6, pad=0, first=False):
    """The same as ours(), by the learner's whole path: measurements, micro-batches of a token
    budget or of a given plan, gradients."""
    if not torch.distributed.is_initialized():
        start_distributed()
    c = config(step.G, case) | {"max_tokens_per_micro_batch": budget}
    engine = Table(step.logps, step.entropy)
    batch = batch_of(step, pad, first)
    group = measured_group(engine, batch, step, c)
    targets = learner.group_targets(group, c["maxent_tau"], c["beta"], c)
    norm = learner.step_counts(targets, group.lengths)
    engine.rows.clear()

    def given_plan(batch, unit, c, rests=None):
        resting = [rows for rows in plan if rests is not None and rests[rows].all()]
        learning = [rows for rows in plan if rests is None or not rests[rows].all()]
        if not learner.couples_rows(c):
            return learner.MicroBatchPlan(resting, learning)
        # a group whose rows are mixed up is split too
        places = torch.cat(plan).argsort().view(-1, step.G)
        mixed_up = (places.diff(dim=1) != 1).any(1).repeat_interleave(step.G)
        return learner.MicroBatchPlan(
            resting, learning, split=learner.split_rows(plan, step.G) | mixed_up
        )

    with patch("learner.agree_on_plan", given_plan if plan else learner.agree_on_plan):
        metrics = learner.accumulate_gradients(engine, batch, targets, c["beta"], c, norm)
    tokens = int(step.lengths.sum())
    rows = sorted(engine.rows)
    whole = len(rows) == len(step.lengths)
    assert whole or not first  # later updates leave out rows that rest
    close(metrics["entropy"], step.entropy[rows].sum() / tokens)
    kl = metrics.get("kl", 0.0) * tokens
    assert ("kl" in metrics) == (c["beta"] > 0)
    if c["beta"] > 0:
        close(kl, loss.k3_kl(step.logps, step.ref)[rows].sum(), least=0.1)
    return SimpleNamespace(
        value=metrics["loss"],
        grad=engine.gradient(),
        low=round(metrics["clip_ratio/low"] * tokens, 3),
        high=round(metrics["clip_ratio/high"] * tokens, 3),
        kl=kl if whole else None,
    )
