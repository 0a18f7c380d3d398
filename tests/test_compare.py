"""python -m compare: what it does with the folders it finds, what it starts, what it refuses; and
once for real."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from compare_runs import (
    TINY,
    K,
    plan,
    read_lines,
    write_checkpoint,
    write_evaluation,
    write_lines,
    write_run,
)
from deadlines import PATIENCE

import journal
from common import ROOT, SIGNALS, RunStopped, UserError, end_now
from compare import __main__ as compare
from compare.results import settled_at

# --- folders


def test_a_run_is_new_interrupted_trained_or_done(tmp_path):
    (run,), _ = plan(tmp_path, "a = {}")
    assert compare.state_of(run) == "new"
    write_run(run, evaluated=False)
    shutil.rmtree(run["folder"] / "step_000020")
    assert compare.state_of(run) == "new"  # it started and never saved
    write_checkpoint(run, 10)
    assert compare.state_of(run) == "interrupted"
    write_checkpoint(run, 20)
    assert compare.state_of(run) == "trained"
    (run["folder"] / "step_000020" / "engine" / "weights").write_text("cut of")
    assert compare.state_of(run) == "interrupted"  # a damaged checkpoint is none
    write_evaluation(run)
    assert compare.state_of(run) == "done"


def test_an_interrupted_run_can_be_continued_from_every_evaluation(tmp_path):
    (run,), _ = plan(tmp_path, "a = {}")
    assert run["config"]["save_steps"] == 10
    (run,), _ = plan(tmp_path, "a = {}", "--save_steps=5")
    assert run["config"]["save_steps"] == 5
    assert "--save_steps=5" in run["flags"]


def test_a_folder_with_a_run_of_another_config_is_refused_in_one_sentence(tmp_path):
    (run,), argv = plan(tmp_path, "a = {}")
    write_run(run)
    plan(tmp_path, 'a = {"learning_rate": 1e-5}')
    with pytest.raises(UserError, match=r"learning_rate=0.0002 instead of 1e-05") as caught:
        compare.main(argv)
    said = str(caught.value)
    assert str(run["folder"]) in said
    assert "\n" not in said


def test_a_run_made_before_a_key_existed_is_still_the_same_run(tmp_path):
    runs, _ = plan(tmp_path, 'a = {}\nb = {"maxent_loss": "mle"}')
    for run in runs:
        write_run(run)
        older = dict(run["config"])
        del older["maxent_loss"]
        (run["folder"] / "config.json").write_text(json.dumps(older))
    same, other = runs
    assert compare.state_of(same) == "done"
    with pytest.raises(UserError, match="maxent_loss='listwise' instead of 'mle'"):
        compare.state_of(other)


def test_a_run_with_a_schedule_is_the_same_when_it_is_read_back(tmp_path):
    arm = 'a = {"objective": "pkpo", "pkpo_k": {0: 8, 300: 4}}'
    (run,), _ = plan(tmp_path, arm)
    write_run(run)
    assert compare.state_of(run) == "done"
    (other,), _ = plan(tmp_path, arm.replace("4}", "2}"))
    with pytest.raises(UserError, match="'300': 4"):
        compare.state_of(other)


def test_a_run_that_has_chosen_its_micro_batches_is_still_the_same(tmp_path):
    (run,), _ = plan(tmp_path, 'a = {"max_tokens_per_micro_batch": 0}')
    write_run(run)
    chosen = run["config"] | {"max_tokens_per_micro_batch": 2048}
    (run["folder"] / "config.json").write_text(json.dumps(chosen))
    assert compare.state_of(run) == "done"
    (other,), _ = plan(tmp_path, 'a = {"max_tokens_per_micro_batch": 1024}')
    with pytest.raises(UserError, match="max_tokens_per_micro_batch=2048 instead of 1024"):
        compare.state_of(other)


def test_a_folder_that_was_moved_holds_the_same_runs(tmp_path):
    (run,), _ = plan(tmp_path, "a = {}")
    write_run(run)
    shutil.move(tmp_path / "out", tmp_path / "archive")
    (run,), argv = plan(tmp_path, "a = {}", f"--output={tmp_path / 'archive'}")
    assert compare.state_of(run) == "done"
    compare.main([*argv, "--report_only=True"])


def test_an_infinite_tau_is_the_same_after_a_round_trip_through_the_folder(tmp_path):
    (run,), _ = plan(tmp_path, 'a = {"objective": "xdr", "maxent_tau": "inf"}')
    write_run(run)
    assert run["config"]["maxent_tau"] == float("inf")
    assert compare.state_of(run) == "done"


def test_overrides_reach_the_scripts_as_they_were_written(tmp_path):
    overrides = {
        "reward_weights": [0.5],
        "system_prompt": """it's "quoted", $HOME = 5""",
        "learning_rate": 1e-5,
        "beta": 0,
        "chat_template": "5",
        "wandb_options": {"name": "5"},
        "zero_stage": 1,
        "gradient_checkpointing": True,
        "maxent_tau": "inf",
    }
    (run,), _ = plan(tmp_path, f"τ_hoch = {overrides!r}")
    assert run["arm"] == "τ_hoch"
    resolved = compare.load_config(run["flags"])
    assert resolved == run["config"]
    for key, value in overrides.items():
        assert resolved[key] == (float("inf") if value == "inf" else value)


# --- what is carried out


@pytest.fixture
def own_signals():
    """A shell's background job and nohup start a process deaf to some of them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in before:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def launched(monkeypatch, own_signals):
    """Runs are made up instead of started: a list of (arm, seed, state) in order. An arm `bad`
    fails; an arm `slow` sleeps."""
    started = []

    def start(run, ranks, locked):
        state = compare.state_of(run)
        started.append((run["arm"], run["seed"], state))
        if run["arm"] == "bad":
            return subprocess.Popen(["false"])
        if run["arm"] == "slow":
            return subprocess.Popen(["sleep", "100"], start_new_session=True)
        if state == "trained":
            write_evaluation(run)
        else:
            shutil.rmtree(run["folder"], ignore_errors=True)
            write_run(run, evaluated=False)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(compare, "start", start)
    return started


@pytest.mark.parametrize("flags, seeds", [([], "--seeds=3"), (["--eval_seeds=1"], "--seeds=1")])
def test_the_last_evaluation_has_as_many_seeds_as_are_asked_for(tmp_path, flags, seeds):
    (run,), _ = plan(tmp_path, "a = {}", *flags)
    write_run(run, evaluated=False)
    command = compare.command_of(run, 1)
    assert str(ROOT / "evaluate.py") in command
    assert seeds in command
    # which evaluate.py would warn about
    assert not any(word.startswith("--seed=") for word in command)


class Busy:
    """A process that is found ended when it is asked for the third time."""

    returncode = 0

    def __init__(self):
        self.left = 3

    def poll(self):
        self.left -= 1
        return None if self.left > 0 else 0


def test_as_many_runs_go_on_at_a_time_as_there_are_jobs(tmp_path, launched, monkeypatch):
    _, argv = plan(tmp_path, "a = {}\nb = {}\nc = {}", "--jobs=2")
    made_up, started, live = compare.start, [], []

    def start(*args):
        made_up(*args).wait()
        started.append(Busy())
        live.append(sum(process.left > 0 for process in started))
        return started[-1]

    monkeypatch.setattr(compare, "start", start)
    compare.main(argv)
    assert len(live) == 6 and max(live) == 2


def test_a_finished_run_with_other_evaluation_seeds_is_not_passed_over(tmp_path, launched):
    (run,), argv = plan(tmp_path, "a = {}")
    write_run(run)
    with pytest.raises(UserError, match=r"has 3 evaluation seed\(s\) instead of --eval_seeds=5"):
        compare.main([*argv, "--eval_seeds=5"])
    assert launched == []


def test_every_run_is_trained_then_evaluated_and_a_finished_one_is_left_alone(tmp_path, launched):
    runs, argv = plan(tmp_path, "a = {}\nb = {}\nc = {}\nd = {}")
    write_run(runs[1])
    write_run(runs[2], evaluated=False)
    write_run(runs[3], evaluated=False)
    (runs[3]["folder"] / "step_000020").rename(runs[3]["folder"] / "step_000010")
    compare.main(argv)
    assert launched == [
        ("a", 1, "new"),
        ("a", 1, "trained"),
        ("c", 1, "trained"),
        ("d", 1, "interrupted"),
        ("d", 1, "trained"),
    ]
    launched.clear()
    compare.main(argv)
    assert launched == []


def test_all_arms_get_one_seed_before_any_gets_two(tmp_path, launched):
    _, argv = plan(tmp_path, "a = {}\nb = {}", seeds=2)
    compare.main(argv)
    new = [(arm, seed) for arm, seed, state in launched if state == "new"]
    assert new == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, launched, capsys):
    _, argv = plan(tmp_path, "a = {}\nbad = {}\nc = {}")
    with pytest.raises(RunStopped, match=r"1 of 3 runs are not finished.*bad/seed_1.log"):
        compare.main(argv)
    assert ("c", 1, "trained") in launched
    assert "bad/seed_1.log" in capsys.readouterr().err
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| c |" in text
    assert "| bad |" not in text
    assert "not in here: bad/seed_1." in text


# a run with evaluations every 10 steps; averaged over three they are .1 .2 .2 .2 .2 from step 20 on
SETTLED = [0.0, 0.1, 0.2, 0.3, 0.1, 0.2, 0.3]


def write_means(run: dict, means: list[float], checkpoint: int) -> None:
    """A run in training with these evaluations, whose newest checkpoint is that of a step."""
    write_run(run, evaluated=False)
    shutil.rmtree(run["folder"] / "step_000020")
    write_checkpoint(run, checkpoint)
    lines = []
    for i, mean in enumerate(means):
        lines.append({"step": 10 * i, "eval/pass@1": mean, f"eval/mean@{K}": mean})
    write_lines(run["folder"] / "metrics.jsonl", lines)


@pytest.mark.parametrize(
    "means, patience, step",
    [
        (SETTLED, 20, 50),  # the record is of step 30
        (SETTLED, 30, 60),
        (SETTLED, 31, None),
        (SETTLED, 0, None),  # off
        (SETTLED[:5], 20, None),  # not yet
        ([0.3, 0.2, 0.1, 0.0, 0.0], 20, 40),  # it falls from the first average on
        ([0.3, 0.3], 10, None),  # too few to average
        ([0.1 * i for i in range(7)], 10, None),  # it rises
        ([], 10, None),
    ],
)
def test_a_run_has_settled_when_its_mean_sets_no_record(tmp_path, means, patience, step):
    (run,), _ = plan(tmp_path, "a = {}", f"--patience={patience}", "--max_steps=100")
    write_means(run, means, 10)
    assert settled_at(run) == step


def test_a_settled_run_is_trained_from_the_checkpoint_at_which_it_settled(tmp_path):
    flags = ["--patience=20", "--max_steps=100"]
    (run,), _ = plan(tmp_path, "a = {}", *flags)
    write_means(run, SETTLED, 40)
    assert compare.state_of(run) == "interrupted"  # killed before it saved
    write_means(run, SETTLED, 51)
    assert compare.state_of(run) == "trained"
    assert f"--model={run['folder'] / 'step_000051'}" in compare.command_of(run, 1)
    (patient,), _ = plan(tmp_path, "a = {}", "--max_steps=100")
    assert compare.state_of(patient) == "interrupted"


def test_a_run_that_settles_is_asked_to_stop_and_is_evaluated(
    tmp_path, launched, monkeypatch, capsys
):
    _, argv = plan(tmp_path, "a = {}", "--patience=20", "--max_steps=100")
    made_up = compare.start
    waits = "while [ ! -e stop ]; do sleep 0.05; done"

    def start(run, ranks, locked):
        if compare.state_of(run) == "trained":
            return made_up(run, ranks, locked)
        write_means(run, SETTLED, 51)
        return subprocess.Popen(["sh", "-c", waits], cwd=run["folder"])

    monkeypatch.setattr(compare, "start", start)
    compare.main(argv)
    assert launched == [("a", 1, "trained")]
    assert "100% 60/60 " in capsys.readouterr().err


def test_a_run_that_ended_early_is_not_taken_for_one_that_did_not(tmp_path, launched):
    (run,), argv = plan(tmp_path, "a = {}", "--patience=20", "--max_steps=100")
    write_means(run, SETTLED, 51)
    write_evaluation(run)
    compare.main(argv)
    assert launched == []
    argv.remove("--patience=20")
    with pytest.raises(UserError, match="ended at step 51, before step 100: give the --patience"):
        compare.main(argv)


def test_a_report_needs_no_model_that_is_gone(tmp_path):
    (run,), argv = plan(tmp_path, 'a = {"maxent_tau": -1.0}')
    write_run(run)
    compare.main([*argv, "--report_only=True"])  # there is no model in tmp_path


def test_an_evaluation_counts_when_the_line_of_its_step_is_followed_by_another(tmp_path):
    (run,), _ = plan(tmp_path, "a = {}", "--patience=20", "--max_steps=100")
    write_means(run, SETTLED, 51)
    stop = run["folder"] / "stop"
    # an evaluation comes after the line of its step: at 50 the one of 40 is the newest
    compare.end_if_settled(run, 49, 50)
    assert not stop.exists()
    compare.end_if_settled(run, 50, 51)
    assert stop.exists()


def test_the_bar_counts_the_steps_that_runs_have_written(tmp_path, launched, capsys):
    (run,), argv = plan(tmp_path, "a = {}")
    assert compare.steps_done(run) == 0
    write_run(run)
    metrics = run["folder"] / "metrics.jsonl"
    all_lines = metrics.read_text()
    metrics.write_text('{"step": 1}\n')
    assert compare.steps_done(run) == 1
    metrics.write_text(all_lines)
    assert compare.steps_done(run) == 20
    with open(metrics, "a") as file:
        file.write('\0\0 \n{"step": 21, "rew')  # damage, and a line that is being written
    assert compare.steps_done(run) == 20
    # only the end is read
    padded = [{"step": step, "text": "x" * 2000} for step in range(100)]
    write_lines(metrics, padded)
    assert compare.steps_done(run) == 99
    shutil.rmtree(run["folder"])
    compare.main(argv)
    assert "100% 20/20 " in capsys.readouterr().err


def test_without_a_run_of_the_baseline_there_is_no_table(tmp_path, launched):
    _, argv = plan(tmp_path, "bad = {}\nb = {}")
    sentence = "1 of 2 runs are finished, none of them of the baseline bad"
    with pytest.raises(RunStopped, match=sentence):
        compare.main(argv)
    assert not (tmp_path / "out" / "results.md").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_what_was_started(tmp_path, launched, number):
    _, argv = plan(tmp_path, "slow = {}\nb = {}\nc = {}", "--jobs=1")

    def kill_what_has_started() -> None:
        end = time.monotonic() + PATIENCE
        while not launched and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=kill_what_has_started).start()
    with pytest.raises(RunStopped, match=f"stopped by {number.name}: the same command goes on"):
        compare.main(argv)
    assert launched == [("slow", 1, "new")]
    command = ["ps", "--ppid", str(os.getpid()), "-o", "args"]
    children = subprocess.run(command, capture_output=True, text=True).stdout
    assert "sleep 100" not in children


def test_a_signal_after_the_runs_ends_the_command(tmp_path, launched, monkeypatch):
    """While the table is made nobody asks any more whether one has come."""
    runs, argv = plan(tmp_path, "a = {}")
    write_run(runs[0])
    handlers = []

    def write(*args) -> str:
        handlers.append(signal.getsignal(signal.SIGTERM))
        return "table"

    monkeypatch.setattr(compare, "write_results", write)
    monkeypatch.setattr(compare, "draw", lambda *args: "picture")
    compare.main(argv)
    assert handlers == [end_now]


def test_two_at_once_in_one_folder_is_refused_but_looking_is_not(tmp_path, launched):
    runs, argv = plan(tmp_path, "a = {}")
    write_run(runs[0])
    with journal.hold_folder(tmp_path / "out"):
        with pytest.raises(UserError, match=rf"process {os.getpid()} on .*--report_only=True"):
            compare.main(argv)
        compare.main([*argv, "--report_only=True"])


# --- what is refused


SHIPPED = sorted(path.name for path in (ROOT / "compare").glob("*arms.py"))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_arms_that_are_shipped_fit_their_config(name):
    others = {"steering_arms.py": "countdown_steered.py", "real_arms.py": "smollm2_between.py"}
    config = others.get(name, "countdown_tiny.py")
    argv = [f"config/{config}", f"--arms=compare/{name}", "--seeds=1", "--output=runs/none"]
    runs = compare.plan_runs(*compare.read_own(argv))
    # no two of them are the same run
    assert len({json.dumps(run["config"] | {"output_dir": ""}) for run in runs}) == len(runs) > 1


@pytest.mark.parametrize(
    "arms, flags, words",
    [
        (None, ["--arms=nowhere.py"], ["nowhere.py", "can't be read"]),
        (None, [], ["--arms=FILE is missing"]),
        ("", [], ["names no arm"]),
        ("a = 5", [], ["arms.py: a must be a dict", "5"]),
        ("a = {5: 1}", [], ["arms.py: a must be a dict"]),
        ("a b = {}", [], ["arms.py:1"]),
        ("a = {}\na = {}", [], ["arms.py:2", "a is set twice"]),
        ('a = {}\nb = {"learning_rat": 1.0}', [], ["arms.py: b", "learning_rat", "learning_rate"]),
        ('a = {}\nb = {"learning_rate": "1e-5"}', [], ["arms.py: b", "learning_rate", "float"]),
        ('a = {}\nb = {"maxent_tau": -2}', [], ["maxent_tau=-2", "(arm b)"]),
        ('a = {"seed": 3}', [], ["--seed=3", "compare itself"]),
        ('a = {}\nb = {"eval_num_generations": 4}', [], ["arms.py: b", "eval_*"]),
        ('a = {}\nb = {"eval_temperature": 0.5}', [], ["arms.py: b", "eval_*"]),
        ('a = {}\nb = {"dataset.config": "3"}', [], ["arms.py: b", "the same held-out rows"]),
        ('a = {}\nb = {"system_prompt": "S"}', ["--long_prompts=drop"], ["arms.py: b"]),
        ('a = {}\nb = {"max_prompt_length": 9}', ["--long_prompts=drop"], ["arms.py: b"]),
        ('a = {}\nb = {"max_prompt_length": 9}', ["--long_prompts=truncate"], ["arms.py: b"]),
        ('a = {}\nb = {"reward_funcs": ["graph_coloring"]}', [], ["arms.py: b", "reward_funcs"]),
        ("a = {}", ["--seeds=0"], ["--seeds=0"]),
        ("a = {}", ["--seeds=abc"], ["seeds", "int", "'abc'"]),
        ("a = {}", ["--seeds", "3"], ["--seeds=3"]),
        ("a = {}", ["--jobs=0"], ["--jobs=0"]),
        ("a = {}", ["--patience=-1"], ["--patience=-1"]),
        ("a = {}", ["--patience=25", "--max_steps=46"], ["before step 50", "max_steps is 46"]),
        ("a = {}", ["--patience=300"], ["--patience=300", "before step 320", "max_steps is 20"]),
        (
            'a = {"checkpoint_mode": "shallow"}',
            ["--patience=10", "--max_steps=100"],
            ["--patience needs checkpoint_mode='full'"],
        ),
        ("a = {}", ["--ranks=True"], ["ranks", "int"]),
        ("a = {}", ["--report_only=1"], ["report_only", "bool"]),
        ("a = {}", ["--seed=3"], ["--seed=3", "compare itself"]),
        ("a = {}", ["--max_step=3"], ["max_step", "max_steps"]),
        ("a = {}", ["--eval_steps=0"], ["a: eval_steps=0", "such as --eval_steps=25"]),
        ('a = {}\nb = {"max_completion_length": 4}', [], ["arms.py: b", "max_completion_length"]),
        (
            'a = {"reward_funcs": ["countdown", "formt"], "reward_weights": [1.0, 0.1]}',
            [],
            ["'formt' is not registered"],
        ),
        ('a = {"prompts_per_step": 3}', ["--ranks=2"], ["prompts_per_step=3", "ranks, 2"]),
        ("a = {}", ["--output=/etc/passwd"], ["'/etc/passwd'", "is a file"]),
    ],
)
def test_what_can_not_work_is_one_sentence_before_any_run_starts(
    tmp_path, monkeypatch, arms, flags, words
):
    monkeypatch.setattr(compare, "carry_out", lambda *args: pytest.fail("runs started"))
    argv = [TINY, f"--output={tmp_path / 'out'}", "--max_steps=20", "--eval_steps=10"]
    if arms is not None:
        file = tmp_path / "arms.py"
        file.write_text(arms)
        argv.append(f"--arms={file}")
    with pytest.raises(UserError) as caught:
        compare.main([*argv, *flags])
    said = str(caught.value)
    for word in words:
        assert word in said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()


def test_exit_status_is_2_for_what_a_user_can_put_right_and_1_for_a_run_that_failed(
    tmp_path, launched, monkeypatch, capfd
):
    _, argv = plan(tmp_path, "a = {}\nbad = {}")
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    for flags in ([], ["--seeds=0"]):
        monkeypatch.setattr(sys, "argv", ["compare", *argv, *flags])
        compare.script(compare.main)
    assert codes == [1, 2]
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "error: --seeds=0 must be at least 1"


# --- for real

ARMS = """
plain = {"objective": "dr_grpo", "system_prompt": "it's here"}
maxent = {"maxent_tau": 0.1, "reward_weights": [0.5]}
"""


def times_of(folder) -> dict:
    """{file: when it was written} of all runs."""
    files = [path for path in folder.glob("*/seed_*/**/*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_two_arms_for_real_then_two_seeds_after_an_interruption(
    tiny_model_dir, tmp_path, own_signals, capsys
):
    flags = [
        "--jobs=2",
        "--rollout_engine=hf",
        "--max_steps=2",
        "--eval_steps=1",
        "--prompts_per_step=2",
        "--num_generations=2",
        "--eval_max_prompts=4",
        "--max_completion_length=8",
        f"--model={tiny_model_dir}",
    ]
    runs, argv = plan(tmp_path, ARMS, *flags)
    compare.main(argv)
    out = tmp_path / "out"
    text = (out / "results.md").read_text()
    assert "4 held-out problems" in text
    assert "| plain | 1 |" in text
    assert "| maxent | mean@8 |" in text
    assert (out / "comparison.png").stat().st_size > 10_000
    for run in runs:
        evaluated = read_lines(run["folder"] / "eval.jsonl")
        assert len(evaluated) == 12  # 4 problems, 3 seeds
        # what take_own_evaluation() relies on
        assert evaluated[:4] == read_lines(run["folder"] / "evaluations" / "step_000002.jsonl")

    # training takes long: second seeds are copies of the first
    for arm in ("plain", "maxent"):
        copy = shutil.copytree(out / arm / "seed_1", out / arm / "seed_2")
        config = (copy / "config.json").read_text()
        (copy / "config.json").write_text(config.replace('"seed": 1', '"seed": 2'))
    cut = out / "maxent" / "seed_1"
    evaluation = (cut / "eval.jsonl").read_text()
    (cut / "eval.jsonl").unlink()
    shutil.rmtree(cut / "step_000002")
    before = times_of(out)
    capsys.readouterr()
    _, argv = plan(tmp_path, ARMS, *flags, seeds=2)
    compare.main(argv)
    assert "4 runs, 1 of them to do" in capsys.readouterr().out
    assert "resumed from" in cut.with_suffix(".log").read_text()
    after = times_of(out)
    changed = [path for path in before if after.get(path) != before[path]]
    assert changed
    assert all(cut in path.parents for path in changed)
    assert (cut / "eval.jsonl").read_text() == evaluation  # continued, it is the same run
    assert "| maxent | 2 |" in (out / "results.md").read_text()
