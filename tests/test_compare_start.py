"""python -m compare: the commands that it starts, their logs and their lock."""

import subprocess

import pytest
from compare_runs import plan, write_run

import journal
from common import UserError
from compare import __main__ as compare


def test_only_a_run_with_nothing_to_keep_is_begun_anew_and_all_have_their_ranks(tmp_path):
    (run,), _ = plan(tmp_path, 'a = {"learning_rate": 1e-5}', "--learning_rate=1e-4")
    fresh = compare.command_of(run, 3)
    write_run(run, evaluated=False)
    (run["folder"] / "step_000020").rename(run["folder"] / "step_000010")
    going_on = compare.command_of(run, 3)
    assert fresh[:-1] == going_on[:-1]
    assert fresh[-1] == "--overwrite_output_dir=True"
    assert going_on[-1] == "--resume_from_checkpoint=latest"
    assert fresh[fresh.index("--nproc_per_node") + 1] == "3"
    assert compare.load_config(run["flags"])["learning_rate"] == 1e-5  # an arm has the last word


def test_a_folder_stays_locked_while_a_run_lives_though_we_were_killed(tmp_path, monkeypatch):
    (run,), _ = plan(tmp_path, "a = {}")
    log = tmp_path / "out" / "a" / "seed_1.log"
    log.parent.mkdir(parents=True)
    log.write_text("of an earlier try\n")
    words = ["sh", "-c", "echo new$GOMP_SPINCOUNT; cat"]
    monkeypatch.setattr(compare, "command_of", lambda run, ranks: words)
    # our choice of how threads wait is none of theirs
    monkeypatch.setattr(compare, "CHOSEN_WAITING", "GOMP_SPINCOUNT")
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setattr(compare.subprocess, "DEVNULL", subprocess.PIPE)  # cat waits for its end
    locked = journal.take_lock(tmp_path / "out", "")
    process = compare.start(run, 1, locked)
    locked.close()  # as the system does when a process is killed
    try:
        with pytest.raises(UserError, match="is in use"):
            with journal.hold_folder(tmp_path / "out"):
                pass
    finally:
        process.communicate()
    with journal.hold_folder(tmp_path / "out"):
        assert log.read_text() == "of an earlier try\nnew\n"


@pytest.mark.parametrize("seeds, evaluated", [(1, True), (1, False), (3, True)])
def test_a_run_that_has_evaluated_its_last_checkpoint_is_not_evaluated_again(
    seeds, evaluated, tmp_path, monkeypatch
):
    (run,), _ = plan(tmp_path, "a = {}", f"--eval_seeds={seeds}")
    started = []

    def start(run, ranks, locked):
        started.append(compare.state_of(run))
        if started == ["new"]:
            write_run(run, evaluated=False)
            (run["folder"] / "evaluations").mkdir()
            for step in (10, 20) if evaluated else (10,):
                path = run["folder"] / "evaluations" / f"step_{step:06d}.jsonl"
                path.write_text(f"of step {step}\n")
        else:
            (run["folder"] / "eval.jsonl").write_text("of evaluate.py\n")
        return subprocess.Popen(["true"])

    monkeypatch.setattr(compare, "start", start)
    monkeypatch.setattr(compare, "listen", lambda handler: None)
    compare.carry_out([run], {"jobs": 1, "ranks": 1, "output": "out"}, None)
    taken = seeds == 1 and evaluated
    assert started == (["new"] if taken else ["new", "trained"])
    words = "of step 20\n" if taken else "of evaluate.py\n"
    assert (run["folder"] / "eval.jsonl").read_text() == words
