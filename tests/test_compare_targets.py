"""python -m compare.targets: how far a run was from what its controllers aim at."""

import json

import pytest
from compare_runs import write_lines

from common import ROOT, UserError, load_config
from compare import targets

STEERED = str(ROOT / "config" / "countdown_steered.py")


def write_steps(folder, arm, *flags, lines):
    """A run of countdown_steered under these flags, with these metrics from step 1 on."""
    run = folder / arm / "seed_1"
    run.mkdir(parents=True)
    config = load_config([STEERED, f"--output_dir={run}", "--kl_target=0.05", *flags])
    (run / "config.json").write_text(json.dumps(config))
    numbered = [{"step": i, **line} for i, line in enumerate(lines, 1)]
    # an evaluation before training has a line of its own
    write_lines(run / "metrics.jsonl", [{"step": 0, "eval/mean@8": 0.2}, *numbered])


def step(entropy, kl, tau=0.2, beta=0.02, **more):
    return {"weights/excess_entropy": entropy, "kl": kl, "tau": tau, "beta": beta} | more


def cells_of(folder, capsys, *flags) -> list[str]:
    targets.main([str(folder), *flags])
    return capsys.readouterr().out.splitlines()[2].strip("| ").split(" | ")


def test_the_distance_is_of_the_last_half_and_bounds_are_counted(tmp_path, capsys):
    lines = [step(0.9, 0.9), step(0.9, 0.9), step(0.13, 0.05), step(0.09, 0.02, tau=0.217)]
    write_steps(tmp_path, "both", lines=lines)
    cells = cells_of(tmp_path, capsys)
    assert cells[:3] == ["both", "1", "4"]
    # |.13 - .1| and |.09 - .1|
    assert cells[3:6] == ["0.1100", "0.1", "0.0200"]
    # |.05 - .05| and |.02 - .05|
    assert cells[6:9] == ["0.0350", "0.05", "0.0150"]
    assert cells[9:] == ["0.217", "50%", "0.02", "0%"]
    assert cells_of(tmp_path, capsys, "--last=1")[5:10] == [
        "0.0100",
        "0.0200",
        "0.05",
        "0.0300",
        "0.217",
    ]


def test_betas_bounds_are_its_own(tmp_path, capsys):
    bounds = ["--beta_min=0.001", "--beta_max=0.5"]
    lines = [step(0.1, 0.05, beta=beta) for beta in (0.001, 0.5, 0.2, 0.217)]
    write_steps(tmp_path, "both", *bounds, lines=lines)
    assert cells_of(tmp_path, capsys, "--last=4")[11:] == ["0.217", "50%"]


def test_a_step_without_a_measurement_is_left_out_and_one_made_twice_counts_once(tmp_path, capsys):
    lines = [step(0.9, 0.9), step(None, 0.06), step(0.12, 0.06)]
    write_steps(tmp_path, "both", lines=lines)
    with open(tmp_path / "both" / "seed_1" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, **step(0.14, 0.06)}) + "\n")
    cells = cells_of(tmp_path, capsys)
    assert cells[2:6] == ["3", "0.1400", "0.1", "0.0400"]


def test_without_a_target_there_is_a_mean_and_no_distance(tmp_path, capsys):
    flags = ["--maxent_target_excess_entropy=-1.0", "--kl_target=0.0"]
    lines = [{**step(0.1, 0.03, tau=0.217), "weights/entropy": 1.4}] * 2
    write_steps(tmp_path, "off", *flags, lines=lines)
    cells = cells_of(tmp_path, capsys)
    assert cells[3:9] == ["1.4000", "", "", "0.0300", "", ""]
    # nothing moves tau, so that it is maxent_tau_max says nothing
    assert cells[9:12] == ["0.217", "", "0.02"]


def test_an_infinite_tau_which_json_has_no_number_for_is_shown(tmp_path, capsys):
    flags = ["--maxent_target_excess_entropy=-1.0", "--maxent_tau=inf"]
    write_steps(tmp_path, "off", *flags, lines=[step(0.1, 0.03, tau=None)] * 2)
    assert cells_of(tmp_path, capsys)[9] == "inf"


def test_an_annealed_target_is_that_of_its_step(tmp_path, capsys):
    # .2, .15 and .1 at the first three steps
    flag = "--maxent_target_excess_entropy={0: 0.2, 2: 0.1}"
    write_steps(tmp_path, "both", flag, lines=[step(0.2, 0), step(0.15, 0), step(0.1, 0)])
    assert cells_of(tmp_path, capsys, "--last=3")[3:6] == ["0.1500", "0.1", "0.0000"]


def test_a_meta_controller_is_measured_by_the_kl_that_it_steers(tmp_path, capsys):
    flags = ["--controller_meta_method=analytic", "--maxent_target_excess_entropy=-1.0"]
    flags += ["--maxent_target_weight_entropy=1.5", "--kl_target=0.01"]
    line = {**step(0.1, 0.5), "weights/entropy": 1.4, "meta/kl": 0.012}
    write_steps(tmp_path, "meta", *flags, lines=[line])
    assert cells_of(tmp_path, capsys)[3:9] == [
        "1.4000",
        "1.5",
        "0.1000",
        "0.0120",
        "0.01",
        "0.0020",
    ]


def test_a_run_that_has_only_begun_is_left_out(tmp_path, capsys):
    write_steps(tmp_path, "both", lines=[])
    write_steps(tmp_path, "off", lines=[{"step": 1, "tau": 0.2, "beta": 0.0}])
    assert cells_of(tmp_path, capsys)[:3] == ["off", "1", "1"]


def test_what_can_not_be_measured_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="takes one folder"):
        targets.main([])
    with pytest.raises(UserError, match=r"no <arm>.* has a finished step"):
        targets.main([str(tmp_path)])
    write_steps(tmp_path, "both", lines=[])
    with pytest.raises(UserError, match=r"no <arm>.* has a finished step"):
        targets.main([str(tmp_path)])
    (tmp_path / "both" / "seed_1" / "metrics.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"damaged \(line 1\): delete .*/both/seed_1, and the py"):
        targets.main([str(tmp_path)])
    with pytest.raises(UserError, match="--last=-1 must be at least 1"):
        targets.main([str(tmp_path), "--last=-1"])
