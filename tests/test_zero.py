"""One learner, any number of ranks and any ZeRO stage: the same parameters. Real DeepSpeed, gloo,
two processes."""

import functools

import child
import pytest
import torch
import zero_worker
from zero_worker import CASES

# those of the shipped configs; 0 and 2 take as long again
STAGES = [1, 3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2))]


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory):
    """results(case, ranks, stage): all cases of these ranks are learnt at the first call."""

    @functools.cache
    def learn(ranks: int, stage: int) -> dict:
        out = tmp_path_factory.mktemp(f"zero_{ranks}_{stage}")
        log = out / "log"
        work = (zero_worker.all_cases, tiny_model_dir, out, stage)
        started = child.start_ranks(ranks, *work, logs=[log] * ranks)
        assert child.statuses(started) == [0] * ranks, log.read_text()[-3000:]
        assert "deprecated" not in log.read_text()
        return {path.stem: torch.load(path) for path in out.glob("*.pt")}

    return lambda case, ranks, stage: learn(ranks, stage)[case]


def assert_same_weights(ours: dict, theirs: dict) -> None:
    """Within 2e-5 after three AdamW steps of 1e-3, but for at most 1 in 10,000: AdamW divides by
    the gradient's own size, so where a gradient is rounding noise the step is noise too, up to 1e-3
    each."""
    gaps = [(ours[name] - weight).abs().flatten() for name, weight in theirs.items()]
    gaps = torch.cat(gaps)
    assert gaps.max() < 3e-3
    assert (gaps > 2e-5).float().mean() < 1e-4


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_at_any_zero_stage_learn_what_one_rank_learns(results, case, stage):
    one = results(case, 1, 0)
    two = results(case, 2, stage)
    assert one["applied"]
    assert two["applied"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=1e-7)
    assert two["seed_loss"] == pytest.approx(one["seed_loss"], rel=1e-4)
    assert (one["seed_loss"] > 0) == case.startswith("infoseed")
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    assert_same_weights(two["weights"], one["weights"])


def test_cutting_groups_into_micro_batches_changes_nothing(results):
    whole, cut = results("maxent", 1, 0), results("maxent_cut", 1, 0)
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert_same_weights(cut["weights"], whole["weights"])


def test_the_cases_learn_different_things(results):
    """Else the comparisons above would show nothing."""
    name = "model.layers.0.mlp.up_proj.weight"
    base = results("maxent", 1, 0)["weights"][name]
    for case in set(CASES) - {"maxent", "maxent_cut"}:
        weight = results(case, 1, 0)["weights"][name]
        assert (weight - base).abs().max() > 1e-4, case


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_a_nan_on_one_rank_skips_the_step_on_all_ranks(results, case, stage):
    assert results(case, 2, stage)["nan"] == {"applied": False, "unchanged": True}
