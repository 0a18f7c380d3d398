"""train.update: what each of a step's updates is given, and what it remembers of them."""

from types import SimpleNamespace

import pytest
import torch

import learner
import ranks
import rollout
import train
from common import load_config
from journal import Timer

SECONDS = {"time/wait": 0.25, "time/learn_slowest": 1.0, "time/learn_mean": 0.5}


@pytest.mark.parametrize(
    "applied, skipped", [((True, True), 0), ((False, True), 4), ((True, False), 4)]
)
def test_each_update_has_the_steered_beta_and_the_rate_of_its_step(monkeypatch, applied, skipped):
    """One that is skipped is not forgotten when the next one is applied. The loss is the first
    one's, clipped tokens are the last one's, and seconds add up."""
    c = load_config(["--num_iterations=2", "--learning_rate=1", "--warmup_steps=4", "--beta=0.1"])
    answers = iter(applied)
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{"lr": 9.0}]),
        step=lambda: None,
        was_step_applied=lambda: next(answers),
        get_global_grad_norm=lambda: 1.0,
    )
    given, updates = [], []

    def accumulate(engine, batch, targets, beta, c, counts) -> dict:
        given.append((beta, engine.optimizer.param_groups[0]["lr"]))
        number = len(given)
        metrics = {name: number for name in ("loss", "clip_ratio/low", "clip_ratio/high")}
        return metrics | SECONDS

    def accumulate_for_seeds(update: int) -> dict:
        updates.append(update)
        return {}

    monkeypatch.setattr(learner, "accumulate_gradients", accumulate)
    monkeypatch.setattr(learner, "local_targets", lambda targets, world: targets)
    seeds = SimpleNamespace(accumulate_gradients=accumulate_for_seeds)
    # half of the warm-up is over
    run = SimpleNamespace(
        config=c, engine=engine, world=None, controller_state={"beta": 0.7}, step=1
    )
    run.skipped_steps, run.timer = 3, Timer()
    metrics = train.update(run, {}, None, {}, seeds)
    assert given == [(0.7, 0.5)] * 2
    assert updates == [0, 1]
    assert run.skipped_steps == skipped
    assert (metrics["loss"], metrics["clip_ratio/low"], metrics["clip_ratio/high"]) == (1, 2, 2)
    assert (metrics["time/learn_slowest"], metrics["time/learn_mean"]) == (2.0, 1.0)
    assert (metrics["learning_rate"], metrics["grad_norm"]) == (0.5, 1.0)
    assert metrics["skipped_steps"] == skipped
    assert run.timer.seconds == {"wait": 0.5}


class OneWeight:
    """An engine whose log-probs are its one weight."""

    def __init__(self):
        self.weight = torch.zeros((), requires_grad=True)

    def __call__(self, ids, prompt_lengths, lengths):
        logps = self.weight.expand(len(ids), int(lengths.max()))
        return logps, logps.detach()

    def backward(self, loss, scale_wrt_gas):
        loss.backward()


def test_only_the_first_update_makes_up_for_forwards_of_rows_that_rest_elsewhere(monkeypatch):
    """The later ones have no such forwards on any rank, and ZeRO-3 wants as many on all."""
    if not torch.distributed.is_initialized():
        ranks.start_distributed()
    plan = learner.MicroBatchPlan(resting=[], learning=[torch.arange(2)], missing=3)
    monkeypatch.setattr(learner, "agree_on_plan", lambda *args: plan)
    idle = []
    monkeypatch.setattr(learner, "idle_forwards", lambda engine, batch, number: idle.append(number))
    rollouts = [{"prompt_ids": [5], "completion_ids": [6, 0], "logprobs": [-1.0, -1.0]}] * 2
    batch = rollout.to_batch(rollouts, "cpu")
    rewards = torch.tensor([[1.0, 0.0]])
    targets = learner.GroupTargets(rewards, torch.tensor([True]), advantages=rewards - 0.5)
    counts = learner.step_counts(targets, batch["lengths"].view(1, 2))
    c = load_config(["--objective=dr_grpo", "--num_iterations=2"])
    for _ in range(2):
        learner.accumulate_gradients(OneWeight(), batch, targets, 0.0, c, counts)
    assert idle == [3, 0]
