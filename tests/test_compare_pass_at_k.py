"""python -m compare.pass_at_k: what it counts, prints, writes and refuses."""

import itertools
import json

import pytest
from compare_runs import plan, read_lines, write_lines, write_run

from common import UserError
from compare import pass_at_k as command
from compare.pass_at_k import Counts, pass_at_k, run_pass_at_k


@pytest.mark.parametrize("n, k", [(1, 1), (4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_equals_trying_every_choice_of_k(n, k):
    for correct in range(n + 1):
        draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def write_evaluation(folder, arm: str, seed: int, correct: list[int]) -> None:
    """Each problem under two evaluation seeds of three samples, with so many right ones in all."""
    lines = []
    for i, right in enumerate(correct):
        for seed_of_sampling, part in enumerate((min(right, 3), max(right - 3, 0))):
            lines.append({"id": str(i), "seed": seed_of_sampling, "samples": 3, "correct": part})
    run = folder / arm / f"seed_{seed}"
    run.mkdir(parents=True)
    write_lines(run / "eval.jsonl", lines)


def test_samples_of_all_evaluation_seeds_count_together(tmp_path):
    write_evaluation(tmp_path, "a", 1, [0, 4, 4, 6])
    (run,) = command.read_runs(tmp_path)
    assert run == Counts("a", 1, 6, {0: 1, 4: 2, 6: 1})
    assert run_pass_at_k(run, 1) == pytest.approx((0 + 4 + 4 + 6) / 6 / 4)
    # two of six samples are wrong: one pair of fifteen has no right one
    assert run_pass_at_k(run, 2) == pytest.approx((0 + 2 * 14 / 15 + 1) / 4)
    assert run_pass_at_k(run, 6) == pytest.approx(3 / 4)


def test_the_table_has_means_the_range_of_the_last_column_and_the_best_arm_first(tmp_path, capsys):
    write_evaluation(tmp_path, "narrow", 1, [6, 0, 0, 0])
    write_evaluation(tmp_path, "wide", 1, [1, 1, 1, 0])
    write_evaluation(tmp_path, "wide", 2, [1, 1, 1, 1])
    counts, picture = tmp_path / "new" / "counts.jsonl", tmp_path / "other" / "k.png"
    command.main([str(tmp_path), f"--output={counts}", f"--picture={picture}"])
    printed = capsys.readouterr().out
    head, _, wide, narrow = printed.splitlines()[:4]
    assert head == "| arm | runs | pass@1 | pass@2 | pass@4 | pass@6 |"
    assert wide == "| wide | 2 | 0.146 | 0.292 | 0.583 | 0.875 (0.750 to 1.000) |"
    assert narrow == "| narrow | 1 | 0.250 | 0.250 | 0.250 | 0.250 |"
    assert picture.stat().st_size > 10_000
    # what it wrote says the same
    assert read_lines(counts)[0] == {
        "arm": "narrow",
        "seed": 1,
        "samples": 6,
        "problems": {"0": 3, "6": 1},
    }
    command.main([str(counts)])
    assert capsys.readouterr().out.splitlines() == printed.splitlines()[:4]


def test_an_arm_is_drawn_by_the_mean_of_its_runs_and_their_range(tmp_path, drawn):
    write_evaluation(tmp_path, "wide", 1, [1, 1, 1, 0])
    write_evaluation(tmp_path, "wide", 2, [1, 1, 1, 1])
    command.draw(command.table_of(command.read_runs(tmp_path)), tmp_path / "x.png")
    (axis,) = drawn
    assert axis.lines[0].get_ydata() == pytest.approx([7 / 8 * k / 6 for k in (1, 2, 4, 6)])
    area = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (area.min(), area.max()) == pytest.approx((1 / 8, 1))


def test_a_folder_of_compare_is_read_as_it_is(tmp_path, capsys):
    (run,), argv = plan(tmp_path, "a = {}")
    write_run(run)
    command.main([argv[3].removeprefix("--output=")])
    assert "| pass@16 | pass@24 |" in capsys.readouterr().out


GOOD = {"arm": "a", "seed": 1, "samples": 4, "problems": {"0": 3, "4": 1}}


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        '{"arm": "a"}',
        json.dumps(GOOD | {"problems": {}}),
        json.dumps(GOOD | {"problems": {"5": 1}}),
        json.dumps(GOOD | {"problems": {"-1": 1}}),
        json.dumps(GOOD | {"problems": {"x": 1}}),
        json.dumps(GOOD | {"problems": [1, 2]}),
        json.dumps(GOOD | {"problems": {"0": -3}}),
        json.dumps(GOOD | {"samples": 0, "problems": {"0": 1}}),
        json.dumps(GOOD | {"samples": 2_000_000, "problems": {"1000000": 1}}),
        '{"arm": "a", "seed": 1, "samples": 1e999, "problems": {"0": 1}}',
        "[" * 100_000,
    ],
)
def test_a_file_that_holds_no_counts_is_one_sentence(tmp_path, text):
    file = tmp_path / "counts.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(UserError, match=r"counts.jsonl can't be used") as caught:
        command.main([str(file)])
    assert "\n" not in str(caught.value)


def test_evaluations_that_can_not_stand_side_by_side_are_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere is not there"):
        command.main([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match=r"has no <arm>/seed_<n>/eval.jsonl"):
        command.main([str(tmp_path)])
    write_evaluation(tmp_path, "a", 1, [6])
    run = tmp_path / "b" / "seed_1"
    run.mkdir(parents=True)
    write_lines(run / "eval.jsonl", [{"id": "0", "seed": 0, "samples": 3, "correct": 1}])
    with pytest.raises(UserError, match="3 to 6 samples of each problem"):
        command.main([str(tmp_path)])
    for name, words in (("1", r"b/seed_1/eval.jsonl has other .* than .*a/seed_1"), (1, "no text")):
        write_lines(run / "eval.jsonl", [{"id": name, "seed": 0, "samples": 6, "correct": 1}])
        with pytest.raises(UserError, match=words):
            command.main([str(tmp_path)])
    write_lines(tmp_path / "twice.jsonl", [GOOD, GOOD])
    with pytest.raises(UserError, match="has arm a, seed 1 twice"):
        command.main([str(tmp_path / "twice.jsonl")])
    write_lines(tmp_path / "other.jsonl", [GOOD, GOOD | {"arm": "b", "problems": {"0": 3}}])
    with pytest.raises(UserError, match="3 to 4 problems"):
        command.main([str(tmp_path / "other.jsonl")])
    write_lines(tmp_path / "one.jsonl", [GOOD])
    with pytest.raises(UserError, match=r"x.xyz must end in one of .png"):
        command.main([str(tmp_path / "one.jsonl"), "--picture=x.xyz"])
    # an evaluation that was cut short, or one of an older version
    uneven = [
        {"id": name, "seed": 0, "samples": n, "correct": 1} for name, n in (("0", 3), ("1", 6))
    ]
    older = [{"id": "0", "seed": 0, "correct": 1}]
    for lines, words in ((uneven, r"\[3, 6\]"), (older, "without `samples`"), ([], "cut short")):
        write_lines(run / "eval.jsonl", lines)
        with pytest.raises(UserError, match=rf"b/seed_1/eval.jsonl can't be used, .*{words}"):
            command.main([str(tmp_path)])
