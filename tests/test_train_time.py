"""time/*, by a clock that only work moves: what rank 0 does, and how long it waits for others."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from in_process import train_here

import journal
import learner
import ranks
import rollout
import scoring
import train

SECONDS = {  # of every call
    (rollout.HfEngine, "generate"): 7,
    (scoring, "measure"): 2,
    (learner, "update_metrics"): 5,
    (learner, "learning_seconds"): 4,  # in which it meets another rank
    (ranks.dist, "barrier"): 4,  # another rank is so much slower
}


@pytest.fixture
def clock(monkeypatch):
    """SECONDS pass while these run, and none otherwise."""
    now = SimpleNamespace(seconds=0)

    def that_takes(real, seconds):
        def work(*args, **kwargs):
            now.seconds += seconds
            return real(*args, **kwargs)

        return work

    for (place, name), seconds in SECONDS.items():
        monkeypatch.setattr(place, name, that_takes(getattr(place, name), seconds))
    stopwatch = SimpleNamespace(perf_counter=lambda: now.seconds)
    monkeypatch.setattr(journal, "time", stopwatch)
    monkeypatch.setattr(learner, "time", stopwatch)
    return now


def test_a_phase_within_another_counts_for_itself_only(clock):
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


def test_phases_and_waiting_for_other_ranks_add_up_to_the_step(
    tiny_model_dir, tmp_path, monkeypatch, clock
):
    def with_a_slower_rank(seconds):
        """The groups' own gather_groups, but for learning_seconds, whose values are one a rank."""
        if seconds.dim() == 1:
            return torch.cat([seconds, seconds + 4])
        return ranks.gather_groups(seconds)

    monkeypatch.setattr(learner, "gather_groups", with_a_slower_rank)
    monkeypatch.setattr(train, "run_header", lambda world: {})  # it asks for the date
    folder = tmp_path / "run"
    train_here(monkeypatch, tiny_model_dir, folder, max_steps=2, num_iterations=2)
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
            "time/score": 0,
            "time/deal": 0,
            "time/learn": 2 * 5,
            "time/sync": 0,
        }
        assert step == 7 + 2 + 10 + 16
