"""Faults from outside, each one injected into the real train.py: a full disk, rewards that hang or raise, Weights & Biases out of reach, a row that can't
be read, a clock that runs backwards. (kill -9, dead ranks, damaged shards: test_resume.py; NaN in a loss: test_train.py.)"""

import ast
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import child
import pytest
import torch
from exact_matrix import ROOT, finish, log_of, start, steps_in

import checkpoint
import common
import data
import journal
import ranks
import train
from common import UserError, escaped, quoted

HF = [
    "--rollout_engine=hf",
    "--replay.size=0",
    "--resample_equal_groups=0",
    "--num_iterations=1",
    "--checkpoint_mode=full",
]


def error_of(folder: Path) -> str:
    """The one sentence, on one line, that a run has ended with."""
    log = log_of(folder)
    errors = re.findall("error: .*", log)  # behind the progress bar, which ends without a newline
    assert len(errors) == 1 and log.endswith(errors[0] + "\n") and "Traceback" not in log, log[
        -3000:
    ]
    return errors[0]


def patched(folder: Path, code: str) -> str:
    """train.py after `code`."""
    script = folder / "patched_train.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\nimport common, train\ntrain.script(train.main, train.script(common.load_config))\n"
    )
    return str(script)


# --- a full disk


@pytest.fixture
def disk(tmp_path):
    """A disk of 18 MiB: the trial at the start of a run needs 16, a checkpoint of the tiny model 6.4, so the third one does not fit."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(
            f"no tmpfs can be mounted here ({mounted.stderr.strip()}); test_resume.py fills a disk by a limit on file size instead"
        )
    (folder / "run.log").symlink_to(tmp_path / "run.log")  # what the run says needs no room
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_fills_up_in_a_save_stops_the_run_and_with_room_again_it_goes_on(
    disk, tiny_model_dir, tmp_path
):
    folder = disk / "run"
    flags = [*HF, "--save_steps=1"]
    assert finish(start(tiny_model_dir, folder, *flags)) == 1
    sentence = error_of(folder)
    assert (
        f"{folder}/step_000003 could not be written" in sentence
        and "0.0 GiB are free" in sentence
        and f"{folder}/step_000002, go on" in sentence
    )
    assert (
        any((folder / "step_000003.tmp").rglob("*")) and not (folder / "done").exists()
    )  # it had begun
    assert checkpoint.latest(folder).name == "step_000002" and all(
        checkpoint.verify(path) == "" for path in checkpoint.steps_of(folder)
    )

    resume = [*flags, "--max_steps=3", "--resume_from_checkpoint=latest"]
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    assert finish(start(tiny_model_dir, folder, *resume)) == 0, log_of(folder)[-3000:]
    assert (
        "step_000002, 2 steps done" in log_of(folder)
        and (folder / "done").exists()
        and checkpoint.latest(folder).name == "step_000003"
    )
    assert [line["step"] for line in steps_in(folder)] == [1, 2, 3] and not list(
        folder.glob("*.tmp")
    )


def test_a_disk_without_room_for_the_trial_of_a_checkpoint_is_one_sentence(disk):
    (disk / "other").write_bytes(bytes(8 * 2**20))
    with pytest.raises(UserError, match=f"output_dir='{disk}'") as caught:
        checkpoint.report(
            disk,
            1000,
            torch.float32,
            {"save_steps": 1, "checkpoint_mode": "full", "save_total_limit": 0, "keep_every": 0},
        )
    assert "\n" not in str(caught.value) and not (disk / "trial.tmp").exists()


def write_to_a_full_disk(argv):
    with open("/dev/full", "w") as file:
        file.write("a line of metrics")


def run_training(argv) -> None:
    train.main(common.load_config(argv))


def script(main, *argv) -> None:
    sys.argv = ["train.py", *argv]
    common.script(main)


def test_a_disk_that_is_full_when_anything_else_is_written_is_one_sentence_too(tmp_path):
    assert child.status(child.start(script, write_to_a_full_disk, log=tmp_path / "log")) == 1
    assert (tmp_path / "log").read_text().splitlines()[
        -1
    ] == "error: a file of the run could not be written: No space left on device"


# --- one run that meets with three of them: rewards that hang, a clock that runs backwards, Weights & Biases that goes away

REWARDS = """import time

def hangs(completion, answer, **row):
    if sum(map(ord, completion)) % 8 == 0:
        time.sleep(1000)
    return float(len(completion) % 2)

def raises(completion, answer, **row):
    if completion not in ("1", "\\\\boxed{1}"):      # what a run tries a reward with before it starts
        raise ZeroDivisionError("on\\nall of them")
    return 0.0
"""

ROUGH = """
import itertools, time
begin, reads = time.time(), itertools.count()
time.time = lambda: begin - 60 * next(reads)        # a minute earlier each time that somebody looks
time.time_ns = lambda: int(time.time() * 1e9)
import journal
journal.WANDB_FINISH_SECONDS = 2
"""

# the client asks again and again for 90 seconds: here only once
WANDB = {
    "WANDB_API_KEY": "a" * 40,
    "WANDB__GRAPHQL_RETRY_MAX": "1",
    "WANDB__GRAPHQL_RETRY_WAIT_MIN_SECONDS": "0.1",
    "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "0.1",
    "WANDB_ERROR_REPORTING": "false",
}


class Wandb(BaseHTTPRequestHandler):
    """As much of the service as a run needs to begin; then it is gone."""

    def do_POST(self):
        query = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode(
            "utf-8", "replace"
        )
        begins = "upsertBucket" in query
        bucket = {
            "id": "run",
            "name": "run",
            "displayName": "run",
            "project": {"name": "maxent-grpo", "entity": {"name": "we"}},
        }
        answer = (
            {"upsertBucket": {"bucket": bucket, "inserted": True}}
            if begins
            else {"viewer": {"id": "me", "entity": "we", "flags": "{}", "teams": {"edges": []}}}
        )
        body = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if begins:
            self.server.begun = True
            threading.Thread(
                target=lambda: (self.server.shutdown(), self.server.server_close())
            ).start()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def own_rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_rewards.py").write_text(REWARDS)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def rough(own_rewards, tiny_model_dir, tmp_path_factory):
    """Two steps that all of this happens to."""
    folder, server = (
        tmp_path_factory.mktemp("rough") / "run",
        ThreadingHTTPServer(("127.0.0.1", 0), Wandb),
    )
    server.begun = False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        process = start(
            tiny_model_dir,
            folder,
            *HF,
            "--max_steps=2",
            "--reward_funcs=['own_rewards:hangs']",
            "--reward_timeout=3.0",
            "--max_reward_failures=1.0",
            "--log_rollouts_steps=1",
            "--report_to=wandb",
            script=patched(folder.parent, ROUGH),
            **own_rewards,
            **WANDB,
            WANDB_BASE_URL=f"http://127.0.0.1:{server.server_port}",
        )
        assert finish(process, 120) == 0, log_of(folder)[-3000:]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (
        server.begun
        and (folder / "done").exists()
        and checkpoint.verify(folder / "step_000002") == ""
    )
    return folder


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rewards_that_hang_are_cut_off_and_counted_and_the_others_stand(rough):
    hung = 0
    for line in lines_of(rough):
        rollouts = [
            json.loads(text)
            for path in (rough / "rollouts").glob(f"step_{line['step']:06d}*")
            for text in path.read_text().splitlines()
        ]
        stuck = [r for r in rollouts if sum(map(ord, r["completion"])) % 8 == 0]
        assert len(rollouts) == 16 and all(
            r["reward"] == (0 if r in stuck else len(r["completion"]) % 2) for r in rollouts
        )
        assert (
            line["reward/own_rewards:hangs/timeouts"] == len(stuck)
            and line["reward/own_rewards:hangs/errors"] == 0
        )
        hung += len(stuck)
    assert 0 < hung < 16 and "no answer in 3 s (reward_timeout)" in log_of(rough)


def test_a_clock_that_runs_backwards_changes_neither_limits_nor_timings(rough):
    """Were a limit taken from it, the rewards that hang would have hung for ever."""
    lines = lines_of(rough)
    assert [line["step"] for line in lines] == [1, 2] and all(
        0 <= value < 120 for line in lines for key, value in line.items() if key.startswith("time/")
    )
    assert (
        all(0 < line["tokens_per_second"] < math.inf for line in lines)
        and sum(line["time/reward"] for line in lines) > 0.5
    )


def test_a_run_outlives_weights_and_biases_and_keeps_what_it_has_not_handed_in(rough):
    """Its client would go on trying for ever at the end, and the run would never be done."""
    assert (
        "wandb sync" in log_of(rough)
        and next(rough.glob("wandb/run-*/*.wandb")).stat().st_size > 1000
    )


def test_no_file_takes_seconds_from_the_wall_clock():
    """It may be set back at any time. (time.strftime, for a date that a person reads, is fine.)"""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("", "tasks", "slurm")
        for path in sorted((ROOT / folder).glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now")
    ]
    assert not found, found


def test_a_reward_that_raises_on_everything_stops_the_run_with_one_sentence(
    own_rewards, tiny_model_dir, tmp_path
):
    folder = tmp_path / "run"
    assert (
        finish(
            start(
                tiny_model_dir, folder, *HF, "--reward_funcs=['own_rewards:raises']", **own_rewards
            )
        )
        == 1
    ), log_of(folder)[-3000:]
    assert (
        all(
            word in error_of(folder)
            for word in ("own_rewards:raises", "16", "max_reward_failures=0.1")
        )
        and not (folder / "done").exists()
    )
    record = json.loads((folder / "reward_failures.rank_0.jsonl").read_text().splitlines()[0])
    assert record["kind"] == "error" and record["reason"] == repr(
        "ZeroDivisionError: on\nall of them"
    )


def test_rewards_that_fail_in_mid_run_stop_it_after_a_save(own_rewards, tiny_model_dir, tmp_path):
    """Two steps are in the checkpoint, and when rewards work again the run goes on from there: also with another tau, which nothing steers here."""
    flags = [*HF, "--max_steps=4", "--maxent_target_weight_entropy=-1"]
    folder, broken = (
        tmp_path / "run",
        patched(
            tmp_path,
            """
import scoring
real, calls = scoring.check_failures, []
def check(*args):
    calls.append(args)
    if len(calls) == 3:
        raise rewards.RunStopped("too many rewards failed")
    real(*args)
scoring.check_failures = check
""",
        ),
    )
    assert finish(start(tiny_model_dir, folder, *flags, "--save_steps=0", script=broken)) == 1, (
        log_of(folder)[-3000:]
    )
    assert (
        "too many rewards failed" in error_of(folder)
        and checkpoint.latest(folder).name == "step_000002"
    )
    shutil.copytree(folder / "step_000002", folder / "step_000003")  # of another branch
    again = [f"--resume_from_checkpoint={folder / 'step_000002'}", "--maxent_tau=0.15"]
    assert finish(start(tiny_model_dir, folder, *flags, *again)) == 0, log_of(folder)[-3000:]
    assert (
        folder / "step_000003.abandoned"
    ).exists() and f"step_000003 is now {folder / 'step_000003.abandoned'}" in log_of(folder)
    assert [(line["step"], line["tau"]) for line in steps_in(folder)] == [
        (1, 0.2),
        (2, 0.2),
        (3, 0.15),
        (4, 0.15),
    ]


# --- the run's own folder

METRICS = {"report_to": ""}


@pytest.mark.parametrize("broken", [b"{'a': 1}", b'{"a": 1}', b"[]", b"\xff", b"[" * 100_000])
def test_a_broken_line_of_metrics_is_left_out_with_a_warning_and_blocks_no_resume(
    broken, tmp_path, capsys
):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 2}\n{"step": 3}\n{"st')
    log = journal.MetricsLog(tmp_path, METRICS, 2)
    log.write(3, {"reward": 1.0})
    log.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3] and lines_of(tmp_path)[2][
        "reward"
    ]
    assert f"{path}: what can't be read is left out: line 2\n" in capsys.readouterr().out


def test_a_run_notices_that_its_folder_is_deleted_renamed_or_replaced(tmp_path):
    folder = tmp_path / "run"
    for spoil in (shutil.rmtree, lambda path: path.rename(tmp_path / "other")):
        folder.mkdir()
        log = journal.MetricsLog(folder, METRICS, 0)
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
    process = start(tiny_model_dir, folder, *flags, ranks=2)
    deadline = time.monotonic() + 240
    while not (folder / "step_000001").exists():
        assert time.monotonic() < deadline and process.poll() is None, log_of(folder)[-3000:]
        time.sleep(0.05)
    folder.rename(moved)
    assert finish(process) == 1 and not folder.exists()
    said = log_of(folder)
    assert f"error: output_dir='{folder}' is gone" in said
    assert "train.py" not in "".join(re.findall(r'File "(.*)", line', said)), said[-3000:]
    assert checkpoint.latest(moved)


# --- Weights & Biases


def log_to_nobody(folder: Path) -> None:
    os.environ.update(
        WANDB, WANDB_INIT_TIMEOUT="1", WANDB_BASE_URL="http://127.0.0.1:9"
    )  # the discard port: closed
    settings = {
        "report_to": "wandb",
        "wandb_project": "p",
        "wandb_name": "",
        "wandb_mode": "online",
    }
    common.script(lambda argv: journal.MetricsLog(folder, settings, 0))


def test_weights_and_biases_out_of_reach_at_the_start_is_one_sentence_that_names_the_cure(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    assert child.status(child.start(log_to_nobody, folder, log=Path(f"{folder}.log"))) == 2, log_of(
        folder
    )[-3000:]
    assert all(
        word in error_of(folder)
        for word in ("report_to='wandb'", "127.0.0.1:9", "--wandb_options.mode=offline")
    )


def log_to_a_project_that_can_not_be(folder: Path) -> None:
    os.environ.update(WANDB)
    settings = {
        "report_to": "wandb",
        "wandb_project": "a/project",
        "wandb_name": "",
        "wandb_mode": "offline",
    }
    common.script(lambda argv: journal.MetricsLog(folder, settings, 0))


def test_a_project_that_can_not_be_is_not_told_to_go_offline_where_it_is(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    process = child.start(log_to_a_project_that_can_not_be, folder, log=Path(f"{folder}.log"))
    assert child.status(process) == 2, log_of(folder)[-3000:]
    error = error_of(folder)
    assert "wandb_project='a/project'" in error and "correct wandb_project" in error
    assert "--wandb_options.mode=offline" not in error


def log_to_a_service_that_dies(folder: Path) -> None:
    log = journal.MetricsLog(
        folder,
        {"report_to": "wandb", "wandb_project": "p", "wandb_name": "", "wandb_mode": "offline"},
        0,
    )
    log.write(1, {"reward": 1.0})
    (service,) = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True, timeout=120
    ).stdout.split()
    os.kill(int(service), signal.SIGKILL)
    for step in range(2, 20):
        log.write(step, {"reward": 1.0})
        time.sleep(0.05)
    log.close()


def test_a_run_keeps_its_id_at_weights_and_biases_when_it_is_resumed(tmp_path):
    for folder in ("run", "run", "other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        log = journal.MetricsLog(
            tmp_path / folder,
            {"report_to": "wandb", "wandb_project": "p", "wandb_name": "", "wandb_mode": "offline"},
            0,
        )
        assert log.wandb.id == (tmp_path / folder / "wandb_id").read_text()
        log.close()
    assert (tmp_path / "run" / "wandb_id").read_text() != (
        tmp_path / "other" / "wandb_id"
    ).read_text()


def test_a_service_of_weights_and_biases_that_is_killed_takes_nothing_with_it(tmp_path):
    assert (
        child.status(child.start(log_to_a_service_that_dies, tmp_path, log=tmp_path / "log")) == 0
        and len(steps_in(tmp_path)) == 19
    )
    assert (tmp_path / "log").read_text().count("warning: Weights & Biases is gone") == 1


# --- a row that can't be read


def test_a_dataset_row_that_can_not_be_read_is_named_by_file_and_line_before_anything_is_loaded(
    tiny_model_dir, tmp_path
):
    rows, model = tmp_path / "rows.jsonl", shutil.copytree(tiny_model_dir, tmp_path / "model")
    rows.write_text(
        '{"prompt": "1", "answer": "1"}\n\n{"prompt": "2", "answer": \n{"prompt": "3", "answer": "3"}\n'
    )
    (model / "model.safetensors").unlink()  # it would fail if it came to that
    words = [
        str(ROOT / "config" / "countdown_tiny.py"),
        f"--model={model}",
        f"--dataset.name={rows}",
        "--dataset.config=",
        f"--output_dir={tmp_path / 'run'}",
    ]
    assert child.status(child.start(script, run_training, *words, log=tmp_path / "log")) == 2
    assert (
        re.findall("error: .*", (tmp_path / "log").read_text())[0].startswith(
            f"error: {rows}:3: not JSON"
        )
        and not (tmp_path / "run").exists()
    )


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


# --- ranks that were started by hand, one of which does not come


def meet(rank: int, environment: dict, seconds: float) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    ranks.MEETING_SECONDS = seconds
    common.script(lambda argv: print(ranks.start_distributed()[:2]), ())


@pytest.fixture
def environment():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize(
    "come, missing",
    [([0], "missing are: 1, 2"), ([1], "rank 0 is not there"), ([0, 2], "missing are: 1")],
)
def test_a_rank_that_does_not_come_is_named_by_those_who_wait(come, missing, environment, tmp_path):
    """Under torchrun it would be noticed. In a run they wait 45 seconds."""
    logs = {rank: tmp_path / str(rank) for rank in come}
    children = [child.start(meet, rank, environment, 3, log=logs[rank]) for rank in come]
    assert [child.status(process, 120) for process in children] == [1] * len(come)
    first = logs[come[0]].read_text()
    assert f"error: rank {come[0]} of 3 waits at 127.0.0.1:{environment['MASTER_PORT']}" in first
    assert missing in first and "3 s" in first
    for log in logs.values():
        assert log.read_text().count("error: ") == 1 and "Traceback" not in log.read_text()


def test_ranks_that_come_one_after_the_other_meet(environment, tmp_path):
    logs = [tmp_path / str(rank) for rank in range(3)]
    children = [child.start(meet, rank, environment, 60, log=logs[rank]) for rank in (2, 0, 1)]
    assert [child.status(process, 120) for process in children] == [0] * 3
    for rank in range(3):
        assert f"({rank}, 3)" in logs[rank].read_text()


def test_a_rank_that_does_not_know_its_place_is_one_sentence(environment, tmp_path):
    del environment["WORLD_SIZE"]
    environment["MASTER_PORT"] = "80000"
    log = tmp_path / "log"
    assert child.status(child.start(meet, 0, environment, 3, log=log)) == 2
    assert "without a usable WORLD_SIZE, MASTER_PORT: " in log.read_text()


# --- what strangers say


def say_on_the_way_out(argv):
    raise UserError("row \x1b[2J\nerror: forged \u202e \ud800 is odd")


def test_what_strangers_say_is_one_harmless_line(tmp_path):
    """Nothing of it steers the terminal or looks like a line of ours: quoted in a sentence, and
    escaped once more where a script ends."""
    assert quoted("a\x1b[2J\nb\u202e\ud800") == r"'a\x1b[2J\nb\u202e\ud800'"
    assert quoted("it's") == '"it\'s"' and quoted(7) == "'7'"
    assert quoted("x" * 300) == f"'{'x' * 200}'..." and quoted("abc", 2) == "'ab'..."
    assert escaped("plain \u00fc") == "plain \u00fc"
    ended = child.start(script, say_on_the_way_out, log=tmp_path / "log")
    assert child.status(ended) == 2
    line = (tmp_path / "log").read_text().splitlines()[-1]
    assert line == r"error: row \x1b[2J\nerror: forged \u202e \ud800 is odd"
