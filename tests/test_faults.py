"""Faults from outside, each one injected into the real train.py: a full disk, rewards that hang
or raise, Weights & Biases out of reach, a row that can't be read, a clock that runs backwards.
(kill -9, dead ranks, damaged shards: test_checkpoint.py; NaN in a loss: test_train.py.)"""

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import child
import in_child
import pytest
import torch
from deadlines import PATIENCE
from exact_matrix import ROOT, error_of, finish, log_of, start, steps_in
from fake_wandb import WANDB, Service

import checkpoint
import common
import data
import evaluate
import journal
import scoring
import train
from common import RunStopped, UserError
from journal import Timer
from learner import GroupTargets
from policy import ParameterCounts

HF = [
    "--rollout_engine=hf",
    "--replay.size=0",
    "--resample_equal_groups=0",
    "--num_iterations=1",
    "--checkpoint_mode=full",
]


def patched(folder: Path, code: str) -> str:
    """train.py after `code`."""
    lines = [
        "import sys",
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests' / 'helpers')!r}]",
        code,
        "import common, train",
        "train.script(train.main, train.script(common.load_config))",
    ]
    script = folder / "patched_train.py"
    script.write_text("\n".join(lines))
    return str(script)


# --- a full disk


@pytest.fixture
def disk(tmp_path):
    """A disk of 18 MiB: the trial at the start of a run needs 16, a checkpoint of the tiny model
    6.4, so the third one does not fit."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(
            f"no tmpfs can be mounted here ({mounted.stderr.strip()}); test_checkpoint.py fills "
            f"a disk by a limit on file size instead"
        )
    (folder / "run.log").symlink_to(tmp_path / "run.log")  # what the run says needs no room
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_fills_up_in_a_save_stops_the_run_and_with_room_again_it_goes_on(
    disk, tiny_model_dir, tmp_path
):
    folder = disk / "run"
    flags = [*HF, "--save_steps=1"]
    assert child.statuses(in_child.start(tiny_model_dir, folder, *flags)) == [1]
    sentence = error_of(folder)
    assert f"{folder}/step_000003 could not be written" in sentence
    assert "0.0 GiB are free" in sentence
    assert f"go on from {folder}/step_000002 with --resume" in sentence
    assert any((folder / "step_000003.tmp").rglob("*"))  # it had begun
    assert not (folder / "done").exists()
    assert checkpoint.latest(folder).name == "step_000002"
    for path in checkpoint.checkpoints_in(folder):
        assert checkpoint.verify(path) == ""

    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    flags += ["--max_steps=3", "--resume_from_checkpoint=latest"]
    status = child.statuses(in_child.start(tiny_model_dir, folder, *flags))
    assert status == [0], log_of(folder)[-3000:]
    assert "step_000002, 2 steps done" in log_of(folder)
    assert (folder / "done").exists()
    assert checkpoint.latest(folder).name == "step_000003"
    assert [line["step"] for line in steps_in(folder)] == [1, 2, 3]
    assert not list(folder.glob("*.tmp"))


def test_without_a_checkpoint_nobody_is_told_to_resume(tmp_path):
    said = checkpoint.how_to_go_on(tmp_path)
    assert "start again" in said
    assert "resume" not in said


def test_a_disk_without_room_for_the_trial_of_a_checkpoint_is_one_sentence(disk):
    (disk / "other").write_bytes(bytes(8 * 2**20))
    config = common.load_config([f"--output_dir={disk}"])
    with pytest.raises(UserError, match=f"output_dir='{disk}'") as caught:
        checkpoint.forecast(config, ParameterCounts(1000, 1000))
    assert "\n" not in str(caught.value) and not (disk / "trial.tmp").exists()


def write_to_a_full_disk(argv):
    with open("/dev/full", "w") as file:
        file.write("a line of metrics")


def run_training(argv) -> None:
    train.main(common.load_config(argv))


def script(main, *argv) -> None:
    sys.argv = ["train.py", *argv]
    common.script(main)


def run_out_of_memory(argv):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")


def test_memory_that_runs_out_while_a_model_loads_is_one_sentence(tmp_path):
    log = tmp_path / "log"
    assert child.status(child.start(script, run_out_of_memory, log=log)) == 1
    assert log.read_text().splitlines()[-1].startswith("error: memory ran out: CUDA out of memory")
    assert "Traceback" not in log.read_text()


def test_a_disk_that_is_full_when_anything_else_is_written_is_one_sentence_too(tmp_path):
    log = tmp_path / "log"
    assert child.status(child.start(script, write_to_a_full_disk, log=log)) == 1
    sentence = "error: a file of the run could not be written: No space left on device"
    assert log.read_text().splitlines()[-1] == sentence


# --- one run that meets with three of them: rewards that hang, a clock that runs backwards, and
# --- Weights & Biases that goes away

REWARDS = """import time

def hangs(completion, answer, **row):
    if is_stuck(completion):
        time.sleep(1000)
    return float(len(completion) % 2)

def raises(completion, answer, **row):
    # what a run tries a reward with before it starts
    if completion not in ("1", "\\\\boxed{1}"):
        raise ZeroDivisionError("on\\nall of them")
    return 0.0

def is_stuck(completion):
    return sum(map(ord, completion)) % 8 == 0
"""

ROUGH = """
import itertools, time
begin, reads = time.time(), itertools.count()
time.time = lambda: begin - 60 * next(reads)        # a minute earlier each time that somebody looks
time.time_ns = lambda: int(time.time() * 1e9)
import journal, workers
journal.WANDB_FINISH_SECONDS = 2
from hang_clock import Clock
from own_rewards import is_stuck
real = workers.Pool.__init__
def begin_with_a_clock(pool, *args):
    real(pool, *args)
    pool.clock = Clock(pool, is_stuck)
workers.Pool.__init__ = begin_with_a_clock
"""


@pytest.fixture(scope="module")
def own_rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(scope="module")
def rough(own_rewards, tiny_model_dir, tmp_path_factory):
    """Two steps that all of this happens to."""
    folder = tmp_path_factory.mktemp("rough") / "run"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.begun = False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    flags = [
        *HF,
        "--max_steps=2",
        "--reward_funcs=['own_rewards:hangs']",
        "--reward_timeout=3.0",
        "--max_reward_failures=1.0",
        "--log_rollouts_steps=1",
        "--report_to=wandb",
    ]
    env = WANDB | {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}"}
    env["PYTHONPATH"] = str(own_rewards)
    script = patched(folder.parent, ROUGH)
    try:
        process = start(tiny_model_dir, folder, *flags, script=script, **env)
        assert finish(process) == 0, log_of(folder)[-3000:]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert server.begun and (folder / "done").exists()
    assert checkpoint.verify(folder / "step_000002") == ""
    return folder


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(folder: Path) -> list[dict]:
    return json_lines(folder / "metrics.jsonl")


def hangs(completion: str) -> bool:
    """As in REWARDS."""
    return sum(map(ord, completion)) % 8 == 0


def test_rewards_that_hang_are_cut_off_and_counted_and_the_others_stand(rough):
    hung = 0
    for line in lines_of(rough):
        (path,) = (rough / "rollouts").glob(f"step_{line['step']:06d}*")
        rollouts = json_lines(path)
        assert len(rollouts) == 16
        stuck = 0
        for rollout in rollouts:
            completion = rollout["completion"]
            stuck += hangs(completion)
            assert rollout["reward"] == (0 if hangs(completion) else len(completion) % 2)
        assert line["reward/own_rewards:hangs/timeouts"] == stuck
        assert line["reward/own_rewards:hangs/errors"] == 0
        hung += stuck
    assert 0 < hung < 16
    assert "no answer in 3 s (reward_timeout)" in log_of(rough)


def test_a_clock_that_runs_backwards_changes_neither_limits_nor_timings(rough):
    """Were a limit taken from it, the rewards that hang would have hung for ever."""
    lines = lines_of(rough)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        for key, value in line.items():
            if key.startswith("time/"):
                assert 0 <= value < PATIENCE, key
        assert 0 < line["tokens_per_second"] < math.inf
    assert sum(line["time/reward"] for line in lines) > 0.5


def test_a_run_outlives_weights_and_biases_and_keeps_what_it_has_not_handed_in(rough):
    """Its client would go on trying for ever at the end, and the run would never be done."""
    assert "wandb sync" in log_of(rough)
    (kept,) = rough.glob("wandb/run-*/*.wandb")
    assert kept.stat().st_size > 1000


def test_no_file_takes_seconds_from_the_wall_clock():
    """It may be set back at any time. (time.strftime, for a date that a person reads, is fine.)"""
    paths = [*ROOT.glob("*.py")]
    for wing in ("tasks", "server", "compare", "bench"):
        paths += (ROOT / wing).glob("*.py")
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                where = f"{path}:{node.lineno}"
                called = ast.unparse(node)
                assert called not in ("time.time", "time.time_ns", "datetime.now"), where


def test_a_reward_that_raises_on_everything_stops_the_run_with_one_sentence(
    own_rewards, tiny_model_dir, tmp_path
):
    folder = tmp_path / "run"
    flags = [*HF, "--reward_funcs=['own_rewards:raises']"]
    run = in_child.start(tiny_model_dir, folder, *flags, modules=[own_rewards])
    assert child.statuses(run) == [1], log_of(folder)[-3000:]
    for word in ("own_rewards:raises", "16", "max_reward_failures=0.1"):
        assert word in error_of(folder)
    assert not (folder / "done").exists()
    first = json_lines(folder / "reward_failures.rank_0.jsonl")[0]
    assert first["kind"] == "error"
    assert first["reason"] == repr("ZeroDivisionError: on\nall of them (own_rewards.py:11)")


def with_rewards_that_fail_in_step_3() -> None:
    real = scoring.check_failures
    calls = []

    def check(*args):
        calls.append(args)
        if len(calls) == 3:
            raise common.RewardsFailed("too many rewards failed")
        real(*args)

    scoring.check_failures = check


def with_workers_that_do_not_start_on_rank_1() -> None:
    real = scoring.check_failures
    calls = []

    def check(*args):
        calls.append(args)
        if os.environ["RANK"] == "1" and len(calls) == 2:  # there is a step to be saved
            raise common.RunStopped("reward workers don't start")
        real(*args)

    scoring.check_failures = check


def test_what_stops_one_rank_alone_does_not_wait_in_a_save(tiny_model_dir, tmp_path):
    """The others are not there to save with it: it ends, and they find out."""
    folder = tmp_path / "run"
    flags = [*HF, "--max_steps=2", "--save_steps=0"]
    alone = {"patch": with_workers_that_do_not_start_on_rank_1, "ranks": 2}
    run = in_child.start(tiny_model_dir, folder, *flags, **alone)
    assert 0 not in child.statuses(run), log_of(folder)[-3000:]
    assert "reward workers don't start" in log_of(folder)
    assert checkpoint.latest(folder) is None


def test_rewards_that_fail_in_mid_run_stop_it_after_a_save(tiny_model_dir, tmp_path):
    """Two steps are in the checkpoint, and when rewards work again the run goes on from there: also
    with another tau, which nothing steers here."""
    folder = tmp_path / "run"
    flags = [*HF, "--max_steps=4", "--maxent_target_weight_entropy=-1"]
    broken = {"patch": with_rewards_that_fail_in_step_3}
    run = in_child.start(tiny_model_dir, folder, *flags, "--save_steps=0", **broken)
    assert child.statuses(run) == [1], log_of(folder)[-3000:]
    assert "too many rewards failed" in error_of(folder)
    assert checkpoint.latest(folder).name == "step_000002"

    shutil.copytree(folder / "step_000002", folder / "step_000003")  # of another branch
    flags += [f"--resume_from_checkpoint={folder / 'step_000002'}", "--maxent_tau=0.15"]
    run = in_child.start(tiny_model_dir, folder, *flags)
    assert child.statuses(run) == [0], log_of(folder)[-3000:]
    aside = folder / "step_000003.abandoned"
    assert aside.exists() and f"step_000003 is now {aside}" in log_of(folder)
    taus = [(line["step"], line["tau"]) for line in steps_in(folder)]
    assert taus == [(1, 0.2), (2, 0.2), (3, 0.15), (4, 0.15)]


# --- the run's own folder

CONFIG = common.load_config([])


@pytest.mark.parametrize("broken", [b"{'a': 1}", b'{"a": 1}', b"[]", b"\xff", b"[" * 100_000])
def test_a_broken_line_of_metrics_is_left_out_with_a_warning_and_blocks_no_resume(
    broken, tmp_path, capsys
):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 2}\n{"step": 3}\n{"st')
    log = journal.MetricsLog(tmp_path, CONFIG, 2)
    log.write(3, {"reward": 1.0})
    log.close()
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2]["reward"] == 1.0
    assert f"{path}: unreadable lines are left out: 2\n" in capsys.readouterr().out


def test_what_came_after_the_checkpoint_leaves_the_folder_with_its_metrics(tmp_path):
    """Also files of ranks that the run that goes on does not have."""
    (tmp_path / "rollouts").mkdir()
    for step in (2, 3):
        for rank in (0, 1):
            (tmp_path / "rollouts" / f"step_{step:06d}.rank_{rank}.jsonl").touch()
    (tmp_path / "rollouts" / "step_of_mine.jsonl").touch()
    failures = tmp_path / "reward_failures.rank_1.jsonl"
    failures.write_text('{"step": 2, "id": "a"}\n{"step": 3, "id": "b"}\n')
    log = journal.MetricsLog(tmp_path, CONFIG, 3)
    for step in (2, 3):
        log.write_evaluation(step, [{"id": "a", "correct": step}, {"id": "b", "correct": 0}])
    log.close()
    journal.MetricsLog(tmp_path, CONFIG, 2).close()
    (evaluation,) = (tmp_path / "evaluations").iterdir()
    assert evaluation.name == "step_000002.jsonl"
    assert evaluation.read_text() == '{"id": "a", "correct": 2}\n{"id": "b", "correct": 0}\n'
    left = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert left == ["step_000002.rank_0.jsonl", "step_000002.rank_1.jsonl", "step_of_mine.jsonl"]
    assert failures.read_text() == '{"step": 2, "id": "a"}\n'


def test_a_run_notices_that_its_folder_is_deleted_renamed_or_replaced(tmp_path):
    folder = tmp_path / "run"
    for spoil in (shutil.rmtree, lambda path: path.rename(tmp_path / "other")):
        folder.mkdir()
        log = journal.MetricsLog(folder, CONFIG, 0)
        assert not log.lost()
        spoil(folder)
        assert log.lost()
        folder.mkdir()  # the same name, even the same inode if it were free
        assert log.lost()
        log.close()
        folder.rmdir()


def test_a_run_whose_folder_is_renamed_ends_on_all_ranks_with_a_sentence(tiny_model_dir, tmp_path):
    """Every rank writes its rollouts into it in every step."""
    folder, moved = tmp_path / "run", tmp_path / "moved"
    flags = [*HF, "--max_steps=400", "--save_steps=1", "--log_rollouts_steps=1"]
    run = in_child.start(tiny_model_dir, folder, *flags, ranks=2)
    deadline = time.monotonic() + PATIENCE
    while not (folder / "step_000001").exists():
        ended = any(rank.exitcode is not None for rank in run)
        assert time.monotonic() < deadline and not ended, log_of(folder)[-3000:]
        time.sleep(0.05)
    folder.rename(moved)
    assert child.statuses(run) == [1, 1] and not folder.exists()
    said = log_of(folder)
    assert f"error: output_dir='{folder}' is gone" in said
    assert "train.py" not in "".join(re.findall(r'File "(.*)", line', said)), said[-3000:]
    assert checkpoint.latest(moved)


def test_a_folder_that_goes_just_before_the_rollouts_are_written_is_told_of_alike(tmp_path):
    run = SimpleNamespace(
        config={"num_generations": 4, "log_rollouts_steps": 1, "max_steps": 9},
        log=None,
        inputs=SimpleNamespace(reward_functions=[]),
        folder=tmp_path / "gone",
        step=5,
    )
    with pytest.raises(RunStopped, match="gone' is gone or another folder now"):
        empty = torch.zeros(2, 4, 0)
        collected = SimpleNamespace(
            rank=1, local_rewards=torch.zeros(2, 4), rewards_per_func=empty, right=empty
        )
        active = torch.zeros(2, dtype=torch.bool)
        train.show_rollouts(run, collected, GroupTargets(torch.zeros(2, 4), active))


def test_so_is_one_that_goes_just_before_an_evaluation_is_written(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    log = journal.MetricsLog(tmp_path / "gone", CONFIG, 0)
    shutil.rmtree(tmp_path / "gone")
    record = {"id": "a", "samples": 8, "correct": 2, "failures": 0, "distinct": None}
    monkeypatch.setattr(evaluate, "evaluate", lambda *given: [record | {"num_modes": None}])
    run = SimpleNamespace(config=CONFIG, log=log, folder=tmp_path / "gone", step=5, timer=Timer())
    run.inputs = SimpleNamespace(eval_rows=[{}])
    run.sampler = run.world = None
    with pytest.raises(RunStopped, match="gone' is gone or another folder now"):
        train.evaluate_now(run)
    log.close()


# --- a row that can't be read


ROWS = """{"prompt": "1", "answer": "1"}

{"prompt": "2", "answer":
{"prompt": "3", "answer": "3"}
"""


def test_a_dataset_row_that_can_not_be_read_is_named_by_file_and_line_before_anything_is_loaded(
    tiny_model_dir, tmp_path
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)
    words = [
        str(ROOT / "config" / "countdown_tiny.py"),
        f"--model={tiny_model_dir}",
        f"--dataset.name={rows}",
        "--dataset.config=",
        f"--output_dir={tmp_path / 'run'}",
    ]
    log = tmp_path / "log"
    assert child.status(child.start(script, run_training, *words, log=log)) == 2
    (error,) = re.findall("error: .*", log.read_text())
    assert error.startswith(f"error: {rows}:3: not JSON")
    assert "world_size" not in log.read_text()  # the ranks have not met yet
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "line",
    ["1" * 5000, "[" * 100_000, "{'a': 1}", "NaN,"],
    ids=["digits", "brackets", "quotes", "comma"],
)
def test_a_line_that_no_reader_takes_is_named_too(line, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2", "answer": ' + line + "}\n")
    with pytest.raises(UserError, match=f"{rows}:2: not JSON"):
        data.read_jsonl(str(rows))


def test_a_line_that_is_not_text_is_named_too(tmp_path):
    """Far into the file: decoding runs ahead of the lines."""
    rows = tmp_path / "rows.jsonl"
    good = b'{"prompt": "1", "answer": "1"}\n'
    rows.write_bytes(good * 1000 + b'{"prompt": "\xff\xfe", "answer": "1"}\n' + good * 1000)
    with pytest.raises(UserError, match=f"{rows}:1001: not UTF-8"):
        data.read_jsonl(str(rows))
