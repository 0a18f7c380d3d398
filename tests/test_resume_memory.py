"""A checkpoint's record of tau, beta, replay and streaks may be anybody's writing."""

import json
import math

import pytest

import checkpoint
import controllers
from common import UserError, load_config

CONFIG = load_config([])


@pytest.mark.parametrize(
    "change",
    [
        {"controllers": None},
        {"controllers": [1]},
        {"step": -3},
        {"step": math.inf},
        {"step": True},
        {"tau": "0.3"},
        {"tau": math.nan},
        {"entropy": "x"},
        {"meta": {"updates": 1, "m": [0.0], "v": [0.0, 0.0]}},
        {"replay": {"total": 3, "prompts": {"a": [0, 0.5, 0.0]}}},
        {"replay": {"total": 3, "prompts": {"a": [1, "0.5", 0.0]}}},
        {"replay": {"total": 0, "prompts": {"a": [1, 0.5, 0.0]}}},
        {"replay": {"total": 3, "prompts": {"a": [1, 0.5, -0.1]}}},
        {"replay": {"total": 3, "prompts": {"a": [10**400, 0.5, 0.0]}}},
        {"replay": {"total": 3, "prompts": {"a": [1, -(10**400), 0.0]}}},
        {"tau": 10**400},
        {"streaks": {"skipped": 1}},
    ],
)
def test_a_memory_that_no_run_has_saved_is_one_sentence(change, tmp_path):
    """As somebody else could write it, with a manifest that fits."""
    state = controllers.init_state(CONFIG)
    memory = checkpoint.TrainerState(
        2, state, {"total": 3, "prompts": {"a": [1, 0.5, 0.0]}}
    )._asdict()
    file = tmp_path / "controller_state.json"
    file.write_text(json.dumps(memory))
    checkpoint.check_state(tmp_path, CONFIG)
    for key, value in change.items():
        (state if key in state and key != "step" else memory)[key] = value
    file.write_text(json.dumps(memory))
    with pytest.raises(UserError, match=r"controller_state\.json is damaged"):
        checkpoint.check_state(tmp_path, CONFIG)
    assert checkpoint.steps_done(tmp_path) in (0, 1, 2, -3)  # no error of its own
