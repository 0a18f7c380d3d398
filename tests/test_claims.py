"""The claims of docs/results.md: the table there is what compare/claims.py computes today, and no
run of the evidence refutes one."""

from math import sqrt

import pandas as pd
import pytest

from common import ROOT, UserError
from compare import claims
from compare.claims import Claim, Limit


def claim_about(**changes) -> Claim:
    claim = Claim("a claim", "N", "48", "distinct@8", "maxent", "dr_grpo", [])
    return claim._replace(**changes)


def test_the_page_has_the_table_as_it_is_computed():
    assert claims.table(claims.measure_claims()) in (ROOT / "docs" / "results.md").read_text()


def test_no_run_refutes_a_claim():
    assert "REFUTED" not in claims.table(claims.measure_claims())


def test_every_claim_can_be_refuted():
    for claim in claims.read_claims():
        assert claim.limits, claim.text
        for limit in claim.limits:
            assert limit.arm in (claim.arm, claim.beside), claim.text


def test_a_run_beyond_a_limit_is_named():
    limits = [Limit("maxent", "below", 2.0), Limit("dr_grpo", "above", 1.5)]
    values = {"maxent": {1: 4.7, 2: 1.9}, "dr_grpo": {1: 0.9, 2: 1.5}}
    said = claims.verdict(limits, values)
    assert said == (
        "**REFUTED** by maxent, seed 2: 1.9; limit: maxent below 2 or dr_grpo above 1.5"
    )
    values["maxent"][2] = 2.0  # at the limit is not beyond it
    assert claims.verdict(limits, values) == "maxent below 2 or dr_grpo above 1.5"


def test_two_arms_are_compared_by_welchs_interval():
    one, other = {1: 4.0, 2: 5.0, 3: 9.0}, {1: 1.0, 2: 2.0, 7: 1.5, 8: 1.5}
    change, low, high = claims.difference(one, other, paired=False)
    # variances 7 and 1/6, of 3 and 4 runs
    error = sqrt(7 / 3 + (1 / 6) / 4)
    assert change == pytest.approx(6.0 - 1.5)
    freedom = error**4 / ((7 / 3) ** 2 / 2 + (1 / 24) ** 2 / 3)
    assert freedom == pytest.approx(2.0716, abs=1e-3)
    assert (high - low) / 2 / error == pytest.approx(4.16, abs=0.01)  # Student's t of 2.07


def test_a_run_is_compared_with_its_own_start():
    values, starts = {1: 0.30, 2: 0.36, 5: 0.33}, {5: 0.23, 1: 0.20, 2: 0.26}
    change, low, high = claims.difference(values, starts, paired=True)
    assert (change, low, high) == pytest.approx((0.1, 0.1, 0.1))  # in each run .1: no luck
    starts[5] = 0.26
    change, low, high = claims.difference(values, starts, paired=True)
    # changes of .1, .1, .07: standard error .01, t of 2 degrees of freedom 4.3027
    assert (change, low, high) == pytest.approx((0.09, 0.09 - 0.043027, 0.09 + 0.043027), abs=1e-5)


def test_each_run_counts_with_its_last_evaluations_or_with_one():
    run = pd.DataFrame([{"step": step, "mean@8": step / 100} for step in (0, 50, 100, 150, 200)])
    assert claims.metric_at("last", run, "mean@8") == pytest.approx(1.5)
    assert claims.metric_at("50", run, "mean@8") == 0.5
    assert claims.metric_at("last", run[:2], "mean@8") == 0.5  # not the start


def test_runs_without_an_end_are_left_out():
    values = claims.values_of(
        "maxent_20", claim_about(experiment="C", metric="pass@8", step="last")
    )
    assert 42 in values and 2 not in values
    others = claims.evaluations("C")
    assert ("maxent_10", 2) in others and ("maxent_spread", 1) not in others


def test_64_samples_are_counted():
    values = claims.values_of("xdr_05", claim_about(experiment="C", metric="pass@64", step="last"))
    assert values == pytest.approx({2: 0.957, 3: 0.961}, abs=5e-4)  # compare.pass_at_k's figures


def test_a_row_shows_means_runs_and_units():
    def row_of(claim):
        return claims.row_of(claim, claims.measure(claim))

    row = row_of(claim_about())
    assert row[1:4] == ["N, step 48", "distinct@8", "maxent 4.15 (3), dr_grpo 0.92 (3)"]
    assert row[4].startswith("**+3.23 (+1.54 to ")  # 0 lies outside
    row = row_of(claim_about(metric="mean@8"))
    assert row[4].startswith("-0.004 (") and "**" not in row[4]
    row = row_of(claim_about(beside="start", metric="pass@8"))
    assert row[3] == "maxent 0.974 (3), start 0.609 (3)"


@pytest.mark.parametrize("text", ["maxent under 2", "maxent below", "maxent below two", ""])
def test_a_limit_that_is_none_is_told(text):
    with pytest.raises(UserError, match=r"must be like 'maxent below 2'"):
        claims.read_limits(text)


def test_an_arm_without_runs_is_told():
    with pytest.raises(UserError, match="no runs of ppo in N"):
        claims.values_of("ppo", claim_about())


def test_a_step_or_start_without_an_evaluation_is_told():
    with pytest.raises(UserError, match="no evaluation at step 48"):  # seed 1 ended at 36
        claims.values_of("maxrl_slow", claim_about())
    sampled = claim_about(
        experiment="G", step="last", metric="pass@64", arm="maxent_20", beside="start"
    )
    with pytest.raises(UserError, match="pass@64 is of last checkpoints only"):
        claims.measure(sampled)


def test_the_command_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "new" / "claims.png"
    claims.main([f"--picture={picture}"])
    assert capsys.readouterr().out.startswith("| claim | from | metric |")
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="takes --picture, not mine"):
        claims.main(["mine.csv"])
