"""rollout_engine="server": how weights get to servers, as files (weight_sync="disk") or over NCCL,
and that no completion counts that other weights have made."""

import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import child
import httpx
import pytest
import torch
from deadlines import PATIENCE
from engine_worker import PROMPTS
from safetensors.torch import load_file
from servers import CONFIG, any_weights, bare, expected, request
from stand_ins import usual
from transformers import AutoModelForCausalLM

import rollout
from common import RolloutsLost, RunStopped, UserError
from policy import named_weights
from server import disk, nccl

pytest_plugins = ["server_fixtures"]

# --- as files


def weights_in(folder: Path) -> dict:
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def test_weights_are_written_once_read_by_every_server_and_then_removed(
    world, make, stand_in, tmp_path
):
    seen = []  # (folder, {name: tensor}), each time a server reads them

    def reload(request):
        folder = Path(request.body["kwargs"]["weights_path"])
        seen.append((folder, weights_in(folder)))
        return 200, {}, {}

    other = {"/collective_rpc": reload}
    one = stand_in(other=other)
    two = stand_in(other=other)
    place = tmp_path / "shm"
    engine = make(one, two, weight_sync=str(place))
    engine.sync(any_weights())
    folders = [folder for folder, _ in seen]
    assert len(folders) == 4
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert not any(place.iterdir())  # a run that is killed now leaves none behind
    for _, weights in seen:
        assert weights.keys() == dict(any_weights()).keys()
        for name, tensor in any_weights():
            assert torch.equal(weights[name], tensor)
    # nothing is asked for between new weights and their name
    calls = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    for each in (one, two):
        assert each.paths(*calls, "/v1/completions") == calls * 2
        assert each.version == engine.version == folders[2].name
    engine.close()
    assert not place.exists()
    place.mkdir()  # by the user, for the next run
    make(one, two, weight_sync=str(place)).close()
    assert place.exists()


def test_a_server_is_told_a_place_that_does_not_depend_on_where_it_was_started(
    world, make, stand_in, tmp_path, monkeypatch
):
    one = stand_in()
    monkeypatch.chdir(tmp_path)
    engine = make(one, weight_sync="here")
    (body,) = one.bodies("/collective_rpc")
    told = Path(body["kwargs"]["weights_path"])
    assert told.is_absolute() and told == (tmp_path / "here" / engine.version).resolve()


def test_a_run_that_ends_removes_weights_of_its_own_and_no_others(world, make, stand_in, tmp_path):
    """The folder may be shared, and a server be reading them."""
    engine = make(stand_in(), weight_sync=str(tmp_path / "shm"))
    (tmp_path / "shm" / f"{engine.name}-7").mkdir(parents=True)
    others = tmp_path / "shm" / "elsewhere-1-0123abcd-7"
    others.mkdir()
    engine.close()
    assert list((tmp_path / "shm").iterdir()) == [others]


def test_a_script_that_does_not_train_gives_the_servers_its_model(
    world, stand_in, tiny_model_dir, tmp_path, lm, monkeypatch
):
    """They may hold another: what is evaluated would be that one."""
    seen = {}

    def reload(request):
        seen.update(weights_in(Path(request.body["kwargs"]["weights_path"])))
        return 200, {}, {}

    server = stand_in(other={"/collective_rpc": reload})
    c = CONFIG | {"model": str(tiny_model_dir), "dtype": "float32", "rollout_engine": "server"}
    c |= {"rollout_server": server.url, "output_dir": str(tmp_path / "run")}
    monkeypatch.setattr(rollout, "dist", world)
    with pytest.raises(UserError, match="weight_sync='/proc/weights' can't be written"):
        rollout.start_sampler(c | {"weight_sync": "/proc/weights"}, torch.device("cpu"))
    sampler = rollout.start_sampler(c, torch.device("cpu"))
    for name, weight in named_weights(lm, 0):
        assert torch.equal(seen[name], weight), name
    sampler.close()


def test_large_weights_come_in_several_files(monkeypatch, tmp_path):
    monkeypatch.setattr(disk, "SHARD", 100)
    tensors = []
    for i, numbers in enumerate((10, 10, 10, 100, 1)):  # 40, 40, 40, 400, 4 bytes
        tensors.append((f"t{i}", torch.full((numbers,), float(i))))
    assert disk.write_shards(iter(tensors), tmp_path / "w") == ""
    files = [sorted(load_file(file)) for file in sorted((tmp_path / "w").iterdir())]
    assert files == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]


def test_ranks_that_write_nothing_gather_all_weights_too(tmp_path):
    weights = any_weights()
    assert disk.write_shards(weights, None) == ""
    assert next(weights, None) is None
    assert not any(tmp_path.iterdir())


def test_two_processes_on_a_host_with_dots_in_its_name_write_to_different_places(tmp_path):
    (tmp_path / "node.tmp").touch()  # what node.cluster-1 and node.cluster-2 must not share
    assert disk.write_shards(any_weights(), tmp_path / "node.cluster-1") == ""
    assert disk.write_shards(any_weights(), tmp_path / "node.cluster-2") == ""


@pytest.mark.parametrize(
    "path, answer",
    [
        ("/collective_rpc", (500, {"error": "no space"}, {})),
        ("/reset_prefix_cache", (200, {"success": False}, {})),
        ("/reset_prefix_cache", (200, [1], {})),
        ("/update_weight_version", (500, {}, {})),
    ],
)
def test_a_server_that_refuses_the_weights_is_left_out_and_the_other_used(
    path, answer, world, make, stand_in, capsys
):
    bad = stand_in(other={path: lambda request: answer})
    engine = make(bad, stand_in())
    assert list(engine.missing) == [bad.url]
    assert "left out until a sync reaches it" in capsys.readouterr().out
    assert bare(engine.generate(PROMPTS, 2, request(3))) == expected()
    assert not bad.completions()
    assert engine.take_metrics()["rollout/servers"] == 1
    engine.sync(any_weights())
    assert capsys.readouterr().out == ""  # told once, not after every step
    del bad.other[path]
    engine.sync(any_weights())
    assert f"in use again: {bad.url}" in capsys.readouterr().out
    engine.generate(PROMPTS, 2, request(3))
    assert bad.completions()


def test_a_server_that_was_started_again_is_checked_before_it_gets_weights(
    world, make, stand_in, capsys
):
    back = stand_in()
    engine = make(back, stand_in())
    engine.sync(any_weights())
    # as a new one reports it
    back.version = "default"
    back.settings["model_config"]["logprobs_mode"] = "raw_logprobs"
    engine.sync(any_weights())
    assert "logprobs_mode='raw_logprobs'" in engine.missing[back.url]
    assert bare(engine.generate(PROMPTS, 2, request(3))) == expected()
    assert not back.completions()
    back.settings["model_config"]["logprobs_mode"] = "processed_logprobs"
    engine.sync(any_weights())
    assert not engine.missing


def test_weights_that_somebody_else_has_changed_are_noticed_before_and_after_sampling(
    world, naps, make, stand_in, capsys
):
    one = stand_in()
    two = stand_in()
    engine = make(one, two)
    path = "/update_weight_version"
    httpx.post(one.url + path, json={"new_version": "theirs"}, timeout=PATIENCE, trust_env=False)
    assert bare(engine.generate(PROMPTS, 2, request(3))) == expected()
    assert not one.completions()
    told = f"{one.url} holds weights 'theirs', not .*another run uses it"
    assert re.search(told, capsys.readouterr().out)

    def changed_while_it_samples(request):
        one.version = "theirs"
        return usual(request)

    engine.sync(any_weights())
    one.plan = [changed_while_it_samples]
    assert len(engine.generate(PROMPTS[:2], 2, request(2))) == 4
    assert len(one.completions()) == 1
    assert engine.take_metrics()["rollout/failed"] == 1
    two.version = "theirs"
    with pytest.raises(RolloutsLost, match=r"no rollout server is left.*holds weights 'theirs'"):
        engine.generate(PROMPTS, 2, request(3))


def write_shards_with_room_for_30_kb(folder: Path, result: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    tensors = iter([("large", torch.ones(100_000)), ("small", torch.ones(1))])
    problem = disk.write_shards(tensors, folder / "w")
    rest = next(tensors, "used up")
    left = sorted(path.name for path in folder.iterdir())
    result.write_text(f"{problem}\n{rest}\n{left}")


def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(tmp_path):
    """A limit on file size stands in for it. The iterator is used up all the same: other ranks
    gather with it."""
    folder = tmp_path / "weights"
    folder.mkdir()
    result = tmp_path / "result"
    process = child.start(write_shards_with_room_for_30_kb, folder, result)
    assert child.status(process) == 0
    problem, rest, left = result.read_text().rsplit("\n", 2)
    assert str(folder / "w") in problem
    assert "\n" not in problem
    assert rest == "used up"
    assert left == "[]"


def test_weights_that_can_not_be_written_stop_the_run_with_a_sentence(
    world, make, stand_in, tmp_path
):
    blocked = tmp_path / "file"
    blocked.touch()
    words = r"weight_sync: the weights could not be written: .*file"
    with pytest.raises(RunStopped, match=words):
        make(stand_in(), weight_sync=str(blocked))


def test_what_a_killed_process_left_is_removed_at_the_start_and_that_of_a_living_one_kept(
    world, make, stand_in, tmp_path
):
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = socket.gethostname()
    kept = {f"{host}-{os.getpid()}-89abcdef-7", "elsewhere-1-0123abcd-7"}
    kept |= {f"{host}-1-{gone.pid}-0123abcd-7"}  # of the host that is called {host}-1
    dead = {f"{host}-{gone.pid}-0123abcd-7", f"{host}-{gone.pid}-0123abcd-8.tmp"}
    folder = tmp_path / "run" / "weights"
    for name in kept | dead:
        (folder / name).mkdir(parents=True)
    make(stand_in(), synced=False)
    assert {path.name for path in folder.iterdir()} == kept


# --- over NCCL: the control calls; the broadcast itself needs GPUs

BEGIN = "/init_weight_transfer_engine"
CALLS = [
    BEGIN,
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/update_weight_version",
]


class FakeNccl:
    """vLLM's own trainer side, with this in place of its communicator, which needs GPUs."""

    def __init__(self, monkeypatch):
        from vllm.distributed.weight_transfer import nccl_engine

        self.opened = []  # a group each
        self.closed = []
        self.sent = []  # [(name, shape)] of each update
        monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", self.open)
        monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", self.broadcast)
        sender = nccl_engine.NCCLTrainerWeightTransferEngine
        monkeypatch.setattr(sender, "_post_send_sync", lambda self: None)

    def open(self, info):
        self.opened.append(info)
        return SimpleNamespace(destroy=lambda: self.closed.append(info))

    def broadcast(self, iterator, group, **settings):
        self.sent.append(shapes(iterator))


def shapes(named) -> list[tuple]:
    return [(name, tuple(tensor.shape)) for name, tensor in named]


def places(servers: list) -> list[int]:
    """Of the servers in the group that was made last."""
    return [each.bodies(BEGIN)[-1]["init_info"]["rank_offset"] for each in servers]


@pytest.fixture
def three(stand_in) -> list:
    """Servers with 3, 2 and 2 workers."""
    servers = [stand_in() for _ in range(3)]
    servers[0].other["/get_world_size"] = lambda request: (200, {"world_size": 3}, {})
    return servers


@pytest.fixture(params=["tiny_model_dir", "untied_model_dir"])
def model(request) -> Path:
    return request.getfixturevalue(request.param)


def test_every_server_gets_its_place_in_the_group_and_the_calls_come_in_order(
    model, world, make, three, monkeypatch
):
    group = FakeNccl(monkeypatch)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    named = shapes(named_weights(lm, 0))
    assert "lm_head.weight" in dict(named)
    assert len(dict(named)) == len(named)
    engine = make(*three, synced=False, model=model, weight_sync="nccl")
    assert [(meta.name, meta.shape) for meta in engine.transfer.metadata()] == named

    engine.sync(named_weights(lm, 0))
    assert places(three) == [1, 4, 6]
    assert group.opened[0].world_size == 8
    assert group.opened[0].rank == 0
    for each in three:
        assert each.paths(*CALLS) == CALLS
        assert each.version == engine.version
    assert group.sent == [named]
    told = three[1].bodies("/update_weights")[0]["update_info"]
    assert list(zip(told["names"], map(tuple, told["shapes"]))) == named
    assert set(told["dtype_names"]) == {"float32"}
    assert bare(engine.generate(PROMPTS, 2, request(3))) == expected()


def test_a_server_that_does_not_say_how_many_workers_it_has_stops_the_run(
    world, make, three, lm, monkeypatch
):
    FakeNccl(monkeypatch)
    three[1].other["/get_world_size"] = lambda request: (200, {}, {})
    engine = make(*three, synced=False, weight_sync="nccl")
    with pytest.raises(RunStopped, match=f"{three[1].url}/get_world_size gave {{}}, which"):
        engine.sync(named_weights(lm, 0))


def test_the_group_is_made_anew_when_other_servers_take_part(
    world, make, three, tiny_model_dir, lm, monkeypatch
):
    group = FakeNccl(monkeypatch)
    engine = make(*three, synced=False, weight_sync="nccl")
    engine.sync(named_weights(lm, 0))
    engine.sync(named_weights(lm, 0))  # the group stays
    assert len(group.opened) == 1
    assert three[2].paths(*CALLS) == CALLS + CALLS[1:]

    three[0].close()
    engine.sync(named_weights(lm, 0))  # without a server that is gone
    assert len(group.opened) == 2
    assert group.opened[1].world_size == 5
    assert list(engine.missing) == [three[0].url]
    assert places(three[1:]) == [1, 3]

    # was started again: it is no longer in the group, a broadcast would wait for it for ever
    three[1].version = "default"
    engine.sync(named_weights(lm, 0))
    assert len(group.opened) == 3
    assert list(engine.missing) == [three[0].url]
    leave = "/shutdown_weight_transfer_engine"
    assert three[2].paths(leave, BEGIN) == [leave, BEGIN] * 3  # the old group first

    three[1].close()
    three[2].close()
    engine.sync(named_weights(lm, 0))
    assert len(engine.missing) == 3
    assert len(group.sent) == 4
    assert group.closed == group.opened[:2]
    with pytest.raises(RolloutsLost, match="no rollout server is left"):
        engine.generate(PROMPTS, 2, request(3))


def test_a_server_that_keeps_its_old_cache_is_left_out_over_nccl_too(
    world, make, three, lm, monkeypatch
):
    FakeNccl(monkeypatch)
    three[1].other["/reset_prefix_cache"] = lambda request: (200, {"success": False}, {})
    engine = make(*three, synced=False, weight_sync="nccl")
    engine.sync(named_weights(lm, 0))
    assert list(engine.missing) == [three[1].url]
    assert [server.url for server in engine.live] == [three[0].url, three[2].url]


@pytest.mark.parametrize("path", [BEGIN, "/update_weights"])
def test_an_error_of_a_server_is_told_while_the_trainer_waits_in_nccl(
    path, world, make, three, lm, monkeypatch
):
    from vllm.distributed.weight_transfer import nccl_engine

    group = FakeNccl(monkeypatch)
    told = []
    left = threading.Event()

    def die(sentence, status):
        told.append((sentence, status))
        left.set()  # the process would be gone: what waits need wait no longer

    def until_it_leaves(*args, **kwargs):
        assert left.wait(PATIENCE)
        return SimpleNamespace(destroy=lambda: None)

    monkeypatch.setattr(nccl, "die", die)
    waits = "open_trainer_endpoint" if path == BEGIN else "packed_nccl_broadcast_producer"
    monkeypatch.setattr(nccl_engine, waits, until_it_leaves)
    three[1].other[path] = lambda request: (500, {"error": "out of memory"}, {})
    engine = make(*three, synced=False, weight_sync="nccl")
    engine.sync(named_weights(lm, 0))
    ((sentence, status),) = told
    assert status == 1
    assert three[1].url in sentence and "500" in sentence and "start the servers again" in sentence
    assert all(info.packed_buffer_size_bytes == nccl.PART for info in group.opened)


def test_the_deadline_is_for_the_meeting_and_for_all_weights(world, make, three, lm, monkeypatch):
    from vllm.distributed.weight_transfer import nccl_engine

    group = FakeNccl(monkeypatch)
    happened = []

    @contextmanager
    def deadline(seconds):
        happened.append(f"{seconds:.0f} s begin")
        yield
        happened.append("they end")

    def noted(word, work):
        return lambda *args, **settings: happened.append(word) or work(*args, **settings)

    monkeypatch.setattr(nccl, "deadline", deadline)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", noted("met", group.open))
    monkeypatch.setattr(
        nccl_engine, "packed_nccl_broadcast_producer", noted("sent", group.broadcast)
    )
    engine = make(*three, synced=False, weight_sync="nccl")
    engine.sync(named_weights(lm, 0))
    assert happened == [f"{engine.seconds:.0f} s begin", "met", "sent", "they end"]


def test_without_a_route_to_elsewhere_servers_meet_the_trainer_by_its_host_name(monkeypatch):
    monkeypatch.setattr("vllm.utils.network_utils.get_ip", lambda: "0.0.0.0")
    host, port = nccl.own_address()
    assert host == socket.gethostname() and 0 < port < 2**16


def wait_for_ever() -> None:
    with nccl.deadline(0.2):
        time.sleep(100)


def test_a_broadcast_that_nobody_takes_ends_the_process_with_a_sentence(tmp_path):
    log = tmp_path / "log"
    assert child.status(child.start(wait_for_ever, log=log)) == 1
    assert "error: weight_sync='nccl'" in log.read_text()
    assert "0 s (rollout_timeout)" in log.read_text()


def test_a_broadcast_that_is_done_leaves_the_process_alone():
    before = threading.active_count()
    with nccl.deadline(60):
        assert threading.active_count() == before + 1
    end = time.monotonic() + PATIENCE
    while threading.active_count() > before:
        assert time.monotonic() < end
        time.sleep(0.01)
