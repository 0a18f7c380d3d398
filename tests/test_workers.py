"""workers.py: functions that hang, crash, eat memory or leave processes behind, in real workers."""

import math
import os
import random
import select
import signal
import socket
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from deadlines import PATIENCE
from hang_clock import Clock
from reward_tools import (
    SLACK,
    TEN,
    come_true,
    config,
    function,
    functions_for,
    job,
    lines_of,
    measured,
    rollouts_of,
    row_of,
    runs,
)

import common
import rewards
import scoring
import workers
from scoring import ERROR, TIMEOUT
from tasks import mathematics
from workers import Failure, Pool

# words of helpers/hostile.py
HANGS = ["sleep", "spin", "spin_in_c", "power", "regex", "deaf", "threads", "stop", "lock"]
HANGS += ["fork", "subprocess"]
FAILS = ["fork_and_leave", "system_and_leave", "raise", "mute", "interrupt", "unprintable"]
FAILS += ["sys.exit", "os._exit", "kill", "realtime", "abort", "segfault", "recursion", "nan"]
FAILS += ["inf", "-inf", "huge", "long", "none", "text", "long text", "complex", "list"]
FAILS += ["allocate", "grow", "garbage", "bytes", "forged", "others", "pairs", "flood", "endless"]
FAILS += ["close"]
WORKS = {
    "fork_and_answer": 1,
    "fork_and_return": 1,
    "fork_and_terminate": 1,
    "print": 1,
    "chdir": 1,
    "run": 1,
    "true": 1,
    "integer": 3,
    "stdin": 1,
    "light": 1,
}
# and those that harm nobody in this very process
TAME = ["raise", "unprintable", "sys.exit", "recursion", "nan", "inf", "-inf", "huge", "long"]
TAME += ["none", "text", "long text", "complex", "list", "print", "run", "true", "integer"]


@pytest.fixture(scope="module")
def battle(reward_folder) -> dict:
    """All of hostile.py at once on six workers, numbers in between."""
    c = config("hostile:act", reward_workers=6, reward_timeout=1.0, reward_memory_gib=0.125)
    row = row_of("own")
    pool = scoring.pool_of(c)
    pool.clock = Clock(pool, lambda text: text in [*HANGS, "stack"])
    assert measured(["1", "2"], row, c) == ([1.0, 2.0], [])
    me = psutil.Process()
    others = {p.pid for p in me.children()} - {w.process.pid for w in pool.workers}
    fds = me.num_fds()
    texts = [*HANGS, *FAILS, *WORKS, "stack", *map(str, range(100, 150))]
    random.Random(0).shuffle(texts)
    values, failed = measured(texts, row, c)
    return {
        "c": c,
        "pool": pool,
        "row": row,
        "values": dict(zip(texts, values)),
        "failed": {record["completion"]: record for record in failed},
        "texts": texts,
        "fds": me.num_fds() - fds,
        "children": [p for p in me.children() if p.pid not in others],
    }


def test_what_hangs_is_a_timeout_and_what_breaks_is_an_error(battle):
    values = battle["values"]
    assert {name: values[name] for name in HANGS} == dict.fromkeys(HANGS, TIMEOUT)
    assert {name: values[name] for name in FAILS} == dict.fromkeys(FAILS, ERROR)
    assert values["stack"] in (TIMEOUT, ERROR)  # memory or time, whichever is less
    said = torch.tensor([[[values[text]] for text in battle["texts"]]])
    _, metrics = scoring.combine(said, [function("act")])
    failures = metrics["reward/act/timeouts"] + metrics["reward/act/errors"]
    assert failures == len(HANGS) + len(FAILS) + 1  # and the stack


def test_what_works_works_beside_them(battle):
    assert {name: battle["values"][name] for name in WORKS} == WORKS
    for n in range(100, 150):
        assert battle["values"][str(n)] == n


REASONS = {
    "sleep": "reward_timeout",
    "raise": "ValueError: this one (hostile.py:",
    "recursion": "RecursionError",
    "allocate": "MemoryError",
    "os._exit": "exit status 0",
    "kill": "Killed",
    "sys.exit": "SystemExit",
    "nan": "nan",
    "huge": "finite",
    "none": "gave None; a reward must be a number",
    "text": "gave 'good'; a reward must be a number",
    "long text": "a text of 4000 characters",
    "interrupt": "Interrupt",
    "segfault": "Segmentation fault",
    "forged": "malformed reply",
    "close": "worker",
}


def test_failures_are_recorded_with_reward_row_kind_reason_and_text(battle):
    assert set(battle["failed"]) == {*HANGS, *FAILS, "stack"}
    for text, record in battle["failed"].items():
        assert (record["reward"], record["id"]) == ("hostile:act", "a row of own")
        assert record["completion"] == text
        kind = "timeout" if battle["values"][text] == TIMEOUT else "error"
        assert record["kind"] == kind
        assert record["reason"].isprintable() and 0 < len(record["reason"]) <= 300
    for text, word in REASONS.items():
        assert word in battle["failed"][text]["reason"]


def test_a_worker_that_a_leak_has_filled_is_replaced(reward_folder):
    """Three leaks fit into it: at most every third one fails, and not all from the third on."""
    pool = Pool(1, PATIENCE, 0.125)
    found = pool.collect({i: job("hostile:act", "leak") for i in range(12)})
    pool.close()
    failed = [answer for answer in found.values() if answer != 1.0]
    assert 0 < len(failed) <= 4
    assert all("MemoryError" in answer.reason for answer in failed)


def test_an_error_that_quotes_the_model_on_memory_is_not_one_of_memory(reward_folder):
    pool = Pool(1, PATIENCE, 1.0)
    found = pool.collect({1: job("hostile:act", "int MemoryError"), 2: job("hostile:act", "1")})
    started = pool.workers[0].process.pid
    more = pool.collect({3: job("hostile:act", "int MemoryError")})
    assert pool.workers[0].process.pid == started
    pool.close()
    assert "ValueError" in found[1].reason and "MemoryError" in more[3].reason
    assert found[2] == 1.0


def test_a_hang_holds_up_no_worker_but_its_own(reward_folder):
    """Or this test would run into its time limit."""
    pool = Pool(2, 100_000.0, 1.0)
    assert come_true(lambda: pool.attend(0.1) or all(worker.ready for worker in pool.workers))
    pool.ask({"hang": job("hostile:act", "sleep")})  # which is handed out alone
    found = pool.collect({i: job("hostile:act", str(i)) for i in range(100)})
    assert found == {i: i for i in range(100)} and "hang" not in pool.results
    pool.close()


def test_a_reward_that_closes_its_output_is_heard_all_the_same(reward_folder):
    """In a worker of its own: whatever prints there afterwards fails."""
    pool = Pool(1, PATIENCE, 1.0)
    jobs = {text: job("hostile:act", text) for text in ("close_stdout", "3")}
    assert pool.collect(jobs) == {"close_stdout": 1.0, "3": 3.0}
    pool.close()


@pytest.mark.parametrize("number", sorted({*common.SIGNALS} - {signal.SIGINT}))
def test_signals_that_ask_a_run_to_stop_cost_no_reward(reward_folder, number):
    """Whoever stops a run may send them to all of its processes."""
    pool = Pool(1, PATIENCE, 1.0)
    assert come_true(lambda: pool.attend(0.1) or pool.workers[0].ready)
    jobs = {i: job("hostile:act", f"nap {i}") for i in range(3)}
    pool.ask(jobs)
    keeper = psutil.Process(pool.workers[0].process.pid)
    for process in (keeper, *keeper.children()):
        process.send_signal(number)
    assert pool.collect(jobs) == {0: 1.0, 1: 1.0, 2: 1.0}
    assert pool.workers[0].process.pid == keeper.pid
    pool.close()
    assert not runs(keeper.pid)


def sleeps(pool: Pool) -> dict:
    """Fifty jobs of it that hang, and a clock that knows."""
    pool.clock = Clock(pool, lambda text: text == "sleep")
    return {i: job("hostile:act", "sleep") for i in range(50)}


def test_once_too_many_have_timed_out_the_rest_is_given_up_at_once(reward_folder):
    """What is not waited for, such as jobs of the next step, stays in the queue."""
    pool = Pool(1, 0.2, 0.25)
    jobs = sleeps(pool)
    pool.ask(jobs)
    pool.ask({"next step": job("hostile:act", "5")})
    reasons = [answer.reason for answer in pool.collect(jobs, max_timeouts=2).values()]
    assert reasons[:3] == ["no answer in 0.2 s (reward_timeout)"] * 3
    assert reasons[3:] == ["given up: 3 others gave no answer in 0.2 s"] * 47
    assert pool.collect({"next step": None}) == {"next step": 5}
    assert pool.collect({1: job("hostile:act", "1")}) == {1: 1}
    assert pool.asked == pool.results == {} and not pool.late and len(pool.workers) == 1
    pool.close()


def test_jobs_that_are_waited_for_together_have_an_end_together(reward_folder, monkeypatch):
    monkeypatch.setattr(workers, "WAIT_SECONDS", 0.5)
    pool = Pool(1, 100_000.0, 0.25)
    found = pool.collect(sleeps(pool))
    assert set(found.values()) == {Failure("timeout", "given up: 50 together took over 0.5 s")}
    pool.close()


def test_jobs_that_are_not_given_up_go_back_into_the_queue_from_the_worker_that_had_them(
    reward_folder, monkeypatch
):
    monkeypatch.setattr(workers, "WAIT_SECONDS", 0.5)
    pool = Pool(1, 100_000.0, 0.25)
    given_up = sleeps(pool)
    others = {("next step", i): job("hostile:act", "5") for i in given_up}
    mixed = {}
    for key in given_up:  # so that both kinds are in the worker's first portion
        mixed |= {key: given_up[key], ("next step", key): others["next step", key]}
    pool.ask(mixed)
    pool.collect(given_up)
    assert set(pool.waiting) == set(others)
    monkeypatch.setattr(workers, "WAIT_SECONDS", 600)  # for a new worker to start
    assert pool.collect(others) == dict.fromkeys(others, 5)
    pool.close()


def test_timeouts_of_other_jobs_give_nothing_up(reward_folder):
    """Of the next step, say, which are asked for ahead."""
    pool = Pool(1, 0.2, 0.25)
    pool.clock = Clock(pool, lambda text: text == "sleep")
    pool.ask({"next step": job("hostile:act", "sleep")})
    assert come_true(lambda: pool.attend(0.05) or pool.late == {"next step"})
    found = pool.collect({"this step": job("hostile:act", "nap 1")}, max_timeouts=0)
    assert found == {"this step": 1.0}
    pool.close()


def test_an_evaluation_does_not_forget_what_was_asked_for_ahead(reward_folder):
    """The job would be done twice, and a reward may cost money."""
    pool = Pool(1, 60.0, 0.25)
    ahead = {"next step": job("hostile:act", "count a")}
    pool.ask(ahead)
    assert pool.collect({"evaluation": job("hostile:act", "1")}) == {"evaluation": 1.0}
    pool.collect(ahead)
    counted = reward_folder / "counted"
    assert lines_of(counted) == ["count a"]
    counted.unlink()  # another test counts there too
    assert pool.asked == pool.results == {}
    pool.close()


def test_a_worker_with_nothing_to_do_is_not_late(reward_folder):
    pool = Pool(1, 5.0, 1.0)
    now = [0.0]
    pool.clock = lambda: now[0]
    assert pool.collect({1: job("hostile:act", "1")}) == {1: 1.0}
    (worker,) = pool.workers
    now[0] += 3600  # learning
    pool.attend(0)
    assert pool.workers == [worker]
    assert pool.collect({2: job("hostile:act", "nap 2")}) == {2: 1.0}
    pool.close()


def test_a_worker_that_does_not_read_costs_no_job_and_is_not_waited_for(reward_folder):
    """It was stopped, say, and the socket is full."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = object.__new__(workers.Worker)
        worker.socket, worker.functions, worker.fault = ours, set(), ""
        pool = Pool(0, -9.9, 1.0)  # seconds, which make 0.1 with the ten that sending has
        pool.workers = [worker]
        pool.asked = {1: job("hostile:act", "x" * 10**7)}
        pool.waiting = deque([1])
        pool.hand_out(worker)
        assert worker.fault == workers.CLOSED
        assert list(pool.waiting) == [1] and not worker.jobs


def test_the_pool_is_as_large_as_before_and_nothing_is_left_behind(battle, reward_folder):
    pool = battle["pool"]
    assert len(pool.workers) == 6 and battle["fds"] == 0
    pids = sorted(p.pid for p in battle["children"])  # no zombie of a killed one
    assert pids == sorted(worker.process.pid for worker in pool.workers)
    kept = set()  # of fork_and_answer, until its worker goes
    for worker in pool.workers:
        kept |= {p.pid for p in psutil.Process(worker.process.pid).children(recursive=True)}
    children = {int(pid) for pid in lines_of(reward_folder / "children")}
    assert len(children) >= 4
    assert come_true(lambda: not any(map(runs, children - kept)))


@pytest.mark.parametrize("act", ["daemon", "daemon_and_leave", "freeze_keeper"])
def test_what_a_reward_starts_in_a_session_of_its_own_does_not_outlive_its_worker(
    reward_folder, act, monkeypatch
):
    monkeypatch.setattr(workers, "END_SECONDS", 1.0)  # for a keeper that is stopped
    (reward_folder / "daemons").unlink(missing_ok=True)
    pool = Pool(1, SLACK, 1.0)
    pool.collect({1: job("hostile:act", act)})
    (pid,) = map(int, lines_of(reward_folder / "daemons"))
    if act != "daemon_and_leave":
        assert runs(pid)
        pool.close()
    assert come_true(lambda: not runs(pid))
    pool.close()


def test_many_hangs_in_a_row_and_the_pool_still_works(battle):
    c = battle["c"]
    values, _ = measured([f"{i}" if i % 2 else f"{i:03}" for i in range(20)], battle["row"], c)
    assert values == list(range(20))
    rows = [row_of("own") for _ in range(3)]  # the same text on another row is another job
    rollouts = rollouts_of(["sleep", "spin", "5"] * 3)
    values, failed = scoring.measure(rollouts, rows, functions_for(c, rows), c)
    assert values[..., 0].tolist() == [[TIMEOUT, TIMEOUT, 5.0]] * 3 and len(failed) == 6
    assert measured(["1", "2", "3"], battle["row"], c) == ([1.0, 2.0, 3.0], [])
    assert len(battle["pool"].workers) == 6


def test_failures_of_a_chunk_cost_the_others_of_it_nothing_and_each_has_its_own_time(
    reward_folder,
):
    special = {3: "sleep", 20: "os._exit", 21: "raise", 22: "garbage", 70: "kill"}
    kinds = {3: "timeout", 20: "error", 21: "error", 22: "error", 70: "error"}
    harmless = {50: "fork_and_return"}
    for i in range(30, 36):
        harmless[i] = f"nap {i}"  # all six take longer than one job may
    texts = list(map(str, range(200)))  # the first chunk has 50 of them
    for i, text in (special | harmless).items():
        texts[i] = text
    pool = Pool(1, 2.5, 0.25)
    pool.clock = Clock(pool, lambda text: text == "sleep", naps=lambda text: text.startswith("nap"))
    found = pool.collect({i: job("hostile:act", text) for i, text in enumerate(texts)})
    pid = pool.workers[0].process.pid
    pool.close()
    assert not psutil.pid_exists(pid)
    assert list(found) == list(range(200))
    for i, value in found.items():
        if i in kinds:
            assert isinstance(value, Failure) and value.kind == kinds[i]
        else:
            assert value == (1 if i in harmless else i)


def test_an_answer_that_comes_while_another_worker_is_replaced_is_in_time(
    reward_folder, monkeypatch
):
    pool = Pool(2, 5.0, 0.25)
    pool.clock = Clock(pool, lambda text: False)
    pool.collect({i: job("hostile:act", str(i)) for i in range(20)})
    assert come_true(lambda: pool.attend(0.1) or all(worker.ready for worker in pool.workers))

    def cause_of_death(dead) -> str:
        """Takes 5.5 seconds, in which the other one answers."""
        (reward_folder / "buried").touch()
        (other,) = (worker for worker in pool.workers if worker is not dead)
        assert select.select([other.socket], [], [], PATIENCE)[0]
        pool.clock.seconds += 5.5
        return "died slowly"

    monkeypatch.setattr(pool, "cause_of_death", cause_of_death)
    texts = ("kill", "wait for a death")
    found = pool.collect({text: job("hostile:act", text) for text in texts})
    pool.close()
    assert found == {texts[0]: Failure("error", "the worker died slowly"), texts[1]: 1.0}


def test_a_worker_that_dies_while_it_has_nothing_to_do_is_replaced_and_nobody_is_blamed(battle):
    pool = battle["pool"]
    # a message that is still under way would make a living worker's socket readable too
    assert come_true(lambda: pool.attend(0) or all(w.ready and not w.jobs for w in pool.workers))
    for worker in pool.workers:
        os.kill(worker.process.pid, signal.SIGKILL)
        # that its keeper is gone does not yet say so
        assert select.select([worker.socket], [], [], PATIENCE)[0]
    assert measured(["1", "2", "3"], battle["row"], battle["c"]) == ([1.0, 2.0, 3.0], [])
    assert len(pool.workers) == 6


def test_begin_waits_for_nothing_and_measure_computes_nothing_twice(
    battle, reward_folder, monkeypatch
):
    c, pool = battle["c"], battle["pool"]
    functions = functions_for(c, [battle["row"]])
    measured(["1"], battle["row"], c)
    rows = [row_of("own"), row_of("own")]
    texts = ["count a", "sleep", "count b", "count a"]
    attend = pool.attend
    waits = []
    monkeypatch.setattr(pool, "attend", lambda seconds: waits.append(seconds) or attend(seconds))
    for row in rows:
        scoring.begin(rollouts_of(texts), row, functions, c)
    assert waits == [0, 0]
    counted = reward_folder / "counted"
    # they run while nobody waits for them
    assert come_true(lambda: pool.attend(0) or len(lines_of(counted)) == 4)
    scoring.begin(rollouts_of(texts), rows[0], functions, c)
    values, failed = scoring.measure(rollouts_of(texts * 2), rows, functions, c)
    assert values[..., 0].tolist() == [[1.0, TIMEOUT, 1.0, 1.0]] * 2 and len(failed) == 2
    assert sorted(lines_of(counted)) == ["count a", "count a", "count b", "count b"]
    assert pool.asked == pool.results == {} and not pool.waiting


def test_answers_that_are_asked_for_while_others_are_under_way_are_their_own(battle, reward_folder):
    c, pool = battle["c"], battle["pool"]
    functions = functions_for(c, [battle["row"]])
    scoring.begin(rollouts_of(["count c", "sleep"]), battle["row"], functions, c)
    counted = reward_folder / "counted"
    assert come_true(lambda: pool.attend(0) or "count c" in lines_of(counted))
    right = torch.tensor([[True]])
    for row, modes in (
        (row_of("countdown", TEN), {"2*3+4"}),
        (row_of("countdown", {"numbers": [2, 3, 4], "target": 9}), set()),
    ):
        assert scoring.correct_modes(rollouts_of(["2*3+4"]), [row], right, c) == [(1, modes)]
    values, _ = measured(["count c", "sleep", "7"], battle["row"], c)
    assert values == [1.0, TIMEOUT, 7.0]
    assert lines_of(counted).count("count c") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reward_that_changes_what_it_is_given_changes_no_other_score(reward_folder, workers):
    c = config("hostile:greedy", reward_workers=workers)
    row = row_of("own", {"numbers": [1, 2]})
    assert measured(["a", "b", "c", "d"], row, c) == ([2.0] * 4, [])
    assert row["answer"] == {"numbers": [1, 2]}


def test_without_workers_the_scores_are_the_same_and_no_process_starts(battle):
    c = battle["c"] | {"reward_workers": 0}
    before = len(psutil.Process().children())
    texts = [*TAME, "100", "101"]
    values, failed = measured(texts, battle["row"], c)
    assert values == [battle["values"][text] for text in texts]
    assert [record["completion"] for record in failed] == [text for text in texts if text in FAILS]
    for record in failed:
        assert record["kind"] == "error"
        assert record["reason"] == battle["failed"][record["completion"]]["reason"]
    scoring.begin(rollouts_of(["sleep"]), battle["row"], [], c)
    assert len(psutil.Process().children()) == before


@pytest.mark.parametrize(
    "message, value",
    [
        (0.5, 0.5),
        (2, 2),
        ("1+2", "1+2"),
        (None, None),
        (math.nan, Failure),
        (math.inf, Failure),
        (1e39, Failure),
        (-1e12, Failure),
        (9e11, 9e11),
        (True, Failure),
        ([1.0], Failure),
        ({"a": 1}, Failure),
        ({"error": [1]}, Failure),
        ({"error": "\x1b[2J"}, Failure),
    ],
)
def test_of_an_answer_only_what_can_be_one_is_believed(message, value):
    """A reward may write into the socket of its worker."""
    found = workers.checked_result(message)
    if value is Failure:
        assert isinstance(found, Failure) and found.reason.isprintable()
    else:
        assert found == value


@pytest.mark.parametrize("line", ["[" * 20_000, '[0, ["importing", {}]]', "{", "[1]", "7"])
def test_a_worker_that_says_what_it_cannot_say_is_not_believed(line):
    worker = SimpleNamespace(lines=lambda: [line], answered=0, ready=False, jobs=[], fault="")
    pool = object.__new__(workers.Pool)
    pool.clock = lambda: 0.0
    pool.take_in(worker)
    assert worker.fault == workers.MALFORMED


def test_an_answer_to_no_job_is_not_believed():
    worker = SimpleNamespace(lines=lambda: [b"[0, 1.0]"], answered=0, ready=True, fault="")
    worker.jobs = deque()
    pool = object.__new__(workers.Pool)
    pool.take_in(worker)
    assert worker.fault == workers.MALFORMED


def test_of_a_long_error_only_its_beginning_leaves_the_worker():
    """A line too long for the trainer would cost the worker."""
    said = workers.run_job("hostile:act", "unprintable", {"answer": ""})["error"]
    assert len(said) < workers.LONGEST_REASON + 50


def imports_of(module) -> set[str]:
    """Modules that a file of ours imports at its top."""
    found = set()
    for line in Path(module.__file__).read_text().splitlines():
        if line.startswith(("import ", "from ")):
            found.add(line.split()[1].partition(".")[0])
    return found


def test_nothing_here_knows_of_other_ranks_and_workers_of_no_torch_and_no_rewards():
    for module in (rewards, workers, mathematics):
        assert not imports_of(module) & {"torch", "scoring", "math_verify"}
    for module in (workers, scoring):
        assert "rewards" not in imports_of(module)
        assert "import rewards" not in Path(module.__file__).read_text()
    for module in (rewards, workers, scoring):
        words = Path(module.__file__).read_text().replace(".", " ").replace("(", " ").split()
        assert not {"distributed", "all_reduce", "barrier", "gather_rows"} & set(words)
