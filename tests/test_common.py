"""The words of strangers in sentences of ours, output that nobody reads, and how threads wait."""

import errno
import os
import re
import subprocess
import sys
import tempfile

import child
import pytest
import torch
from deadlines import PATIENCE
from exact_matrix import ROOT

import common
import ranks
from common import (
    RunStopped,
    UserError,
    choose_waiting,
    die,
    in_one_line,
    launched_rank,
    launched_ranks,
    quoted,
    running_elsewhere,
    script,
)


def say_on_the_way_out(argv, kind=UserError):
    raise kind("row \x1b[2J\nerror: forged \u202e \ud800 is odd")


def test_what_strangers_say_is_one_harmless_line(tmp_path):
    """Nothing of it steers the terminal or looks like a line of ours."""
    assert quoted("a\x1b[2J\nb\u202e\ud800") == r"'a\x1b[2J\nb\u202e\ud800'"
    assert quoted("it's") == '"it\'s"' and quoted(7) == "7" and quoted(OSError("a\n")) == r"'a\n'"
    assert quoted("x" * 300) == f"'{'x' * 200}'..." and quoted("abc", 2) == "'ab'..."
    assert in_one_line("plain \u00fc") == "plain \u00fc" and in_one_line("a\nb\x1b") == r"a b\x1b"
    assert in_one_line("x" * 9, 6) == "xxx..." and in_one_line("x" * 6, 6) == "x" * 6
    for kind, status in ((UserError, 2), (RunStopped, 1)):
        log = tmp_path / kind.__name__
        ended = child.start(script, say_on_the_way_out, [], kind, log=log)
        assert child.status(ended) == status, log.read_text()
        line = log.read_text().splitlines()[-1]
        assert line == r"error: row \x1b[2J error: forged \u202e \ud800 is odd"


# as torch words them, in three lines
NCCL_ERROR = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.29.7"
    "\n{}\nLast error:\n{}"
)
SHM_FULL = "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"


@pytest.mark.parametrize(
    "error, said, unsaid",
    [
        (
            NCCL_ERROR.format("unhandled system error", "ncclSystemError: a call failed", SHM_FULL),
            f"NCCL, by which .*, has failed: .* {re.escape(SHM_FULL)}; .* --ipc=host",
            "another rank",
        ),
        (
            NCCL_ERROR.format("remote process exited", "ncclRemoteError: a call failed", "refused"),
            "another rank has died or left .* remote process exited, NCCL version",
            "refused",
        ),
        (
            NCCL_ERROR.format("invalid usage", "ncclInvalidUsage: a call failed", "Duplicate GPU"),
            "NCCL, .* has failed: .* Duplicate GPU",
            "--ipc",
        ),
        ("[gloo/pair.cc:553] Connection closed by peer\nx", "another rank has died", "has failed"),
    ],
)
def test_what_ails_nccl_on_this_rank_is_not_laid_on_another(monkeypatch, error, said, unsaid):
    """In a container with a small /dev/shm every rank of several GPUs fails at the first collective
    like this, and none has died."""
    told = []
    monkeypatch.setattr(common, "die", lambda sentence, status: told.append(sentence))

    def work(argv) -> None:
        raise torch.distributed.DistBackendError(error)

    script(work, [])
    assert re.search(said, told[0]) and unsaid not in told[0] and "\n" not in told[0]


def test_a_rank_that_is_no_number_is_a_sentence(monkeypatch):
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(UserError, match="the environment has RANK='x', which must be a number"):
        launched_rank()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(UserError, match="has WORLD_SIZE='0', which must be a number from 1 on"):
        launched_ranks()


def test_what_another_job_has_left_in_the_shell_makes_no_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    monkeypatch.setenv("RANK", "0")
    assert launched_ranks() == 8
    monkeypatch.delenv("RANK")
    assert launched_ranks() == 1
    assert common.from_launcher("LOCAL_WORLD_SIZE", 1) == 1
    # nor when it has got a rank of its own, 0
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"})
    ranks.be_alone()
    assert launched_ranks() == common.from_launcher("LOCAL_WORLD_SIZE", 1) == 1


def test_what_is_compiled_has_a_place_also_without_a_home(tmp_path, monkeypatch):
    """As for the user of a container: a home that can't be made, or none at all."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    environment = {}
    common.place_caches(environment)
    assert environment == {}
    (tmp_path / "home").touch()
    common.place_caches(environment)
    own = f"{tempfile.gettempdir()}/compiled-{os.getuid()}"
    elsewhere = {"VLLM_CACHE_ROOT": f"{own}/vllm", "TRITON_CACHE_DIR": f"{own}/triton"}
    assert environment == elsewhere
    environment = {"XDG_CACHE_HOME": str(tmp_path), "TRITON_CACHE_DIR": "/mine"}
    common.place_caches(environment)
    assert "VLLM_CACHE_ROOT" not in environment and environment["TRITON_CACHE_DIR"] == "/mine"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    environment = {}
    common.place_caches(environment)
    assert environment == elsewhere


@pytest.mark.parametrize(
    "words",
    [
        ["--seed=1", "--seed=2"],
        ["runs/lr=1/step_1", "runs/lr=1_hf"],
        ["--top_p=.9", "--top_k=3"],  # the same sentence refuses both, but they are two keys
    ],
)
def test_only_a_flag_is_overridden_by_a_later_one(words, capsys):
    common.print_overridden(["export", *words])
    said = capsys.readouterr().err
    told = "--seed=1 is not used: --seed=2 comes after it\n"
    assert said == (told if "--seed=1" in words else "")


@pytest.mark.parametrize("where, said", [("stdout", "has ended"), ("another", "BrokenPipeError")])
def test_only_a_reader_of_the_output_that_has_gone_is_told_in_a_sentence(where, said):
    """As `python -m compare.frontier ... | head` does; any other broken pipe is an error."""
    reading, writing = os.pipe()
    os.close(reading)
    work = "lambda argv: print('x' * 99_999, flush=True)"
    if where == "another":
        work = f"lambda argv: os.write({writing}, b'x')"
    code = f"import os; from common import script; script({work})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=writing if where == "stdout" else subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[writing],
        text=True,
        timeout=PATIENCE,
    )
    os.close(writing)
    assert done.returncode == 1
    assert said in done.stderr
    assert ("Traceback" in done.stderr) == (where == "another")


def test_a_prompt_that_the_output_has_no_signs_for_ends_nothing():
    done = subprocess.run(
        [sys.executable, "-c", "from common import script; script(lambda argv: print('\\u6570'))"],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, rb"\u6570" + b"\n"), done.stderr


@pytest.mark.parametrize("streams", ["0", "1", "2", "0 1 2"])
def test_a_script_that_is_started_without_a_stream_runs_and_gives_its_number_to_no_file(streams):
    """As from a daemon, or with `>&-`."""
    work = "lambda argv: (print('τ'), print('τ', file=sys.stderr), sys.stdin.read(), first())"
    code = (
        "import os, sys; from common import script\n"
        "def first():\n"
        "    with open(os.devnull) as file: sys.exit(0 if file.fileno() > 2 else 9)\n"
        f"script({work})"
    )
    closed = " ".join(f"{number}>&-" for number in streams.split())
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("where", ["a closed pipe", "a full disk"])
def test_an_error_is_said_also_where_the_output_can_not_be_written(where):
    work = "def work(argv):\n    print('a line')\n    raise UserError('row 7 is odd')"
    code = f"from common import UserError, script\n{work}\nscript(work)"
    reading, output = os.pipe()
    os.close(reading)
    if where == "a full disk":
        os.close(output)
        output = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
    )
    os.close(output)
    assert (done.returncode, done.stderr) == (2, "error: row 7 is odd\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_disk_or_a_file_server_that_fails_is_a_sentence(number, monkeypatch, capfd):
    def work(argv):
        raise OSError(number, os.strerror(number), "runs/a/metrics.jsonl")

    monkeypatch.setattr(os, "_exit", lambda status: sys.exit(status))
    for name in ("listen", "end_with_torchrun", "set_up_libraries"):
        monkeypatch.setattr(common, name, lambda *arguments: None)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match="1"):
        script(work)
    said = capfd.readouterr().err
    done = "used" if number in (errno.EIO, errno.ESTALE) else "written"
    reason = os.strerror(number)
    assert said == f"error: runs/a/metrics.jsonl could not be {done}: {reason}\n"


@pytest.mark.parametrize("length", [1000, 1_000_000])
def test_an_error_about_a_name_of_a_megabyte_is_cut_in_the_middle(length, monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", lambda status: None)
    die(f"there is no column {'x' * length}; it has a and b", 2)
    said = capfd.readouterr().err
    assert said.startswith("error: there is no column xxx")
    assert said.endswith("xxx; it has a and b\n")
    assert (" ... " in said) == (length > 2000) and len(said) < 2100


# --- how threads wait for each other


def waiting(monkeypatch, running: int, cores: int = 4, **environment) -> dict:
    """What choose_waiting() adds to an environment, on four cores of which others use `running`
    and we may use `cores`."""
    monkeypatch.setattr(common.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(common, "usable_cores", lambda: cores)
    monkeypatch.setattr(common, "running_elsewhere", lambda: running)
    after = dict(environment)
    choose_waiting(after)
    return {name: after[name] for name in after.keys() - environment.keys()}


def test_threads_wait_in_a_loop_where_cores_are_free_and_asleep_where_others_use_them(monkeypatch):
    loop, asleep = {"GOMP_SPINCOUNT": "10000"}, {"OMP_WAIT_POLICY": "passive"}
    assert waiting(monkeypatch, 0) == loop and waiting(monkeypatch, 1) == asleep
    two = {"OMP_NUM_THREADS": "2"}
    assert waiting(monkeypatch, 2, **two) == loop and waiting(monkeypatch, 3, **two) == asleep
    # a container's share
    assert waiting(monkeypatch, 2, cores=2) == loop
    assert waiting(monkeypatch, 0, cores=2, OMP_NUM_THREADS="3") == asleep
    assert waiting(monkeypatch, 0, **two, RANK="0", LOCAL_WORLD_SIZE="2") == loop
    assert waiting(monkeypatch, 0, **two, RANK="0", LOCAL_WORLD_SIZE="3") == asleep
    assert waiting(monkeypatch, 0, **two, LOCAL_WORLD_SIZE="3") == loop  # left in the shell
    # one thread waits for nobody
    assert waiting(monkeypatch, 0, OMP_NUM_THREADS="1") == asleep
    # a list for nested regions: all cores
    assert waiting(monkeypatch, 1, OMP_NUM_THREADS="2,1") == asleep
    for kept in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        assert waiting(monkeypatch, 0, **kept) == {}


def test_a_command_chooses_how_its_threads_wait_when_it_starts(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = "import common, os; print(os.environ['OMP_WAIT_POLICY'], common.CHOSEN_WAITING)"
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, cwd=common.ROOT, capture_output=True, text=True)
    assert said.stdout == "passive OMP_WAIT_POLICY\n", said.stderr


def test_a_process_that_computes_is_seen_running_and_one_that_wakes_for_a_moment_is_not(
    monkeypatch,
):
    code = "print(flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        busy.stdout.readline()  # it has started
        assert running_elsewhere() >= 1
    finally:
        busy.kill()
        busy.wait()
    said = iter(["3", "1", "4"])
    monkeypatch.setattr(common, "text_of", lambda file: f"0.9 0.9 0.9 {next(said)}/133 17\n")
    assert running_elsewhere(looks=3) == 0
    monkeypatch.setattr(common, "text_of", lambda file: "")  # no such file
    assert running_elsewhere(looks=2) == os.cpu_count()
