"""bench: what it computes from what it has measured, and that its arms run."""

import json
import subprocess
import sys

import pytest
import torch
from exact_matrix import ROOT

from bench import __main__ as bench
from bench import arms as bench_arms


def test_a_scenario_is_read_from_its_name():
    assert bench_arms.parts("P4G8T512V2048tail") == {"P": 4, "G": 8, "T": 512, "V": 2048}
    assert all(
        list(bench_arms.parts(name)) == ["P", "G", "T", "V"] for name, *_ in bench.COMPARISONS
    )


def test_one_token_in_64_ends_a_completion_of_a_heavy_tail():
    ends = bench_arms.ends("P4G8T512V2048tail")
    assert (
        len(ends) == len(set(ends)) == 2048 // 64
        and max(ends) < 2048
        and bench_arms.ends("P4G8T64V2048") == [0]
    )


def test_work_is_weighed_by_what_it_holds_at_once():
    def work():
        first = torch.zeros(2**20)
        second = first + 1
        del first
        return second + 1

    result, gib = bench_arms.weighed(work)
    assert result.shape == (2**20,) and gib * 2**30 == pytest.approx(8 * 2**20, rel=1e-3)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5])
def test_the_slope_of_a_power_law_is_its_power(power):
    assert bench.slope([2, 4, 8, 32], [3 * size**power for size in (2, 4, 8, 32)]) == pytest.approx(
        power, abs=1e-9
    )


@pytest.mark.parametrize("mine, theirs", [("ours", "trl"), ("ours_compiled", "trl_vllm")])
def test_a_row_has_the_median_ratio_of_neighbours_whatever_their_order(
    mine, theirs, monkeypatch, capsys
):
    calls = []

    def measure(arm, scenario, beta):
        calls.append(arm)
        return dict.fromkeys(
            ("step", "learn", "memory", "start", "rest"),
            (1.0 if arm == mine else 2.0) * (1 + len(calls) // 3),
        )

    monkeypatch.setattr(bench, "measure", measure)
    row = bench.compare("P4G8T64V2048", theirs, 0.0, 4)
    assert calls == [mine, theirs, theirs, mine] * 2  # A B B A
    assert (
        row.startswith(f"| P4G8T64V2048 | {theirs} | 0.0 | 0.50 (")
        and "4/4" in capsys.readouterr().out
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "bench", "P2G2T8V256", "--arm=ours", "--steps=5"],
        ["-m", "bench", "P2G2T8V256", "--arm=limits", "--steps=5"],
    ],
)
def test_an_arm_runs_and_prints_one_result(command):
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    results = [
        json.loads(line.removeprefix("result "))
        for line in done.stdout.splitlines()
        if line.startswith("result ")
    ]
    assert (
        done.returncode == 0
        and len(results) == 1
        and all(value > 0 for name, value in results[0].items() if name != "start")
    ), done.stderr[-2000:]
