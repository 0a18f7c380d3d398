"""workers.py: how a worker starts and ends, what it imports, prints and sees
of its surroundings."""

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from reward_tools import (
    SLACK,
    close_pools,
    come_true,
    config,
    functions_for,
    job,
    lines_of,
    refusal,
    row_of,
    runs,
)

import scoring
import workers
from common import RunStopped
from workers import Pool

ROOT = Path(__file__).resolve().parent.parent

# --- modules of the user's own

BROKEN_MODULES = {
    "broken": "def f(:",
    "raising": "raise ZeroDivisionError('no\\nnews')",
    "needing": "import need",
    "leaving": "import sys; sys.exit(0)",
    "moving": "import os; os.chdir('/'); f = float",
    "strange": "class Class: pass\nasync def later(completion, answer, **row): return 1.0",
}


@pytest.mark.parametrize(
    "name, word",
    [
        ("no_such_module:f", "looked for beside train.py and in the folders of PYTHONPATH"),
        ("/tmp/no_such.py:f", "without .py and without a folder"),
        ("./no_such.py:f", "without .py and without a folder"),
        ("needing:f", "No module named 'need'\""),
        ("hostile:no_such_function", "no_such_function"),
        ("hostile:not_a_function", "not a function"),
        ("strange:Class", "is a class: name an instance"),
        ("strange:later", "is async: write a plain function"),
        ("hostile:", "''"),
        (":act", "can't be imported"),
        (".hostile:act", "can't be imported"),
        ("broken:f", "SyntaxError"),
        ("raising:f", "ZeroDivisionError: no"),
        ("leaving:f", "sys.exit(0)"),
        ("moving:f", "changes the working folder when it is imported: /"),
    ],
)
@pytest.mark.parametrize("count", [0, 1])
def test_a_module_or_function_that_can_not_be_had_is_one_sentence_and_no_hang(
    reward_folder, name, word, count, monkeypatch
):
    monkeypatch.chdir(reward_folder)  # and back, after the module that moves
    for module, text in BROKEN_MODULES.items():
        (reward_folder / f"{module}.py").write_text(text + "\n")
    c = config(name, reward_workers=count)
    row = row_of("math", "1")
    said = refusal(scoring.check_answers, functions_for(c, [row]), [row], "data", c)
    close_pools()  # as the run that hears this is over
    assert "reward_funcs" in said and repr(name) in said and word in said


def test_a_function_of_ones_own_that_fails_is_told_what_it_gets_and_not_to_change_the_data(
    reward_folder,
):
    (reward_folder / "of_trl.py").write_text("def f(prompts, completions, **row): return 1.0\n")
    c = config("of_trl:f", reward_workers=0)
    row = row_of("math", "1")
    said = refusal(scoring.check_answers, functions_for(c, [row]), [row], "data", c)
    assert "missing 1 required positional argument: 'completions'" in said
    assert "f(completion, answer, **row)" in said and "answer, id, prompt, task" in said
    assert "another column" not in said


def test_a_column_that_later_rows_lack_is_told_at_the_start(reward_folder):
    (reward_folder / "level.py").write_text("def f(completion, level, **row): return 1.0\n")
    c = config("level:f", reward_workers=0)
    rows = [row_of("math", "1") | {"level": 1} for _ in range(3)]
    scoring.check_answers(functions_for(c, rows), rows, "data", c)
    rows += [row_of("math", "2") | {"id": "late"}]
    said = refusal(scoring.check_answers, functions_for(c, rows), rows, "data", c)
    assert "row 'late'" in said and "missing 1 required positional argument: 'level'" in said
    assert "the completion '1'" in said


@pytest.mark.parametrize("value, given", [("None", "None"), ("float('nan')", "nan")])
def test_a_function_that_gives_no_number_is_told_to_give_one(reward_folder, value, given):
    # modules are imported once: each value has its own
    (reward_folder / f"gives_{given}.py").write_text(f"def f(*_, **row): return {value}\n")
    c = config(f"gives_{given}:f", reward_workers=0)
    row = row_of("math", "1")
    functions = functions_for(c, [row])
    said = refusal(scoring.check_answers, functions, [row], "data", c)
    assert f"gave {given}" in said and "let it return a number for every completion" in said
    assert "f(completion, answer" not in said
    slow = {"kind": "timeout", "reason": "no answer in 0.5 s"}
    assert "raise reward_timeout" in scoring.cure_for(functions[0], row, slow)
    for kind, cure in (("MemoryError", "raise reward_memory_gib"), ("ValueError", "f(completion")):
        failed = {"kind": "error", "reason": f"{kind}: a MemoryError, said the model"}
        assert cure in scoring.cure_for(functions[0], row, failed)


SLEEPS = "import time\ntime.sleep(1000)\n"
AT_FIRST_CALL = "import time\ndef f(completion, answer, **row): time.sleep(1000)\n"
LEAVES = "import os\nos._exit(7)\n"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.parametrize(
    "name, code, words",
    [
        ("stuck", SLEEPS, "not ready in 0.3 s when the module of 'stuck:f' was imported"),
        ("slow", AT_FIRST_CALL, "not ready in 0.3 s when 'slow:f' was called for the first time"),
        ("gone", LEAVES, "died (exit status 7) when the module of 'gone:f' was imported"),
        ("killed", KILLED, "died (Killed) when the module of 'killed:f' was imported"),
    ],
)
@pytest.mark.parametrize("after_another", [False, True])
def test_a_module_that_never_comes_to_an_end_or_ends_its_process_is_named_after_one_try(
    reward_folder, monkeypatch, name, code, words, after_another
):
    (reward_folder / f"{name}.py").write_text(code)
    pool = Pool(1, SLACK, 1.0)
    if after_another:
        assert pool.collect({0: job("hostile:act", "1")}) == {0: 1.0}
    monkeypatch.setattr(pool, "start", lambda: pytest.fail("another worker was started"))
    jobs = {1: job(f"{name}:f", "1")}
    pool.ask(jobs)
    if "not ready" in words:
        phase = words.partition(" s ")[2]
        assert come_true(lambda: pool.attend(0.05) or pool.workers[0].doing.startswith(phase))
        monkeypatch.setattr(workers, "START_SECONDS", 0.3)
    said = refusal(pool.collect, jobs)
    pool.close()
    assert words in said and re.search("; .* must (not|return)", said)


def test_the_time_that_an_import_takes_is_not_the_first_jobs(reward_folder, monkeypatch):
    pool = Pool(1, 5.0, 1.0)
    now = [0.0]
    pool.clock = lambda: now[0]
    take_start = pool.take_start

    def take_late(worker, message):
        if message == "ready":
            now[0] += 100  # what was imported took longer than a job may
        take_start(worker, message)

    monkeypatch.setattr(pool, "take_start", take_late)
    # a nap: the answer must not come together with "ready"
    assert pool.collect({1: job("hostile:act", "nap 1")}) == {1: 1.0}
    pool.close()


@pytest.mark.parametrize("step", ["importing", "trying"])
def test_each_function_has_its_own_time_to_load(step):
    """A worker that says what it does next is not late by what it did before."""
    pool = object.__new__(Pool)
    pool.clock = lambda: 100.0
    worker = SimpleNamespace(ready=False, loading="", doing="", since=0.0, fault="")
    pool.take_start(worker, [step, "module:function"])
    assert (worker.since, worker.fault) == (100.0, "")


READS_FIRST = """
calls = []
def f(completion, answer, *, unit, **row):
    calls.append(completion)
    return float(len(calls))
"""


def test_the_first_call_has_the_columns_of_a_row(reward_folder):
    """So that a reward that reads one gets as far as loading what it needs."""
    (reward_folder / "unit.py").write_text(READS_FIRST)
    pool = Pool(1, SLACK, 1.0)
    function, text, row = job("unit:f", "a")
    assert pool.collect({1: (function, text, row | {"unit": "m"})}) == {1: 2.0}
    pool.close()


DIES = """
import os
def f(completion, answer, dies, **row):
    if dies:
        os.abort()
    return 1.0
"""


def test_a_row_on_which_workers_die_costs_its_own_jobs_and_no_others(reward_folder, monkeypatch):
    """Workers that come after are not tried with it."""
    monkeypatch.setattr(workers, "WAIT_SECONDS", SLACK)
    (reward_folder / "dies.py").write_text(DIES)
    pool = Pool(1, SLACK, 1.0)
    function, text, row = job("dies:f", "a")
    good, bad = (function, text, row | {"dies": 0}), (function, text, row | {"dies": 1})
    assert pool.collect({0: good}) == {0: 1.0}
    found = pool.collect({1: bad, 2: bad, 3: good, 4: good})
    assert (found[3], found[4]) == (1.0, 1.0)
    for key in (1, 2):
        assert found[key] == workers.Failure("error", "the worker died (Aborted)")
    pool.close()


def test_workers_that_never_start_end_the_run_after_a_few_tries(reward_folder, monkeypatch):
    starts = []
    start = Pool.start

    def counted(pool):
        starts.append(1)
        assert len(starts) < 20
        start(pool)

    monkeypatch.setattr(Pool, "start", counted)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    pool = Pool(2, SLACK, 1.0)
    with pytest.raises(RunStopped, match=r"reward workers don't start: .*exit status 1"):
        pool.collect({1: job("hostile:act", "1")})
    assert len(starts) == 2 + 4  # two of each
    pool.close()


def test_a_worker_that_starts_clears_the_count_of_those_that_did_not(reward_folder):
    pool = Pool(1, SLACK, 1.0)
    pool.failed_starts = 2
    while not pool.workers[0].ready:
        pool.attend(0.1)
    assert pool.failed_starts == 2  # it has not loaded a function yet
    assert pool.collect({1: job("hostile:act", "1")}) == {1: 1}
    assert pool.failed_starts == 0
    pool.close()


CORE = """
import resource
def f(completion, answer, **row):
    return float(resource.getrlimit(resource.RLIMIT_CORE)[0])
"""


def test_a_reward_that_crashes_leaves_no_core_file(reward_folder):
    (reward_folder / "core.py").write_text(CORE)
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))  # as much as is allowed
    pool = Pool(1, SLACK, 1.0)
    answers = pool.collect({1: job("core:f", "1")})
    pool.close()
    resource.setrlimit(resource.RLIMIT_CORE, before)
    assert answers == {1: 0.0}


WAITS_FOR_MEMORY = """
held = bytearray(100 << 20)
def f(completion, answer, **row):
    return float(len(bytearray(int(completion) << 20)) > 0)
"""


def test_a_job_has_its_memory_on_top_of_what_was_imported_before_it(reward_folder):
    """Also where a function was imported after jobs of another had their limit."""
    (reward_folder / "large.py").write_text(WAITS_FOR_MEMORY)
    pool = Pool(1, SLACK, 0.0625)
    assert pool.collect({1: job("hostile:act", "1")}) == {1: 1.0}
    found = pool.collect({2: job("large:f", "20"), 3: job("large:f", "200")})
    pool.close()
    assert found[2] == 1.0 and "MemoryError" in found[3].reason


def test_where_memory_is_limited_already_a_job_gets_no_more_than_that():
    """Or setrlimit() refuses, and no worker starts: a batch system may set such a limit."""
    script = (
        "import resource, workers; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)); "
        "workers.limit_memory(1000.0); print(*resource.getrlimit(resource.RLIMIT_AS))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert done.stdout.split() == [b"%d" % 2**33] * 2


def test_a_worker_that_is_lost_while_it_imports_gives_its_jobs_to_another(reward_folder):
    """Once a function was imported, it is not to blame."""
    (reward_folder / "fine.py").write_text("def f(completion, answer, **row): return 1.0\n")
    pool = Pool(1, SLACK, 1.0)
    assert pool.collect({1: job("fine:f", "")}) == {1: 1.0}
    second = "import os\nfrom pathlib import Path\nmark = Path(__file__ + '.tried')\n"
    second += "if not mark.exists():\n    mark.touch()\n    os._exit(1)\n"
    second += "def f(completion, answer, **row): return 1.0\n"
    (reward_folder / "fine.py").write_text(second)
    first = pool.workers[0]
    os.kill(first.process.pid, signal.SIGKILL)
    assert come_true(lambda: pool.attend(0.1) or pool.workers[0] is not first)
    assert pool.collect({2: job("fine:f", "2")}) == {2: 1.0}
    assert (reward_folder / "fine.py.tried").exists()
    pool.close()


# --- what they print, and what they see


def test_what_rewards_print_is_quoted_and_what_a_module_prints_at_import_names_it(
    reward_folder, capfd
):
    """Nothing of it can steer the terminal or look like a line of ours."""
    forged = "hello \x1b[2J\rerror: the run is lost"
    (reward_folder / "noisy.py").write_text(
        f"import os, sys\nprint({forged!r})\nsys.stderr.write('to stderr')\nos.write(1, b'\\xff')\n"
        "def f(completion, answer, **row): print('inside', completion); return 1.0\n"
    )
    pool = Pool(1, SLACK, 1.0)
    assert pool.collect({1: job("noisy:f", "\x1b[31mred")}) == {1: 1.0}
    pool.close()
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if "debug" not in line]
    at_import = "reward_funcs: the module of 'noisy:f' prints when it is imported: "
    assert out == "" and "\x1b" not in err and "\r" not in err
    assert at_import + repr(forged) in lines
    assert any(line.startswith(at_import) and "to stderr" in line for line in lines)
    assert "reward worker: 'inside \\x1b[31mred'" in lines
    assert all(line.startswith((at_import, "reward worker: ")) for line in lines)


def test_of_a_worker_that_prints_without_end_a_thousand_lines_are_shown(reward_folder, capfd):
    (reward_folder / "wordy.py").write_text(
        "def f(completion, answer, **row):\n    print('x\\n' * 5000)\n    return 1.0\n"
    )
    pool = Pool(1, SLACK, 1.0)
    assert pool.collect({1: job("wordy:f", "1")}) == {1: 1.0}
    pool.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == workers.LINES_SHOWN + 1 and "more is not shown" in lines[-1]


def test_of_a_line_without_end_a_keeper_holds_a_piece_at_a_time(capfd):
    workers.show(io.BytesIO(b"x" * (3 * workers.LONGEST_LINE)))
    assert len(capfd.readouterr().err.splitlines()) == 3


SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "PASSWORD")


def test_a_reward_sees_nothing_of_the_environment_but_what_is_listed(reward_folder, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("REWARD_JUDGE_KEY", "meant for it")
    monkeypatch.setenv("LC_TIME", "C")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (reward_folder / "curious.py").write_text(
        "import json, os\nfrom pathlib import Path\n"
        "Path(__file__ + '.seen').write_text(json.dumps(dict(os.environ)))\n"
        "def f(completion, answer, **row): return 1.0\n"
    )
    pool = Pool(1, SLACK, 1.0)
    assert pool.collect({1: job("curious:f", "1")}) == {1: 1.0}
    pool.close()
    seen = json.loads((reward_folder / "curious.py.seen").read_text())
    assert not set(SECRETS) & set(seen) and "a secret" not in seen.values()
    assert seen["REWARD_JUDGE_KEY"] == "meant for it" and seen["LC_TIME"] == "C"
    assert seen["CUDA_VISIBLE_DEVICES"] == "" and seen["OMP_NUM_THREADS"] == "1"
    assert seen["PATH"] == os.environ["PATH"] and "HOME" in seen


# --- how they end

OWNER = """
import sys, time
sys.path[:0] = {path!r}
import workers

def main():
    pool = workers.Pool(2, 60.0, 0.5)

    def jobs(*texts):
        return {{text: ("hostile:act", text, {{"answer": ""}}) for text in texts}}

    def ask(*texts):
        return list(pool.collect(jobs(*texts)).values())

    def pids():
        return [worker.process.pid for worker in pool.workers]

    ask("1", "2", "daemon")
    stuck = workers.Pool(1, 60.0, 0.5)
    stuck.ask({{1: ("stuck_too:f", "", {{}})}})
    while not stuck.workers[0].doing:
        stuck.attend(0.1)
    try:
        print(*pids(), stuck.workers[0].process.pid, flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print(*pids(), *ask("4", "5"), flush=True)
    failure, = ask("kill_group")
    print(failure.kind, failure.reason, flush=True)
    pool.ask(jobs("power", "sleep"))
    while not all(worker.ready and worker.jobs for worker in pool.workers):
        pool.attend(0.1)
    print(*pids(), flush=True)
    time.sleep(60)

main()
"""


def test_ctrl_c_spares_workers_and_they_die_with_a_killed_trainer_even_while_they_hang(
    reward_folder,
):
    started = reward_folder / "stuck_too.started"
    (reward_folder / "stuck_too.py").write_text(
        f"import time\nopen({str(started)!r}, 'w').close()\ntime.sleep(1000)\n"
    )
    (reward_folder / "daemons").unlink(missing_ok=True)
    paths = [str(ROOT), str(ROOT / "tests" / "helpers"), str(reward_folder)]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(path=paths)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        *pids, stuck = map(int, owner.stdout.readline().split())
        os.killpg(owner.pid, signal.SIGINT)
        assert owner.stdout.readline().split() == [*map(str, pids), "4.0", "5.0"]
        # its own group has no one else in it
        assert owner.stdout.readline() == "error the worker died (Killed)\n"
        (daemon,) = map(int, lines_of(reward_folder / "daemons"))
        pids = [*map(int, owner.stdout.readline().split()), stuck]
        assert len(pids) == 3 and come_true(started.exists)
        time.sleep(0.3)  # both are at their jobs
        assert all(map(runs, pids))
        owner.kill()
        assert come_true(lambda: not any(map(runs, [*pids, daemon])))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_a_worker_whose_trainer_was_gone_before_it_looked_ends_at_once(reward_folder):
    (reward_folder / "stuck_at_once.py").write_text(
        "import os, time\nopen(__file__ + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    script = (
        f"import os, sys; sys.path[:0] = {[str(ROOT), str(reward_folder)]!r}; import workers; "
        "worker = workers.Worker((sys.path, 1.0), 0.0); "
        "worker.send((['stuck_at_once:f'], [('stuck_at_once:f', '', {})])); os._exit(0)"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], check=True)
    noted = reward_folder / "stuck_at_once.py.pid"
    assert come_true(lambda: not any(runs(int(pid)) for pid in lines_of(noted)))
