"""What train.py's loop itself decides: which metric steers, which model follows a schedule, what an
evaluation that fails costs."""

import re
from types import SimpleNamespace

import in_child
from controlled import setting
from exact_matrix import steps_in

import common
import controllers
import evaluate
import loss
import train
from journal import Timer


def test_the_loop_steers_by_the_metrics_whose_targets_are_on():
    c = setting("tau_excess", kl_target=0.5, beta=0.2)
    run = SimpleNamespace(config=c, state=controllers.init_state(c))
    measured = {"weights/entropy": 9.0, "weights/excess_entropy": 0.1, "kl": 2.0}
    told = train.steer(run, measured, None, None, None)
    assert run.state["entropy"] == 0.1
    assert run.state["tau"] > 0.2 == told["tau"] and run.state["beta"] > 0.2 == told["beta"]
    assert told["delta_tau"] == run.state["tau"] - 0.2


def test_the_reference_follows_a_temperature_that_changes(tiny_model_dir, tmp_path):
    """At this rate nothing is learnt: policy and reference stay the same model."""
    folder = tmp_path / "run"
    flags = {"beta": 0.1, "temperature": {0: 1.0, 1: 0.5}, "learning_rate": 1e-12, "max_steps": 2}
    status, words = in_child.run(None, tiny_model_dir, folder, **flags)
    assert status == 0, words
    assert [line["kl"] < 1e-5 for line in steps_in(folder)] == [True, True]


def with_k_told() -> None:
    real = loss.ADVANTAGES["pass_at_k"]

    def told(rewards, scale, k):
        print(f"advantages of k={k!r}", flush=True)
        return real(rewards, scale, k)

    loss.ADVANTAGES["pass_at_k"] = told


def test_pkpo_takes_the_whole_k_of_each_step(tiny_model_dir, tmp_path):
    flags = {"objective": "pkpo", "pkpo_k": {0: 4, 2: 2}, "max_steps": 3}
    status, words = in_child.run(with_k_told, tiny_model_dir, tmp_path / "run", **flags)
    assert status == 0, words
    assert re.findall(r"advantages of k=(\S+)", words) == ["4", "3", "2"]


def test_an_evaluation_whose_servers_are_lost_is_said_and_ends_nothing(monkeypatch):
    def lost(*args):
        raise common.RolloutsLost("no server is left")

    monkeypatch.setattr(evaluate, "evaluate", lost)
    said = []
    run = SimpleNamespace(inputs=SimpleNamespace(eval_rows=[{}]), timer=Timer(), step=3)
    run.sampler = run.config = run.world = run.log = None
    run.say = said.append
    train.evaluate_now(run)
    assert said == ["step 3: not evaluated: no server is left"]
