"""time/*, by a clock that only work moves: what rank 0 does, and how long it waits for others."""

import json
import math
from types import SimpleNamespace

import pytest

import journal
import learner
import ranks
import rollout
import scoring
import train
from common import load_config

SECONDS = {  # of every call
    (rollout.HfEngine, "generate"): 7,
    (scoring, "measure"): 2,
    (learner, "accumulate_gradients"): 5,
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
    monkeypatch.setattr(journal, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def test_a_phase_within_another_counts_for_itself_only(clock):
    timer = journal.Timer()
    for _ in range(2):
        with timer("learn"):
            clock.seconds += 3
            with timer("wait"):
                clock.seconds += 10
            clock.seconds += 1
        clock.seconds += 0.5  # in no phase
    assert timer.take() == {"time/wait": 20, "time/learn": 8, "time/step": 29}
    assert timer.take() == {"time/step": 0}


def test_phases_and_waiting_for_other_ranks_add_up_to_the_step(
    tiny_model_dir, tmp_path, monkeypatch, clock
):
    flags = {
        "model": tiny_model_dir,
        "output_dir": tmp_path / "run",
        "dataset.name": "countdown",
        "rollout_engine": "hf",
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "max_steps": 2,
        "num_iterations": 2,
        "reward_workers": 0,
        "save_steps": -1,
    }
    monkeypatch.setattr(train, "Stop", lambda *_: SimpleNamespace(asked=lambda: False))
    monkeypatch.setattr(train, "run_header", lambda world: {})
    monkeypatch.setattr(train, "leave_together", lambda sampler: None)
    train.main(load_config([f"--{key}={value}" for key, value in flags.items()]))
    vocabulary = json.loads((tiny_model_dir / "config.json").read_text())["vocab_size"]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["maxent_tau"] == 1 / math.log(vocabulary)  # which config/default.py leaves open
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    for line in map(json.loads, lines):
        assert line["tau"] == config["maxent_tau"]
        times = {key: value for key, value in line.items() if key.startswith("time/")}
        step = times.pop("time/step")
        # after the rewards, before each of two exchanges of gradients, after the sync
        assert times.pop("time/wait") == 4 * 4
        assert times == {
            "time/rollout": 7,
            "time/reward": 2,
            "time/score": 0,
            "time/learn": 2 * 5,
            "time/sync": 0,
        }
        assert step == 7 + 2 + 10 + 16
