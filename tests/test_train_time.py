"""time/*, by a clock that only work moves: what rank 0 does, and how long it waits for others."""

import io
import json
import math
import sys
from types import SimpleNamespace

import in_child
import torch

import journal
import learner
import ranks
import rollout
import scoring
import train
from common import progress

SECONDS = {  # of every call
    (rollout.HfEngine, "generate"): 7,
    (scoring, "measure"): 2,
    (learner, "update_metrics"): 5,
    (learner, "learning_seconds"): 4,  # in which it meets another rank
    (ranks.dist, "barrier"): 4,  # as there
}
LEARNING_SECONDS = learner.learning_seconds
clock = SimpleNamespace(seconds=0)
stopwatch = SimpleNamespace(perf_counter=lambda: clock.seconds)


def that_takes(seconds: int, real):
    def work(*args, **kwargs):
        clock.seconds += seconds
        return real(*args, **kwargs)

    return work


def seconds_beside_a_slower_rank(own: float) -> dict:
    """learning_seconds of two ranks, of which the other took 4 seconds more."""
    learner.gather_rows = lambda seconds: torch.cat([seconds, seconds + 4])
    found = LEARNING_SECONDS(own)
    learner.gather_rows = ranks.gather_rows
    return found


def with_a_clock() -> None:
    """SECONDS pass while these run, and none otherwise."""
    learner.learning_seconds = seconds_beside_a_slower_rank
    for (place, name), seconds in SECONDS.items():
        setattr(place, name, that_takes(seconds, getattr(place, name)))
    journal.time = stopwatch
    learner.time = stopwatch
    train.run_header = lambda world: {}  # it asks for the date


def test_a_phase_within_another_counts_for_itself_only(monkeypatch):
    monkeypatch.setattr(journal, "time", stopwatch)
    timer = journal.Timer()
    for _ in range(2):
        with timer("learn"):
            clock.seconds += 3
            with timer("wait"):
                clock.seconds += 10
            clock.seconds += 1
            timer.add("wait", 0.25)  # of the 1 that has passed
        clock.seconds += 0.5  # in no phase
    assert timer.take() == {"time/wait": 20.5, "time/learn": 7.5, "time/step": 29}
    assert timer.take() == {"time/step": 0}


def test_the_bar_says_which_phase_is_under_way(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    timer = journal.Timer()
    timer.bar = progress(total=3, unit="step")
    seen = []
    for phase in ("rollout", "learn"):
        with timer(phase):
            seen.append(terminal.getvalue().split("\r")[-1].split()[0])
    assert seen == ["rollout", "learn"]


def test_phases_and_waiting_for_other_ranks_add_up_to_the_step(tiny_model_dir, tmp_path):
    folder = tmp_path / "run"
    flags = {"max_steps": 2, "num_iterations": 2}
    status, words = in_child.run(with_a_clock, tiny_model_dir, folder, **flags)
    assert status == 0, words
    vocabulary = json.loads((tiny_model_dir / "config.json").read_text())["vocab_size"]
    config = json.loads((folder / "config.json").read_text())
    assert config["maxent_tau"] == 1 / math.log(vocabulary)  # which config/default.py leaves open
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    for line in map(json.loads, lines):
        assert line["tau"] == config["maxent_tau"]
        times = {key: value for key, value in line.items() if key.startswith("time/")}
        step = times.pop("time/step")
        assert times.pop("time/learn_slowest") == times.pop("time/learn_mean") + 2 * 2
        # after the rewards, before each of two exchanges of gradients, after the sync
        assert times.pop("time/wait") == 4 * 4
        assert times == {
            "time/rollout": 7,
            "time/reward": 2,
            "time/deal": 0,
            "time/score": 0,
            "time/learn": 2 * 5,
            "time/sync": 0,
        }
        assert step == 7 + 2 + 10 + 16
