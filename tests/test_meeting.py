"""Ranks that were started by hand meet, or name the one that does not come."""

import os

import child
import pytest
import torch

import common
import ranks


def meet(rank: int, environment: dict, seconds: float) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    ranks.MEETING_SECONDS = seconds
    common.script(lambda argv: print(ranks.start_distributed()[:2]), ())


def count_threads(asked: dict) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update(asked)
    torch.set_num_threads(3)
    ranks.usable_cores = lambda: 2  # of a container
    ranks.start_distributed()
    print("threads:", torch.get_num_threads())


@pytest.fixture
def environment():
    port = str(child.free_port())
    return {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.parametrize(
    "come, missing",
    [
        ([0], "missing after 3 s: 1, 2"),
        ([1], "rank 0 is not there"),
        ([0, 2], "missing after 3 s: 1"),
    ],
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


def compare_notes(rank: int, environment: dict, told: dict) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))

    def work(argv) -> None:
        ranks.start_distributed()
        if version := told.pop("a fake version of deepspeed", ""):
            ranks.deepspeed.__version__ = version
        ranks.check_alike(told)
        print("alike")

    common.script(work, ())


@pytest.mark.parametrize(
    "last, words",
    [
        ({"seed": 1, "max_steps": 2}, "alike"),
        (
            {"seed": 1, "max_steps": 3},
            "rank 2 was started with max_steps=3 and rank 0 with 2",
        ),
        # with other code
        (
            {"seed": 1, "max_steps": 2, "new": 5},
            "rank 2 was started with new=5 and rank 0 with None",
        ),
        ({"seed": 1}, "rank 2 was started with max_steps=None and rank 0 with 2"),
        (
            {"seed": 1, "max_steps": 2, "a fake version of deepspeed": "0.1"},
            "rank 2 was started with deepspeed='0.1' and rank 0 with ",
        ),
    ],
)
def test_ranks_that_were_started_otherwise_stop_before_they_wait_for_each_other(
    last, words, environment, tmp_path
):
    logs = [tmp_path / str(rank) for rank in range(3)]
    told = [{"seed": 1, "max_steps": 2}] * 2 + [last]
    children = [
        child.start(compare_notes, rank, environment, told[rank], log=logs[rank])
        for rank in range(3)
    ]
    status = 0 if words == "alike" else 1
    assert [child.status(process, 120) for process in children] == [status] * 3
    assert words in logs[0].read_text()


@pytest.mark.parametrize("sources", [1, 9, 90])
def test_ranks_that_differ_at_the_end_of_a_mixture_are_told_where(sources, monkeypatch):
    mixture = [{"name": f"/data/sums_of_{i}.jsonl", "weight": 1.0} for i in range(sources)]
    other = mixture[:-1] + [mixture[-1] | {"weight": 2.0}]
    monkeypatch.setattr(ranks, "gather_objects", lambda told: [told, told | {"dataset": other}])
    with pytest.raises(common.RunStopped) as stopped:
        ranks.check_alike({"dataset": mixture})
    assert "'weight': 1.0}]: start" in str(stopped.value)
    assert "'weight': 2.0}] and rank 0" in str(stopped.value)
    assert len(str(stopped.value)) < common.LONGEST_ERROR  # else the middle would be cut out
    assert str(stopped.value).count("=...") == (sources > 1)


@pytest.mark.parametrize("asked, threads", [({}, 2), ({"OMP_NUM_THREADS": "3"}, 3)])
def test_a_rank_has_no_more_threads_than_cores_it_may_use_unless_it_was_told(
    asked, threads, tmp_path
):
    log = tmp_path / "log"
    assert child.status(child.start(count_threads, asked, log=log), 120) == 0, log.read_text()
    assert f"threads: {threads}" in log.read_text()
