"""bfloat16 at every ZeRO stage, as on a GPU, with real DeepSpeed on one rank: a step learns, a
checkpoint goes on to the bit, a NaN changes nothing."""

from types import SimpleNamespace

import pytest
import torch
from test_balance import collected_by
from transformers import AutoModelForCausalLM

import checkpoint
import infoseed
import learner
import rollout
import sft
import train
from checkpoint import TrainerState
from common import load_config
from journal import Timer
from policy import float32_copies, named_weights
from ranks import start_distributed

STAGES = [0, 1, 2, 3]
# the two ends, quickly
SLOW_BETWEEN = [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3]


@pytest.fixture(scope="module")
def world():
    return start_distributed()


def run_of(model, folder, stage: int, world, *more: str) -> SimpleNamespace:
    flags = [
        f"--model={model}",
        f"--output_dir={folder}",
        f"--zero_stage={stage}",
        "--dtype=bfloat16",
        "--dataset.name=countdown",
        "--max_completion_length=9",
        "--max_tokens_per_micro_batch=60",
        "--learning_rate=1e-3",
        *more,
    ]
    c = load_config(flags)
    engine = train.load_policy(c, world.device)
    run = SimpleNamespace(config=c, engine=engine, world=world, controller_state={"beta": 0.0})
    run.timer = Timer()
    run.step = 0
    run.skipped_steps = 0
    return run


def step(run, poison: float = 1.0) -> dict:
    """One update; `poison` multiplies the weights of the groups."""
    c, engine = run.config, run.engine
    collected = collected_by(run.world)
    batch = rollout.to_batch(collected.rollouts, "cpu")
    group = learner.measure_groups(engine, None, batch, collected, collected.rewards, c)
    targets = learner.group_targets(group, c["maxent_tau"], c["beta"], c)
    targets = targets._replace(weights=targets.weights * poison)
    norm = learner.step_counts(targets, group.lengths)
    seeds = infoseed.Seeds(engine, collected, c, "cpu")
    metrics = train.update(run, batch, targets, norm, seeds)
    run.step += 1
    return metrics


def weights_of(run) -> dict:
    lm = run.engine.module.lm
    return {name: w.clone() for name, w in named_weights(lm, run.config["zero_stage"])}


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stage", SLOW_BETWEEN)
def test_a_step_learns_and_a_checkpoint_goes_on_to_the_bit(stage, tiny_model_dir, world, tmp_path):
    run = run_of(tiny_model_dir, tmp_path, stage, world)
    before = weights_of(run)
    metrics = step(run)
    assert metrics["skipped_steps"] == 0
    assert metrics["grad_norm"] > 0
    after = weights_of(run)
    assert not same(before, after)
    assert {w.dtype for w in after.values()} == {torch.bfloat16}

    memory = TrainerState(1, {"tau": 0.2, "beta": 0.0}, {})
    saved = checkpoint.save(memory, run.engine, sft.tiny_tokenizer(), run.config, set())
    random_state = torch.get_rng_state()
    wanted = step(run), weights_of(run)
    other = run_of(tiny_model_dir, tmp_path, stage, world)
    torch.rand(1)  # moves it
    checkpoint.load(saved, other.engine, tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)
    other.step = 1
    assert same(weights_of(other), after)
    found = step(other)
    assert same(weights_of(other), wanted[1])
    assert found["loss"] == wanted[0]["loss"]
    assert found["grad_norm"] == wanted[0]["grad_norm"]

    changed = ["--max_grad_norm=0.25", "--optimizer_options.weight_decay=0.5"]
    third = run_of(tiny_model_dir, tmp_path, stage, world, *changed)
    checkpoint.load(saved, third.engine, tmp_path)
    assert {group["weight_decay"] for group in third.engine.optimizer.param_groups} == {0.5}
    assert third.engine.optimizer.clip_grad == 0.25


@pytest.mark.parametrize("stage", SLOW_BETWEEN)
def test_a_nan_changes_nothing_and_the_next_step_learns(stage, tiny_model_dir, world, tmp_path):
    run = run_of(tiny_model_dir, tmp_path, stage, world)
    before = weights_of(run)
    assert step(run, poison=float("nan"))["skipped_steps"] == 1
    assert same(before, weights_of(run))
    assert step(run)["skipped_steps"] == 0
    assert not same(before, weights_of(run))


@pytest.mark.parametrize("stage", SLOW_BETWEEN[:-1])
def test_one_infinite_gradient_is_seen_by_the_norm_without_a_search(
    stage, tiny_model_dir, world, tmp_path, monkeypatch
):
    def search(*args):
        raise AssertionError("a gradient was searched")

    run = run_of(tiny_model_dir, tmp_path, stage, world)
    monkeypatch.setattr("deepspeed.runtime.utils.has_inf_or_nan", search)
    monkeypatch.setattr("deepspeed.runtime.zero.stage_1_and_2.has_inf_or_nan", search)
    before = weights_of(run)

    def spoil(grad):
        grad.view(-1)[3] = float("-inf")
        return grad

    *_, last = run.engine.module.lm.parameters()
    hook = last.register_hook(spoil)
    assert step(run)["skipped_steps"] == 1
    assert same(before, weights_of(run))
    hook.remove()
    assert step(run)["skipped_steps"] == 0
    assert not same(before, weights_of(run))


def copies_of(run) -> torch.Tensor:
    copies = float32_copies(run.engine.optimizer, run.config["zero_stage"])
    return torch.cat([copy.detach().flatten() for copy in copies])


@pytest.mark.parametrize("stage", SLOW_BETWEEN)
def test_float32_copies_are_spread_around_the_weights(stage, tiny_model_dir, world, tmp_path):
    """Where they begin they round to the weights; one step of 3e-6, a tenth of the way to a
    neighbour or less, then moves the weights on average as far as the copies."""
    run = run_of(tiny_model_dir, tmp_path, stage, world)
    run.config["learning_rate"] = 3e-6
    copies = copies_of(run)
    given = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    weights = torch.cat([w.detach().flatten() for w in given.parameters()])
    padding = len(copies) - len(weights)  # from stage 1 on
    begins = copies.bfloat16()
    assert torch.equal(
        begins.sort().values, torch.nn.functional.pad(weights, (0, padding)).sort().values
    )
    lower = (copies.view(torch.int32) << 16).float() / 2**31  # of half the distance, -1 to 1
    spread = lower[begins != 0]
    assert abs(spread.mean()) < 0.02
    assert spread.square().mean() == pytest.approx(1 / 3, rel=0.02)

    step(run)
    moved = copies_of(run) - copies
    shown = (copies_of(run).bfloat16() - begins).float()
    # the regression of the weights' moves on those of their copies
    assert (shown * moved).sum() / moved.square().sum() == pytest.approx(1, rel=0.1)


@pytest.mark.slow  # 40 steps
@pytest.mark.parametrize("stage", STAGES)
def test_steps_too_small_for_bfloat16_add_up(stage, tiny_model_dir, world, tmp_path):
    """Weights are kept in float32 beside those of 16 bits: 40 steps of 3e-6 move most weights of
    .02, whose neighbours are 6e-5 and more away, though each of them moves only few."""
    run = run_of(tiny_model_dir, tmp_path, stage, world)
    run.config["learning_rate"] = 3e-6
    before = weights_of(run)
    lengths = []
    for _ in range(40):
        step(run)
        after = weights_of(run)
        moved = [(after[name] != before[name]).float().mean() for name in before]
        lengths.append(sum(moved).item() / len(moved))
    assert lengths[0] < 0.5 * lengths[-1]
    assert lengths[-1] > 0.3
