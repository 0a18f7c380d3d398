"""The claims of docs/results.md: the table there is what compare/claims.py computes today, and no
run of the evidence refutes one."""

import json
from math import isnan, sqrt

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
    values, starts = {1: 0.30, 2: 0.36, 5: 0.33}, {5: 0.26, 1: 0.20, 2: 0.26}
    change, low, high = claims.difference(values, starts, paired=True)
    # changes of .1, .1, .07: standard error .01, t of 2 degrees of freedom 4.3027
    assert (change, low, high) == pytest.approx((0.09, 0.09 - 0.043027, 0.09 + 0.043027), abs=1e-5)


@pytest.mark.parametrize(
    "values, beside, paired",
    [
        ({1: 0.3}, {1: 0.2, 2: 0.1}, False),  # one run
        ({1: 0.3}, {1: 0.2}, True),
        ({1: 0.3, 2: 0.3}, {1: 0.2, 2: 0.2}, False),  # equal ones: two of one run, or a ceiling
        ({1: 0.3, 2: 0.36}, {1: 0.2, 2: 0.26}, True),
    ],
)
def test_runs_that_do_not_scatter_have_no_interval_and_decide_nothing(
    values, beside, paired, recwarn
):
    change, low, high = claims.difference(values, beside, paired)
    assert change == pytest.approx(0.1 if len(beside) == len(values) else 0.15)
    assert isnan(low) and isnan(high)
    other = "start" if paired else "dr_grpo"
    measured = claims.Measured({"maxent": values, other: beside}, change, low, high)
    cell = claims.row_of(claim_about(metric="mean@8", beside=other), measured)[4]
    assert cell == f"{change:+.3f} (no interval)"  # and not bold
    assert not recwarn


def test_each_run_counts_with_its_last_evaluations_or_with_one():
    run = pd.DataFrame([{"step": step, "mean@8": step / 1000} for step in (0, 50, 100, 150, 200)])
    assert claims.metric_at("last", run, "mean@8", "a") == pytest.approx(0.15)
    assert claims.metric_at("50", run, "mean@8", "a") == 0.05
    assert claims.metric_at("last", run[:4], "mean@8", "a") == pytest.approx(0.1)
    for few in (1, 3):  # the start is no result, nor are two evaluations a mean of three
        with pytest.raises(UserError, match="a has fewer than 3 evaluations after its start"):
            claims.metric_at("last", run[:few], "mean@8", "a")


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


# --- mistakes in the files


HEAD = "claim,experiment,step,metric,arm,beside,refuted by"
CLAIM = "a claim,D,last,mean@8,a,b,a below 0.1"


def evaluation(arm="a", seed=1, step=0, mean=0.5, **more) -> dict:
    return {"arm": arm, "seed": seed, "step": step, "mean@8": mean, **more}


def evaluations_of_two_arms() -> list[dict]:
    return [
        evaluation(arm, seed, step, mean + seed / 100)
        for arm, mean in (("a", 0.5), ("b", 0.3))
        for seed in (1, 2)
        for step in (0, 50, 100, 150)
    ]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """write(a claim's line, evaluations) puts both where compare.claims looks for them."""

    def write(claim=CLAIM, evaluations=None, head=HEAD):
        claims.evaluations.cache_clear()
        claims.samples.cache_clear()
        (tmp_path / "claims.csv").write_text(f"{head}\n{claim}\n")
        lines = evaluations_of_two_arms() if evaluations is None else evaluations
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / claims.FILES["D"]).write_text(text)

    monkeypatch.setattr(claims, "CLAIMS", tmp_path / "claims.csv")
    monkeypatch.setattr(claims, "EVIDENCE", tmp_path)
    yield write
    claims.evaluations.cache_clear()
    claims.samples.cache_clear()


def test_files_without_a_mistake_are_measured(files):
    files()
    ((claim, measured),) = claims.measure_claims()
    assert claim.limits == [Limit("a", "below", 0.1)]
    assert measured.values == {"a": {1: 0.51, 2: 0.52}, "b": {1: 0.31, 2: 0.32}}
    assert measured.decided


@pytest.mark.parametrize(
    "limit", ["a under 2", "a below", "a below two", "", "a below nan", "a above inf"]
)
def test_a_limit_that_is_none_is_told(files, limit):
    files(CLAIM.replace("a below 0.1", limit))
    with pytest.raises(UserError, match=r"line 2: '.*' must be like 'maxent below 2'"):
        claims.measure_claims()


@pytest.mark.parametrize(
    "claim, said",
    [
        (CLAIM.replace("b,a", "b,c"), "line 2: the limit is about c, the claim about a and b"),
        (CLAIM.replace("b,a", "bb,a"), "no runs of arm 'bb' in .*demo.jsonl, whose arms are a, b"),
        (CLAIM.replace("b,a", "a,a"), "line 2 compares a with itself"),
        (CLAIM.replace("D", "Q"), "line 2: experiment 'Q' is none of N, S, "),
        (CLAIM.replace("last", "lats"), "line 2: step 'lats' must be a whole number, or last"),
        (CLAIM.replace("last", "60"), "a, seed 1 has no evaluation at step 60, only at 0, 50, "),
        (CLAIM.replace("@8", "@9"), "a, seed 1 has no share from 0 to 1 as mean@9 at step 50"),
        (CLAIM.replace("mean@8", "pass@64"), "line 2: pass@64 was measured in C, G only"),
        (f"{CLAIM}\nfirst, second,{CLAIM}", "line 3 has 9 cells, not 7: a cell with a comma needs"),
        (CLAIM.removesuffix(",a below 0.1"), "line 2 has 6 cells, not 7"),
        (f'"{CLAIM}', "claims.csv can not be read: unexpected end of data"),
        ("", "claims.csv has no claim below its first line"),
    ],
)
def test_a_mistake_in_the_table_of_claims_is_told(files, claim, said):
    files(claim)
    with pytest.raises(UserError, match=said):
        claims.measure_claims()


def test_a_table_with_other_columns_is_told(files):
    files(head=HEAD.replace("arm,beside", "beside,arm"))
    with pytest.raises(UserError, match=f"claims.csv must begin with the line {HEAD}"):
        claims.measure_claims()
    claims.CLAIMS.unlink()
    with pytest.raises(UserError, match=r"claims.csv can not be read: .*No such file"):
        claims.measure_claims()


@pytest.mark.parametrize(
    "wrong, said",
    [
        (evaluation(seed=None, step=200), "line 17 must have a text as arm .* not 'a', None and"),
        ({"arm": "a", "seed": 3}, "line 17 must have a text as arm .* not 'a', 3 and None"),
        (evaluation(seed="1", step=200), "line 17 must have a text as arm .* not 'a', '1' and 200"),
        (evaluation(step=150), "lines 4 and 17 are both of a, seed 1, step 150: delete one"),
        (
            evaluation(step=200, mean=None),
            "a, seed 1 has no share from 0 to 1 as mean@8 at step 200",
        ),
        (
            evaluation(step=200, mean=float("nan")),
            "a, seed 1 has no share from 0 to 1 as mean@8 at step 200",
        ),
        (evaluation(step=200, mean=50), "a, seed 1 has no share from 0 to 1 as mean@8 at step 200"),
        (
            evaluation(step=200, mean="0.5"),
            "a, seed 1 has no share from 0 to 1 as mean@8 at step 200",
        ),
        (
            {"arm": "a", "seed": 1, "step": 200},
            "a, seed 1 has no share from 0 to 1 as mean@8 at step 200",
        ),
    ],
)
def test_an_evaluation_that_would_be_left_out_or_count_twice_is_told(files, wrong, said):
    files(evaluations=[*evaluations_of_two_arms(), wrong])
    with pytest.raises(UserError, match=said):
        claims.measure_claims()


def test_what_a_claim_does_not_use_may_be_missing(files):
    unused = evaluation("c", mean=None)
    files(evaluations=[*evaluations_of_two_arms(), unused])
    assert len(claims.measure_claims()) == 1


def test_a_line_that_is_not_json_is_named(files):
    files()
    path = claims.EVIDENCE / claims.FILES["D"]
    path.write_text(path.read_text() + "{half\n")
    with pytest.raises(
        UserError, match=r"demo.jsonl can not be read: line 17 is not JSON: '\{half'"
    ):
        claims.measure_claims()


def test_a_run_without_a_start_is_told(files):
    lines = evaluations_of_two_arms()
    files(CLAIM.replace("b,a", "start,a"), lines)
    claims.measure_claims()
    files(CLAIM.replace("b,a", "start,a"), lines[1:])
    with pytest.raises(UserError, match=r"demo.jsonl: a, seed 1 has no evaluation at step 0"):
        claims.measure_claims()


@pytest.mark.parametrize("change", [("last", "0"), ("b,a", "start,a")])
def test_samples_of_a_start_are_told(files, change):
    files(CLAIM.replace("D,", "G,").replace("mean@8", "pass@64").replace(*change))
    with pytest.raises(UserError, match="line 2: pass@64 is of last checkpoints only"):
        claims.measure_claims()


def test_samples_of_a_run_that_is_left_out_are_left_out_too(files, monkeypatch):
    files(CLAIM.replace("D,", "G,").replace("mean@8", "pass@64"))
    counts = [
        {"arm": arm, "seed": seed, "samples": 64, "problems": {"0": seed, "5": 4 - seed}}
        for arm in ("a", "b")
        for seed in (1, 2, 3)
    ]
    (claims.EVIDENCE / claims.SAMPLED["G"]).write_text("\n".join(map(json.dumps, counts)))
    monkeypatch.setattr(claims, "LEFT_OUT", [("G", "a", 2)])
    ((_, measured),) = claims.measure_claims()
    assert measured.values == {"a": {1: 0.75, 3: 0.25}, "b": {1: 0.75, 2: 0.5, 3: 0.25}}


def test_too_few_samples_for_pass_at_64_are_told(files):
    files(CLAIM.replace("D,", "G,").replace("mean@8", "pass@64"))
    counts = {"arm": "a", "seed": 1, "samples": 32, "problems": {"0": 1, "5": 3}}
    (claims.EVIDENCE / claims.SAMPLED["G"]).write_text(json.dumps(counts))
    with pytest.raises(UserError, match="has 32 samples of a problem: pass@64 needs 64"):
        claims.measure_claims()


def test_the_command_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "new" / "claims.png"
    claims.main([f"--picture={picture}"])
    assert capsys.readouterr().out.startswith("| claim | from | metric |")
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="takes --picture, not mine"):
        claims.main(["mine.csv"])
