"""python -m compare.frontier: the rule of the best point, what the table says of several runs, and
that what can not be read is named."""

import json
import math
import shutil
from pathlib import Path

import pytest
from compare_runs import plan, read_lines, write_lines, write_run

from common import UserError
from compare import frontier

EVIDENCE = Path(__file__).resolve().parent.parent / "compare" / "evidence"


def line(step, mean, passed, arm="a", seed=1, **more):
    record = {"arm": arm, "seed": seed, "step": step, "mean@8": mean, "pass@8": passed}
    return record | {"coverage@8": passed / 2, "distinct@8": 1.0, "seconds": 60 * step} | more


def read_evaluations(source: Path, k: int):
    return frontier.table_from(frontier.read_records(source, k), source, k)


def evaluations_of(tmp_path, *lines):
    write_lines(tmp_path / "rows.jsonl", lines)
    return read_evaluations(tmp_path / "rows.jsonl", k=8)


def test_the_best_point_is_the_highest_mean_where_pass_has_not_fallen(tmp_path):
    run = [line(0, 0.2, 0.5), line(50, 0.4, 0.46), line(100, 0.3, 0.48), line(150, 0.25, 0.6)]
    evaluations = evaluations_of(tmp_path, *run)
    # one standard error of .5 is .05 over 100 problems, and .025 over 400
    assert frontier.best_point(evaluations, problems=100)["step"] == 50
    assert frontier.best_point(evaluations, problems=400)["step"] == 100
    # nothing later is allowed, or nothing is better: the start
    assert frontier.best_point(evaluations.head(2), problems=400)["step"] == 0


def test_a_run_without_its_start_is_refused(tmp_path):
    with pytest.raises(UserError, match="b, seed 1 has no evaluation of step 0, the start"):
        evaluations_of(tmp_path, line(0, 0.2, 0.5), line(50, 0.4, 0.4, arm="b"))


def test_the_table_has_means_and_ranges_over_runs_and_the_best_arm_first(tmp_path, capsys):
    lines = [line(0, 0.2, 0.5), line(50, 0.3, 0.5), line(100, 0.4, 0.7)]
    lines += [line(0, 0.2, 0.5, seed=2), line(50, 0.5, 0.5, seed=2)]
    lines += [line(0, 0.2, 0.5, arm="b"), line(50, 0.9, 0.1, arm="b")]
    write_lines(tmp_path / "rows.jsonl", lines)
    picture = tmp_path / "paths.png"
    frontier.main([str(tmp_path / "rows.jsonl"), f"--picture={picture}", "--problems=400"])
    head, _, start, first, second, *_ = capsys.readouterr().out.splitlines()
    assert head.startswith("| arm | runs | steps | mean@8 | pass@8 ")
    assert start.startswith("| (start) |  | 0 | 0.200 | 0.500 |")
    # the last three evaluations, of which the start is none: .35 in one run, .5 in the other
    assert first.startswith("| a | 2 | 75 | 0.425 (0.350 to 0.500) |")
    # the best points: .4 at 100 and .5 at 50
    assert first.endswith("| 75 | 0.450 (0.400 to 0.500) | 0.600 (0.500 to 0.700) | 75 |")
    assert second.startswith("| b | 1 | 50 |")
    assert "| the start |" in second
    assert picture.stat().st_size > 10_000


def test_the_table_has_the_start_of_all_runs_and_best_points_for_its_number_of_problems(tmp_path):
    lines = [line(0, 0.2, 0.5), line(50, 0.4, 0.46), line(100, 0.3, 0.48)]
    evaluations = evaluations_of(tmp_path, *lines, line(0, 0.4, 0.7, arm="b"))
    for problems, best in ((100, "50 | 0.400 | 0.460"), (400, "100 | 0.300 | 0.480")):
        _, _, start, *arms = frontier.table_of(evaluations, problems, 8).splitlines()
        assert start.startswith("| (start) |  | 0 | 0.300 | 0.600 |")
        assert any(f" | {best} | " in arm for arm in arms)


def test_a_folder_of_compare_is_read_like_a_file(tmp_path):
    runs, _ = plan(tmp_path, "a = {}\nb = {}", "--eval_max_prompts=4", seeds=2)
    for run in runs:
        write_run(run, correct={"a": 3, "b": 5}[run["arm"]])
    # one that has only begun has no evaluations yet
    (tmp_path / "out" / "c" / "seed_1").mkdir(parents=True)
    (tmp_path / "out" / "c" / "seed_1" / "metrics.jsonl").touch()
    # a copy that somebody has kept is no run
    shutil.copytree(runs[0]["folder"], runs[0]["folder"].with_name("seed_1_old"))
    evaluations = read_evaluations(tmp_path / "out", k=8)
    assert len(evaluations) == 2 * 2 * 3
    assert set(evaluations[evaluations["arm"] == "b"]["mean"]) == {5 / 8}
    assert frontier.table_of(evaluations, 256, 8).count("\n") == 4
    # what was evaluated counts; eval_max_prompts is a limit, for runs that are not finished
    assert frontier.measured_by(tmp_path / "out") == {"problems": 6, "k": 8}
    (runs[0]["folder"] / "eval.jsonl").unlink()
    assert frontier.measured_by(tmp_path / "out") == {"problems": 6, "k": 8}
    for run in runs[1:]:
        (run["folder"] / "eval.jsonl").unlink()
    assert frontier.measured_by(tmp_path / "out") == {"problems": 4, "k": 8}
    assert frontier.measured_by(tmp_path / "a_file.jsonl") == {"problems": 256, "k": 8}


def test_what_training_took_and_was_is_written_with_the_evaluations(tmp_path):
    (run,), _ = plan(tmp_path, "a = {}")
    write_run(run)
    measured = {f"eval/{metric}@8": 0.5 for metric in frontier.METRICS}
    lines = [
        {"step": 0} | measured,
        {"step": 1, "reward": 0.1, "time/step": 3.0},
        {"step": 2, "reward": 0.3, "entropy": 0.7, "time/step": 5.0, "time/checkpoint": 2.0},
        {"step": 2} | measured,
        {"step": 3, "reward": 0.4, "time/step": 9.0, "time/evaluate": 5.0},
        {"step": 3} | measured,
    ]
    write_lines(run["folder"] / "metrics.jsonl", lines)
    output = tmp_path / "new" / "rows.jsonl"
    frontier.main([str(tmp_path / "out"), f"--output={output}"])
    start, second, third = read_lines(output)
    assert (start["seconds"], second["seconds"], third["seconds"]) == (0, 6, 10)
    assert (second["reward"], second["entropy"], third["reward"]) == (0.2, 0.7, 0.4)
    assert "reward" not in start and "entropy" not in third
    assert len(read_evaluations(output, k=8)) == 3


@pytest.mark.parametrize("unknown", [{"coverage"}, {"coverage", "distinct"}])
def test_metrics_that_a_task_does_not_have_are_left_out(tmp_path, unknown, capsys):
    (run,), _ = plan(tmp_path, "a = {}")
    write_run(run)
    measured = {f"eval/{metric}@8": 0.5 for metric in set(frontier.METRICS) - unknown}
    lines = [{"step": step} | measured for step in (0, 1)]
    write_lines(run["folder"] / "metrics.jsonl", lines)
    output, picture = tmp_path / "rows.jsonl", tmp_path / "paths.png"
    frontier.main([str(tmp_path / "out"), f"--output={output}", f"--picture={picture}"])
    frontier.main([str(output)])
    shown = capsys.readouterr().out
    assert "nan" not in shown
    assert "NaN" not in output.read_text()  # which is no JSON
    for metric in ("coverage", "distinct"):
        assert (f"{metric}@8" in shown) == (metric not in unknown)
        assert (f"{metric}@8" in output.read_text()) == (metric not in unknown)
    assert picture.stat().st_size > 10_000


def test_an_evaluation_that_was_made_twice_counts_once(tmp_path):
    lines = [line(0, 0.2, 0.5), line(50, 0.3, 0.5), line(50, 0.4, 0.5)]
    assert list(evaluations_of(tmp_path, *lines)["mean"]) == [0.2, 0.4]


def test_the_start_is_the_first_step_whatever_the_order_of_the_lines(tmp_path):
    found = evaluations_of(tmp_path, line(50, 0.4, 0.1), line(0, 0.2, 0.5))
    assert list(found["step"]) == [0, 50]
    # at step 50 pass@8 is below the start's, so the start is the best point
    assert frontier.best_point(found, problems=400)["step"] == 0


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no evaluations in it"),
        ("{", "can not be read"),
        (json.dumps(line(0, "much", 0.5)), "much.* lacks arm, seed, step or one of mean@8, pass@8"),
        (json.dumps({"mean@8": 0.5, "pass@8": 0.5}), "lacks arm, seed, step"),
        ("[1, 2]", "line 1 is no object"),
        ("[" * 100_000, "nested too deep"),
        (json.dumps({"arm": "a", "seed": 1, "step": 0, "mean@4": 0.5}), "another --k"),
        (json.dumps(line(0, 0.5, 50)), "no shares from 0 to 1"),
        (json.dumps(line(0, 0.5, math.nan)), "no shares from 0 to 1"),
        (json.dumps(line(math.inf, 0.5, 0.5)), "another --k"),
        (json.dumps(line(0, 0.5, 0.5) | {"seed": [1]}), "another --k"),
        # cut to 1, it would be a part of the run with seed 1
        (json.dumps(line(0, 0.5, 0.5) | {"seed": 1.5}), "another --k"),
        (json.dumps(line(0.5, 0.5, 0.5)), "another --k"),
        (json.dumps(line(0, None, 0.5)), "another --k"),
    ],
)
def test_a_file_that_holds_no_evaluations_is_one_sentence(tmp_path, text, words):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(UserError, match=words):
        read_evaluations(tmp_path / "rows.jsonl", k=8)


def test_what_a_file_does_not_know_and_how_it_names_its_arms_is_no_matter(tmp_path, capsys):
    file, output = tmp_path / "rows.jsonl", tmp_path / "again.jsonl"
    unknown = line(0, 0.2, 0.5, arm=1) | {"distinct@8": None}
    write_lines(file, [unknown, line(0, 0, 0, arm="\x1b[31m|b")])
    frontier.main([str(file), f"--output={output}"])
    shown = capsys.readouterr().out
    assert "distinct" not in shown and "\x1b" not in shown and "| \\x1b[31m\\|b |" in shown
    assert read_lines(output) == read_lines(file)


def test_some_of_the_arms_can_be_shown(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    lines = [line(0, 0.2, 0.5) | {"arm": arm} for arm in ("a", "b", "c")]
    write_lines(file, lines)
    frontier.main([str(file), "--arms=c, a,c"])
    shown = capsys.readouterr().out
    assert "| a |" in shown
    assert "| c |" in shown
    assert "| b |" not in shown
    with pytest.raises(UserError, match="no d, e among a, b, c"):
        frontier.main([str(file), "--arms=d,a,e"])


def test_a_path_is_drawn_from_the_start_with_its_mean_to_the_right(tmp_path, drawn):
    table = evaluations_of(tmp_path, line(0, 0.2, 0.5), line(50, 0.4, 0.7))
    frontier.draw(table, tmp_path / "x.png", 8)
    for axis, wanted in zip(drawn, ([0.5, 0.6], [0.25, 0.3]), strict=True):  # pass, coverage
        path, start, end = axis.lines
        assert path.get_xdata() == pytest.approx([0.2, 0.3])  # averaged with those before
        assert path.get_ydata() == pytest.approx(wanted)
        assert (start.get_xdata()[0], start.get_ydata()[0]) == (0.2, wanted[0])
        assert end.get_xdata() == pytest.approx([0.3])
        assert end.get_ydata() == pytest.approx(wanted[1:])


def test_every_run_of_an_arm_has_a_path_of_its_own(tmp_path, drawn):
    lines = [line(0, 0.2, 0.5), line(50, 0.4, 0.7)]
    lines += [line(0, 0.2, 0.5, seed=2), line(50, 0.6, 0.9, seed=2)]
    frontier.draw(evaluations_of(tmp_path, *lines), tmp_path / "x.png", 8)
    paths = [path for path in drawn[0].lines if len(path.get_xdata()) > 1]
    assert [path.get_xdata()[-1] for path in paths] == pytest.approx([0.3, 0.4])
    assert [path.get_ydata()[-1] for path in paths] == pytest.approx([0.6, 0.7])


@pytest.mark.parametrize("argv", [[], ["a", "b"], ["--pictur=x"]])
def test_it_takes_one_source(argv):
    with pytest.raises(UserError, match="takes one file or folder"):
        frontier.main(argv)


@pytest.mark.parametrize(
    "flag", ["--problems=0", "--k=0", "--picture=/etc/passwd/x.png", "--picture=x.xyz"]
)
def test_a_flag_that_can_not_work_is_refused_before_the_table(tmp_path, flag, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(line(0, 0.2, 0.5)))
    with pytest.raises(UserError, match=flag.partition("=")[0]):
        frontier.main([str(tmp_path / "rows.jsonl"), flag])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "file",
    sorted(EVIDENCE.glob("*[!4].jsonl")),  # pass_at_k reads those to k = 64
    ids=lambda file: file.stem,
)
def test_the_evaluations_in_the_repository_are_read(file):
    table = read_evaluations(file, k=4 if file.stem == "smollm2_sentence" else 8)
    assert len(table) == len(file.read_text().splitlines())
