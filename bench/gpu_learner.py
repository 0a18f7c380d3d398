"""Checks of bench.gpu: the learner with DeepSpeed in bfloat16."""

import gc
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

import checkpoint
import learner
import loss
import packing
import train
from bench.arms import checked_config
from bench.gpu import SHAPES, Finding
from bench.shapes import (
    GIB,
    batch_of,
    distance,
    matrix_peak,
    model_folder,
    products,
    seconds_of,
    wait_for,
)
from policy import count_parameters, named_weights
from preflight import memory_estimate, on_device
from ranks import start_distributed

G = 8
TOKENS = 8192  # per micro-batch
# share of the matrix peak that a step must reach. An H200 reached .23 at 0.5B and .32 at 1.5B: it
# waits for the host, which launches 9,500 kernels (LOG.md, 2026-11-26)
SHARE = 0.2
ESTIMATE = 1.3  # peak / dry_run's estimate may be this much: small things are left out


class Case:
    """A policy of random weights in an engine, a batch for it, and what can be done with them."""

    # layers: fewer than the shape has, if only its widths matter
    def __init__(
        self, setting, layers: int | None = None, tokens: int = TOKENS, groups: int = 0, **changes
    ):
        self.device = start_distributed().device
        self.gpu = self.device.type == "cuda"
        self.shape = SHAPES[setting.shape]
        if layers:
            self.shape = self.shape._replace(layers=layers)
        self.tokens = tokens if self.gpu else 1300
        self.groups = groups or max(1, self.tokens // 4096)  # P: one micro-batch holds them all
        values = {
            "model": model_folder(self.shape, self.device),
            "objective": "dr_grpo",
            "importance_sampling": "none",
            "beta": 0.0,
            "dtype": "bfloat16",
            "learning_rate": 1e-4,  # large enough for a step to show in bfloat16
            "prompts_per_step": self.groups,
            "num_generations": G,
            "max_tokens_per_micro_batch": self.tokens,
        } | changes
        self.c = checked_config(values)
        self.held = torch.cuda.memory_allocated() if self.gpu else 0  # bytes, held by others
        self.engine = train.load_policy(self.c, self.device)
        self.reference = train.load_reference(self.c, self.engine, self.device)
        vocabulary = self.shape.vocabulary
        self.batch = batch_of(vocabulary, self.tokens, self.groups, G, self.device)
        # (P, G), all different: every row has a gradient
        self.rewards = torch.rand(self.groups, G, generator=torch.Generator().manual_seed(3))

    def learn(self, spoiled: bool = False) -> dict:
        """Computes the gradients of one step; NaN if `spoiled`."""
        self.batch.pop("old_logps", None)  # each time is the first update of its batch
        # these are what measure_groups reads of an experience
        collected = SimpleNamespace(
            prompts=[{}] * self.groups, rollouts=[], right=[], rewards=self.rewards
        )
        models = self.engine, self.reference
        measured = learner.measure_groups(*models, self.batch, collected, self.rewards, self.c)
        targets = learner.group_targets(measured, 0.0, self.c["beta"], self.c)
        if spoiled:
            targets = targets._replace(advantages=targets.advantages * float("nan"))
        counts = learner.step_counts(targets, measured.lengths)
        beta = self.c["beta"]
        return learner.accumulate_gradients(self.engine, self.batch, targets, beta, self.c, counts)

    def step(self, spoiled: bool = False) -> dict:
        metrics = self.learn(spoiled)
        self.engine.step()  # skips itself when the gradient is not finite
        return metrics

    def weights(self) -> torch.Tensor:
        """All weights, flat, on the CPU."""
        stage = self.c["zero_stage"]
        parts = [x.flatten().float().cpu() for _, x in named_weights(self.engine.module.lm, stage)]
        return torch.cat(parts)

    def estimate(self) -> float:
        """dry_run's estimate of torch's memory in GiB, without a rollout engine."""
        lm = self.engine.module.lm
        c = self.c | {"rollout_engine": "server"}  # an engine that holds no memory here
        parts = memory_estimate(c, lm.config, count_parameters(lm), ranks=1)
        parts.pop("libraries")  # torch does not count them
        return on_device(parts) / GIB

    def peak(self, work) -> float:
        """GiB at the peak of `work`, counting everything of this case."""
        if not self.gpu:
            work()
            return 0.0
        wait_for(self.device)
        torch.cuda.reset_peak_memory_stats()
        work()
        wait_for(self.device)
        return (torch.cuda.max_memory_allocated() - self.held) / GIB


def few_layers(setting) -> int:
    """Few layers, enough for a check: widths are real, depth only adds time."""
    return 4 if setting.device == "cuda" else 2


def steps_and_saves(setting, **changes):
    """A step moves the weights; a checkpoint loads to the bit and can go on; NaN moves nothing."""
    case = Case(setting, layers=few_layers(setting), **changes)
    start = case.weights()
    metrics = case.step()
    first = case.weights()  # after the first step
    moved = not torch.equal(start, first)
    good = abs(metrics["loss"]) < 10 and moved
    measured = f"loss {metrics['loss']:.2e}, weights {'moved' if moved else 'stay'}"
    yield Finding("a step", good, measured, "below 10, moved")
    folder = Path(tempfile.mkdtemp(prefix="bench_gpu_"))
    try:
        yield from saves_and_loads(case, folder, first)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    before = case.weights()
    case.step(spoiled=True)
    good = torch.equal(before, case.weights()) and not case.engine.was_step_applied()
    yield Finding("a NaN", good, "weights stay" if good else "weights moved", "weights stay")
    # softmaxes are kept only if there is room, so the estimate leaves them out
    room = loss.room_for_softmaxes
    loss.room_for_softmaxes = lambda hidden: 0
    peak = case.peak(case.step)
    loss.room_for_softmaxes = room
    estimate = case.estimate()
    figures = {"gib": peak, "estimate_gib": estimate}
    measured = f"{peak:.2f} GiB, estimated {estimate:.2f}"
    yield Finding("peak", peak <= ESTIMATE * estimate, measured, f"<= {ESTIMATE} of it", figures)


def saves_and_loads(case: Case, folder: Path, first: torch.Tensor):
    """Saves and loads the engine's own part of a checkpoint, as checkpoint.py does. `first`: the
    weights now."""
    case.engine.save_checkpoint(
        str(folder), tag="engine", save_latest=False, client_state=checkpoint.CONVERTIBLE
    )
    case.step()
    second = case.weights()
    case.engine.load_checkpoint(str(folder), tag="engine")
    good = torch.equal(case.weights(), first)
    yield Finding("save and load", good, "the same weights" if good else "others", "to the bit")
    case.step()
    # Adam makes a full step even for the smallest gradient, whose sign a GPU's rounding may change
    error = distance(case.weights() - first, second - first)
    measured = f"differs by {error:.1e} of itself"
    yield Finding("the step after it", error < 0.3, measured, "< 0.3", {"error": error})
    if case.engine.zero_optimization_stage() > 0:
        yield from loads_converted(case, folder, first)


def loads_converted(case: Case, folder: Path, first: torch.Tensor):
    """The same, but loaded as a checkpoint of another number of ranks is."""
    checkpoint.load_universal(folder, case.engine, folder)
    same = torch.equal(case.weights(), first)
    case.step()
    moved = not torch.equal(case.weights(), first)
    measured = f"{'the same weights' if same else 'others'}, {'moved' if moved else 'stay'} then"
    yield Finding("converted shards", same and moved, measured, "to the bit, moved then")


def zero0(setting):
    yield from steps_and_saves(setting, zero_stage=0)


def zero1(setting):
    yield from steps_and_saves(setting, zero_stage=1)


def zero2(setting):
    yield from steps_and_saves(setting, zero_stage=2)


def zero3(setting):
    yield from steps_and_saves(setting, zero_stage=3)


def checkpointing(setting):
    yield from steps_and_saves(setting, zero_stage=1, gradient_checkpointing=True)


def offload(setting):
    yield from steps_and_saves(setting, zero_stage=1, offload_optimizer=True)


def lora(setting):
    """With LoRA a step must show in the merged bfloat16 weights too."""
    yield from steps_and_saves(setting, zero_stage=0, lora_rank=32, learning_rate=1e-3)


def reference(setting):
    """A step with the KL to a reference model has the same loss wherever the reference is."""
    first = None
    for place in ("device", "cpu", "sharded"):
        changes = {"beta": 0.1, "reference_placement": place}
        case = Case(setting, layers=few_layers(setting), **changes)
        peak = case.peak(case.learn)
        found = case.learn()["loss"]
        first = found if first is None else first
        good = abs(found - first) <= 1e-3 * abs(first) + 1e-6  # other kernels round differently
        measured = f"loss {found:.4e}, {peak:.2f} GiB"
        yield Finding(f"on {place}", good, measured, "the same loss", {"gib": peak})
        # an engine is part of reference cycles: without this the next one would start beside it
        del case
        gc.collect()


def speed(setting):
    """A step's speed, one micro-batch at full depth: attention by varlen_attn, then by blocks."""
    best = matrix_peak(setting.device)
    for name in ("0.5b", "1.5b") if setting.device == "cuda" else ("tiny",):
        # the larger model as it would be trained
        changes = {"zero_stage": 1, "gradient_checkpointing": name == "1.5b"}
        case = Case(setting._replace(shape=name), tokens=2 * TOKENS, **changes)
        for way in ("varlen", "blocks"):
            yield speed_of(case, name, way, best)
        del case  # as in reference()
        gc.collect()


def speed_of(case: Case, name: str, way: str, best: float) -> Finding:
    """The speed of one case. best: the GPU's peak, in operations a second."""
    varlen = way == "varlen" and case.gpu
    # stays for the rest of this process, which is the check's own
    packing.uses_varlen = lambda lm: varlen
    seconds = seconds_of(case.step, case.device, repeats=5, warm=3)
    optimizer = seconds - seconds_of(case.learn, case.device, repeats=5, warm=1)
    peak = case.peak(case.step)
    tokens = int(case.batch["lengths"].sum())
    share = products(case.shape, case.batch, case.groups) / seconds / best
    measured = (
        f"{tokens / seconds:,.0f} completion tokens/s, {share:.1%}, {peak:.1f} GiB, "
        f"{optimizer * 1e3:.0f} of {seconds * 1e3:.0f} ms in the optimizer"
    )
    figures = {"tokens_per_second": tokens / seconds, "share": share, "gib": peak}
    figures |= {"optimizer_seconds": optimizer, "seconds": seconds}
    good = share >= SHARE or not varlen  # blocks are for older GPUs: measured, not judged
    wanted = f">= {SHARE:.0%} of the peak" if way == "varlen" else ""
    return Finding(f"{name}, {way}", good, measured, wanted, figures)
