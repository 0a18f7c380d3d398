"""A rank that is stopped or gone ends the others with a sentence, also where they are in a
collective that hears nothing; gloo stands in for NCCL, whose collectives notice neither."""

import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import child
import pytest
import torch
import torch.distributed as dist
from deadlines import PATIENCE

import ranks
from common import RunStopped

# --- the meeting


def test_torch_makes_the_process_group_before_deepspeed_can_bind_it_to_a_gpu(monkeypatch):
    """DeepSpeed would pass device_id, with which every new group is a split by all ranks; that
    needs two GPUs to see, so what torch is told stands in for it."""
    calls = []
    group = SimpleNamespace(
        is_initialized=lambda: bool(calls),
        init_process_group=lambda *args, **named: calls.append((args, named)),
        get_rank=lambda: 0,
        get_world_size=lambda: 1,
    )
    monkeypatch.setattr(ranks, "dist", group)
    monkeypatch.setattr(ranks.deepspeed, "init_distributed", lambda **_: calls.append("deepspeed"))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(ranks, "check_environment", lambda: None)
    monkeypatch.setattr(ranks, "under_torchrun", lambda: True)
    ranks.start_distributed()
    assert calls == [(("gloo",), {"timeout": ranks.DEADLINE}), "deepspeed"]


# --- the rules, beat by beat


def pair(rank: int = 1) -> tuple[ranks.Peer, socket.socket]:
    """A rank as another one has it, and what the rank itself holds."""
    ours, theirs = socket.socketpair()
    return ranks.Peer(rank, ours, "host, process 7"), theirs


def listen(heart: ranks.Heartbeat) -> str:
    return heart.listen(0.01)


def test_a_rank_that_beats_lives_and_one_that_is_silent_for_too_long_is_dead():
    peer, theirs = pair()
    heart = ranks.Heartbeat([peer], 3)
    for _ in range(9):
        theirs.send(b"\n")
        assert listen(heart) == heart.beat() == ""
    assert theirs.recv(99) == b"\n" * 9  # and it heard ours
    assert [listen(heart) or heart.beat() for _ in range(2)] == ["", ""]
    verdict = heart.beat()
    assert verdict.startswith("rank 1 (host, process 7) has not been heard for 3 s")


def test_one_that_ends_is_noticed_after_a_grace_for_its_own_words():
    peer, theirs = pair()
    heart = ranks.Heartbeat([peer], 45)
    theirs.close()
    verdicts = [listen(heart) or heart.beat() for _ in range(ranks.GRACE + 1)]
    assert verdicts == [""] * ranks.GRACE + ["rank 1 (host, process 7) is gone"]


def test_strangers_at_the_place_of_the_meeting_are_passed_over(monkeypatch):
    """One says nothing, one something else, one hangs up; then the rank comes."""
    monkeypatch.setattr(ranks, "HELLO_SECONDS", 0.1)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        callers = [socket.create_connection(listener.getsockname()) for _ in range(4)]
        callers[1].sendall(b"GET / HTTP/1.1\r\n")
        callers[2].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        callers[2].close()  # without a goodbye: reading is an error
        callers[3].sendall(b"secret 1 host, process 7\n")
        (peer,) = ranks.wait_for_peers(listener, "secret")
        assert (peer.rank, peer.place) == (1, "host, process 7")
        for caller in [*callers, peer.connection]:
            caller.close()


def test_a_stranger_who_sends_a_byte_now_and_then_is_dropped_in_time(monkeypatch):
    monkeypatch.setattr(ranks, "HELLO_SECONDS", 0.1)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 2)
    sent = []

    def drip(stranger: socket.socket) -> None:
        dropped = threading.Event()
        while not dropped.wait(0.01) and len(sent) < 500:  # which no line of ours is longer than
            try:
                stranger.sendall(b"x")
                sent.append(1)
            except OSError:
                dropped.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        callers = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        callers[1].sendall(b"secret 1 host, process 7\n")
        dripping = threading.Thread(target=drip, args=[callers[0]])
        dripping.start()
        (peer,) = ranks.wait_for_peers(listener, "secret")
        dripping.join()
        assert peer.rank == 1 and len(sent) < 500
        for caller in [*callers, peer.connection]:
            caller.close()


class Crowd:
    """A listener to whom a stranger comes every second, for a hundred seconds, and no rank."""

    def __init__(self):
        self.now = 0.0

    def settimeout(self, seconds: float) -> None:
        pass

    def getsockname(self) -> tuple:
        return "127.0.0.1", 7

    def accept(self) -> tuple:
        self.now += 1.0
        assert self.now < 100.0, "strangers are let in for ever"
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours, None


def test_the_last_stranger_does_not_put_it_off_either(monkeypatch):
    crowd = Crowd()
    ends = []
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: crowd.now))
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(ranks, "read_hello", lambda connection, end: ends.append(end) or b"")
    with pytest.raises(RunStopped):
        ranks.wait_for_peers(crowd, "secret")
    assert min(ends) < ranks.MEETING_SECONDS == max(ends)


def test_strangers_who_come_and_go_do_not_put_off_the_end_of_the_wait(monkeypatch):
    crowd = Crowd()
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: crowd.now))
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 2)
    with pytest.raises(RunStopped, match=r"ranks \[1\] have not reached rank 0 at port 7"):
        ranks.wait_for_peers(crowd, "secret")
    assert crowd.now == ranks.MEETING_SECONDS


def test_one_that_says_goodbye_is_not_missed():
    peer, theirs = pair()
    heart = ranks.Heartbeat([peer], 2)
    other = ranks.Heartbeat([ranks.Peer(0, theirs, "")], 2)
    other.part()
    theirs.close()
    assert [listen(heart) or heart.beat() for _ in range(9)] == [""] * 9
    assert heart.peers == []
    heart.run()  # has nothing left to do


def test_a_run_that_is_suspended_as_a_whole_has_missed_no_beat(monkeypatch):
    """However late the clock says it is: beats count, and between two of them others are heard."""
    peer, theirs = pair()
    heart = ranks.Heartbeat([peer], 2)
    hours = iter(range(0, 10**9, 3600))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(hours)))
    assert heart.beat() == ""
    theirs.send(b"\n")
    monkeypatch.undo()
    assert listen(heart) == heart.beat() == ""


def test_what_rank_0_finds_out_it_passes_on(monkeypatch):
    dead, its_end = pair(1)
    its_end.close()
    alive, theirs = pair(2)
    said = []
    ended = []
    monkeypatch.setattr(ranks, "write_stderr", said.append)
    monkeypatch.setattr(os, "_exit", ended.append)
    heart = ranks.Heartbeat([dead, alive], 45)
    heart.leave("rank 1 is gone")
    other = ranks.Heartbeat([ranks.Peer(0, theirs, "")], 45)
    assert listen(other) == "rank 1 is gone"
    assert ended == [1]
    assert said[0].startswith("error: rank 1 is gone; this rank leaves too")
    heart.part()  # one that has parted is not ended any more
    heart.leave("rank 2 is gone")
    assert ended == [1]


def test_rank_0_leaves_after_the_others_have(monkeypatch):
    """Of the one that is stopped no end comes."""
    pairs = [pair(rank) for rank in (1, 2, 3)]
    heart = ranks.Heartbeat([peer for peer, _ in pairs], 45)
    heard = []

    def go(theirs):
        other = ranks.Heartbeat([ranks.Peer(0, theirs, "")], 45)
        heard.append(other.listen(PATIENCE))  # returns with the verdict
        theirs.close()

    there = []

    def leave(status):
        there.extend(peer.rank for peer, _ in pairs if not peer.ended)

    monkeypatch.setattr(ranks, "write_stderr", str)
    monkeypatch.setattr(ranks, "GRACE", PATIENCE)
    monkeypatch.setattr(os, "_exit", leave)
    threads = [threading.Thread(target=go, args=(theirs,)) for _, theirs in pairs[1:]]
    for thread in threads:
        thread.start()
    heart.leave("rank 1 has not been heard")
    assert there == [1]
    assert heard == ["rank 1 has not been heard"] * 2


@pytest.mark.parametrize("beats", range(4))  # TCP acknowledges the first ones sooner
def test_a_verdict_arrives_though_the_other_sides_beat_was_never_read(beats, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks.send_at_once(listener)
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    heart = ranks.Heartbeat([ranks.Peer(1, ours, "")], 45)
    other = ranks.Heartbeat([ranks.Peer(0, theirs, "")], 45)
    for _ in range(beats):
        for side in (heart, other):
            side.beat()
        for side in (heart, other):
            assert listen(side) == ""
    monkeypatch.setattr(ranks, "write_stderr", str)
    monkeypatch.setattr(os, "_exit", lambda status: ours.close())  # as the system does it
    other.beat()
    heart.beat()
    heart.leave("rank 2 is gone")
    assert other.listen(10) == "rank 2 is gone"


# --- real ranks

SILENCE = 8  # beats; fewer, and a machine that is busy with other things could look dead


def on_a_rank(doing: dict) -> None:
    """doing: what a rank does once all have started, of those that do not wait in a collective."""
    rank = ranks.start_distributed(silence=SILENCE).rank
    dist.barrier()
    if doing.get(rank) == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if doing.get(rank) == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if doing.get(rank) == "is busy":
        time.sleep(10_000)  # seconds; where a gloo collective would notice by itself
    dist.all_reduce(torch.ones(1))
    ranks.leave_together()


def run(size: int, doing: dict, folder: Path) -> tuple[list, list[str]]:
    """Exit statuses, None for a rank that is stopped, and what each said."""
    logs = [folder / f"{rank}.log" for rank in range(size)]
    processes = child.start_ranks(size, on_a_rank, doing, logs=logs)
    statuses = []
    for rank, process in enumerate(processes):
        if doing.get(rank) == "stops":
            statuses.append(None)
        else:
            statuses.append(child.status(process, 240))
    for process in processes:
        process.kill()
    return statuses, [log.read_text() for log in logs]


@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_stopped_rank_ends_the_others_in_the_middle_of_a_collective(stopped, tmp_path):
    statuses, said = run(3, {stopped: "stops"}, tmp_path)
    for rank in {0, 1, 2} - {stopped}:
        assert statuses[rank] == 1
        (sentence,) = [line for line in said[rank].splitlines() if line.startswith("error: ")]
        assert f"error: rank {stopped} ({socket.gethostname()}, process " in sentence
        assert f"has not been heard for {SILENCE} s" in sentence


def test_a_killed_rank_ends_the_others_wherever_they_are(tmp_path):
    statuses, said = run(3, {0: "is busy", 1: "is busy", 2: "dies"}, tmp_path)
    assert statuses == [1, 1, -signal.SIGKILL]
    for sentences in said[:2]:
        assert f"error: rank 2 ({socket.gethostname()}, process " in sentences
        assert "is gone; this rank leaves too" in sentences


def test_ranks_that_are_done_end_well(tmp_path):
    statuses, said = run(2, {}, tmp_path)
    assert statuses == [0, 0], said
