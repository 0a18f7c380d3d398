"""train.update: what each of a step's updates is given, and what it remembers of them."""

from types import SimpleNamespace

import pytest

import learner
import train
from common import load_config
from journal import Timer

NO_TIME = {"time/wait": 0.0, "time/learn_slowest": 0.0, "time/learn_mean": 0.0}
METRICS = NO_TIME | {"clip_ratio/low": 0.0, "clip_ratio/high": 0.0}


@pytest.mark.parametrize(
    "applied, skipped", [((True, True), 0), ((False, True), 4), ((True, False), 4)]
)
def test_each_update_has_the_steered_beta_and_the_rate_of_its_step(monkeypatch, applied, skipped):
    """One that is skipped is not forgotten when the next one is applied."""
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
        return dict(METRICS)

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
    train.update(run, {}, None, {}, seeds)
    assert given == [(0.7, 0.5)] * 2
    assert updates == [0, 1]
    assert run.skipped_steps == skipped
