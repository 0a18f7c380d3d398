"""bench: what it computes from what it has measured, what it refuses, that its arms run, and that
nothing is left of what they wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deadlines import PATIENCE
from exact_matrix import ROOT

from bench import __main__ as bench
from bench import arms as bench_arms
from bench.scenarios import ends, has_tail, parts
from common import RunStopped, UserError


def test_a_scenario_is_read_from_its_name():
    assert parts("P4G8T512V2048tail") == {"P": 4, "G": 8, "T": 512, "V": 2048}
    for scenario, *_ in bench.COMPARISONS:
        assert list(parts(scenario)) == ["P", "G", "T", "V"]


def test_the_real_model_is_a_scenario_in_every_comparison():
    flags, scenarios = bench.read_flags(["smollm2", "P4G8T64V2048", "--beta=0.5"])
    assert bench.asked_for(flags, scenarios) == [
        ("smollm2", "trl_hf", 0.5),
        ("smollm2", "trl", 0.5),
        ("smollm2", "trl_vllm", 0.5),
        ("P4G8T64V2048", "trl", 0.5),
    ]
    flags, scenarios = bench.read_flags(["smollm2", "--against=trl_hf"])
    assert bench.asked_for(flags, scenarios) == [("smollm2", "trl_hf", 0.0)]
    assert parts("smollm2") == {"P": 4, "G": 8, "T": 64, "V": 49152}
    assert not has_tail("smollm2")


def test_beside_trl_with_vllm_ours_has_a_cache_as_large(monkeypatch):
    given = {}
    monkeypatch.setattr(bench_arms, "ours", lambda *args, **changes: given.update(changes))
    bench_arms.ours_compiled("smollm2", 0.0, 4)
    assert given["vllm_options"]["kv_cache_memory_bytes"] == bench_arms.CACHE * 2**30
    assert given["importance_sampling"] == "sequence_mask"  # TRL's own default


def test_one_token_in_64_ends_a_completion_of_a_heavy_tail():
    found = ends("P4G8T512V2048tail")
    assert len(found) == len(set(found)) == 2048 // 64
    assert max(found) < 2048
    assert ends("P4G8T64V2048") == [0]


def test_work_is_weighed_by_what_it_holds_at_once():
    def work():
        first = torch.zeros(2**20)
        second = first + 1
        del first
        return second + 1

    result, gib = bench_arms.weighed(work)
    assert result.shape == (2**20,)
    assert gib * 2**30 == pytest.approx(8 * 2**20, rel=1e-3)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5])
def test_the_slope_of_a_power_law_is_its_power(power):
    sizes = [2, 4, 8, 32]
    values = [3 * size**power for size in sizes]
    assert bench.slope(sizes, values) == pytest.approx(power, abs=1e-9)


@pytest.mark.parametrize(
    "against, mine, theirs",
    [
        ("trl", "ours", "trl"),
        ("trl_vllm", "ours_compiled", "trl_vllm"),
        ("trl_hf", "ours_hf", "trl"),
    ],
)
def test_a_row_has_the_median_ratio_of_neighbours_whatever_their_order(
    against, mine, theirs, monkeypatch, capsys
):
    calls = []

    def measure(arm, scenario, beta, steps):
        calls.append(arm)
        value = 1.0 if arm == mine else 2.0
        slower = 1 + len(calls) // 3  # the machine, as time goes on
        return dict.fromkeys(("step", "learn", "memory", "start"), value * slower)

    monkeypatch.setattr(bench, "measure", measure)
    row = bench.compare("P4G8T64V2048", against, 0.0, 4, 8)
    assert calls == [mine, theirs, theirs, mine] * 2  # A B B A
    assert row.startswith(f"| P4G8T64V2048 | {mine} / {theirs} | 0.0 | 0.50 (")
    assert "4/4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["P4G8T64V2048", "--repeat=5"], ["--repeat=5", "--repeats="]),
        (["P4G8"], ["P4G8", "P4G8T64V2048"]),
        (["P4G8T64V2048", "--arm=our"], ["--arm=our", "ours_compiled"]),
        (["--arm=ours"], ["needs one scenario"]),
        (["--against=ours"], ["--against=ours", "trl_vllm"]),
        (["--against=trl_vllm", "--beta=0.1"], ["need a scenario, such as P4G8T64V2048"]),
        (["--repeats=0"], ["--repeats=0", "at least 1"]),
        (["--repeats=few"], ["repeats", "int"]),
        (["--steps=3"], ["--steps=3", "above 3"]),
    ],
)
def test_what_can_not_be_measured_is_one_sentence(argv, words, monkeypatch):
    monkeypatch.setattr(bench, "check_same_loss", lambda: pytest.fail("it started"))
    with pytest.raises(UserError) as caught:
        bench.main(argv)
    said = str(caught.value)
    for word in words:
        assert word in said
    assert "\n" not in said


def test_what_takes_too_long_is_one_sentence_and_more_steps_have_more_time(monkeypatch):
    limits = []

    def run_for(command, limit, env=None):
        limits.append(limit)
        return subprocess.CompletedProcess(command, None, "", "")

    monkeypatch.setattr(bench, "run_for", run_for)
    for steps in (8, 100):
        said = f"^ours P4G8 of {steps} steps was not done after [0-9]+ seconds and was ended: "
        with pytest.raises(RunStopped, match=said):
            bench.measure("ours", "P4G8", steps=steps)
    assert limits[0] >= 1800
    assert limits[1] > 5 * limits[0]
    with pytest.raises(RunStopped, match=r"^tests/test_trl_oracle.py was not done after 900 "):
        bench.check_same_loss()


def test_a_run_is_told_its_beta_its_steps_and_its_threads(monkeypatch):
    given = {}

    def run_for(command, limit, env=None):
        given[env["ARM"]] = (command, env)
        return subprocess.CompletedProcess(command, 0, 'result {"step": 1}\n', "")

    monkeypatch.setattr(bench, "run_for", run_for)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    for arm in ("ours", "trl"):
        monkeypatch.setenv("ARM", arm)
        assert bench.measure(arm, "P4G8", 0.04, 9) == {"step": 1}
    for command, env in given.values():
        assert {"P4G8", "--beta=0.04", "--steps=9"} <= set(command)
        assert env["OMP_NUM_THREADS"] == "2"
    spins = {arm: env.get("GOMP_SPINCOUNT") for arm, (_, env) in given.items()}
    assert spins == {"ours": "10000", "trl": "300000"}


def test_steps_that_warm_up_do_not_count_and_the_start_is_counted_from_the_start(
    monkeypatch, capsys
):
    # the median of all five would be 9
    times = [{"step": 9.0}] * bench.WARM + [{"step": 1.0}] * (bench.WARM - 1)
    monkeypatch.setitem(bench.ARMS, "ours", lambda *given: (bench.STARTED + 5, times))
    bench.run_arm("ours", "P4G8", 0.0, 5)
    result = json.loads(capsys.readouterr().out.split("result ")[1])
    assert result["step"] == 1.0
    assert result["start"] == pytest.approx(5)


# --- folders of runs


def test_nothing_is_left_of_the_run_of_an_arm_of_ours(tmp_path, monkeypatch):
    import train

    def main(config):
        out = Path(config["output_dir"])
        assert tmp_path in out.parents
        out.mkdir()  # it is new
        times = {"time/step": 2.0, "time/learn": 1.0, "time/sync": 0.25, "time/rollout": 0.5}
        (out / "metrics.jsonl").write_text((json.dumps(times) + "\n") * 5)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(bench_arms, "prepare", lambda scenario: tmp_path)
    monkeypatch.setattr(bench_arms, "watch", lambda steps: ([7.0], {}))
    monkeypatch.setattr(train, "main", main)
    # a tail: nothing of the engine is changed
    first, times = bench_arms.ours("P4G8T64V2048tail", 0.0, 4)
    # what is no rollout is learning, as in TRL's
    wanted = {"step": 2.0, "learn": 1.25, "rollout": 0.75}
    assert (first, len(times), times[0]) == (7.0, 4, wanted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["ours", "ours_hf", "trl", "trl_vllm", "limits"])
def test_an_arm_runs_and_prints_one_result(arm):
    command = [sys.executable, "-m", "bench", "P2G2T8V256", f"--arm={arm}", "--steps=5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("result {") == 1
    result = bench.result_of(done)
    result.pop("start")  # of limits there is none
    assert min(result.values()) > 0, result
