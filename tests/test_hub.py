"""push_to_hub through the real huggingface_hub client, to a stand-in for the hub that runs here."""

import base64
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from deadlines import PATIENCE
from exact_matrix import ROOT, without_torchrun
from row_files import refusal

import checkpoint
import preflight
import train
from common import RunStopped, UserError
from journal import Timer

FLAGS = [
    "--prompts_per_step=2",
    "--num_generations=2",
    "--max_completion_length=8",
    "--max_prompt_length=32",
    "--rollout_engine=hf",
    "--eval_steps=0",
    "--max_steps=2",
    "--reward_workers=0",
    "--save_steps=1",
    "--save_total_limit=1",
    "--zero_stage=0",
    "--push_to_hub=me/tiny",
]
TOKEN = "hf_" + "secretsecret" * 3


class StandIn(BaseHTTPRequestHandler):
    """As much of the hub as an upload needs: create, preupload, LFS batch, LFS put, commit."""

    def answer(self, found: dict, status: int = 200) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self):
        data = self.body()
        self.server.blobs[hashlib.sha256(data).hexdigest()] = data
        self.answer({})

    def do_POST(self):
        data = self.body()
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.path in self.server.refuse:
            self.answer({"error": "You don't have the rights"}, 403)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(data))
            self.answer({"url": f"{self.here()}/me/tiny", "name": "me/tiny"})
        elif "/preupload/" in self.path:
            self.answer({"files": [self.mode(file) for file in json.loads(data)["files"]]})
        elif self.path.endswith("/objects/batch"):
            objects = [self.place(file) for file in json.loads(data)["objects"]]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            self.server.may_commit.wait(120)
            self.commit([json.loads(line) for line in data.splitlines()])
        else:
            self.do_GET()

    def here(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def mode(self, file: dict) -> dict:
        large = file["path"].endswith(".safetensors")
        mode = "lfs" if large else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def place(self, file: dict) -> dict:
        """Where a large file is to be put."""
        upload = {"href": f"{self.here()}/put/{file['oid']}"}
        return {"oid": file["oid"], "size": file["size"], "actions": {"upload": upload}}

    def commit(self, lines: list[dict]) -> None:
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
        self.server.commits.append((summary, files))
        answer = {"commitOid": "abc", "pullRequestUrl": None, "success": True}
        self.answer({"commitUrl": f"{self.here()}/me/tiny/commit/abc", **answer})

    def do_GET(self):
        self.answer({"error": f"the stand-in does not know {self.path}"}, 404)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.commits = []  # (summary, {path: contents})
    server.created = []
    server.blobs = {}  # sha256: contents
    server.tokens = set()
    server.refuse = ()  # paths
    server.may_commit = threading.Event()
    server.may_commit.set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.may_commit.set()
    server.shutdown()


def environment(hub) -> dict:
    env = without_torchrun()
    env.pop("HF_HUB_OFFLINE", None)
    env["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.server_port}"
    env["HF_TOKEN"] = TOKEN
    env["HF_HUB_DISABLE_XET"] = "1"
    return env


def let_commit_once_step_2_is_saved(hub, folder: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not (folder / "step_000002").exists() and time.monotonic() < end:
        time.sleep(0.05)
    hub.may_commit.set()


def test_a_slow_hub_does_not_hold_up_the_run_and_models_arrive_whole_and_the_token_is_nowhere_else(
    hub, tiny_model_dir, tmp_path
):
    """The hub answers the first upload only when the run has finished its last step."""
    folder = tmp_path / "run"
    hub.may_commit.clear()
    waits = threading.Thread(target=let_commit_once_step_2_is_saved, args=(hub, folder))
    waits.start()
    command = [sys.executable, "train.py", "config/countdown_tiny.py", *FLAGS]
    command += [f"--model={tiny_model_dir}", f"--output_dir={folder}"]
    env = environment(hub)
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    waits.join()
    assert done.returncode == 0, done.stderr[-3000:]
    assert hub.created[0]["name"] == "tiny" and hub.created[0]["visibility"] == "private"
    assert [summary for summary, _ in hub.commits] == ["step_000001", "step_000002"]
    # the first was pruned while it was on its way
    assert not (folder / "step_000001").exists()
    assert "model.safetensors" in hub.commits[0][1]

    _, files = hub.commits[1]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    for name, contents in files.items():
        assert contents == (folder / "step_000002" / name).read_bytes()
        ours = ("engine", "rng_", "controller", "manifest", "train_config", "trained")
        assert not name.startswith(ours)

    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.stdout and TOKEN not in done.stderr
    for path in folder.rglob("*.json*"):
        assert TOKEN not in path.read_text(errors="replace")
    assert not list(folder.glob("push_*"))


@pytest.fixture
def hub_here(hub, monkeypatch):
    """A Hub in this process that talks to the stand-in; conftest keeps all else off the network."""
    api = huggingface_hub.HfApi(endpoint=f"http://127.0.0.1:{hub.server_port}", token=TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back at the end


def checkpoints_in(folder: Path, model: Path, number: int) -> list[Path]:
    paths = [folder / f"step_{step:06d}" for step in range(1, number + 1)]
    for path in paths:
        shutil.copytree(model, path)
    return paths


def pushed(hub) -> list[str]:
    return [summary for summary, _ in hub.commits]


def test_a_repository_that_is_refused_is_a_sentence_before_the_run_begins(hub, hub_here, tmp_path):
    hub.refuse = ("/api/repos/create",)
    with pytest.raises(UserError, match=r"push_to_hub='me/tiny'.*rights.*HF_TOKEN") as caught:
        checkpoint.Hub("me/tiny", tmp_path)
    assert TOKEN not in str(caught.value) and "\n" not in str(caught.value)
    hub.shutdown()
    hub.server_close()
    with pytest.raises(UserError, match=r"push_to_hub='me/tiny'"):
        checkpoint.Hub("me/tiny", tmp_path)


def test_a_last_upload_that_fails_is_an_error_that_says_how_to_do_it_by_hand(
    hub, hub_here, tiny_model_dir, tmp_path
):
    pusher = checkpoint.Hub("me/tiny", tmp_path)
    (path,) = checkpoints_in(tmp_path, tiny_model_dir, 1)
    hub.refuse = ("/api/models/me/tiny/commit/main",)
    pusher.push(path)
    words = r"step_000001 was not pushed to me/tiny.*hf upload me/tiny"
    with pytest.raises(RunStopped, match=words):
        pusher.finish()
    assert not list(tmp_path.glob("push_*"))


def test_an_earlier_upload_that_fails_is_said_and_costs_nothing_but_itself(
    hub, hub_here, tiny_model_dir, tmp_path, capsys
):
    pusher = checkpoint.Hub("me/tiny", tmp_path)
    first, second = checkpoints_in(tmp_path, tiny_model_dir, 2)
    hub.refuse = ("/api/models/me/tiny/commit/main",)
    pusher.push(first)
    assert pusher.upload.future.exception(120)
    hub.refuse = ()
    pusher.push(second)
    pusher.finish()
    assert "step_000001 was not pushed" in capsys.readouterr().out
    assert pushed(hub) == ["step_000002"]
    assert not list(tmp_path.glob("push_*"))


def test_a_run_that_is_stopped_says_how_an_upload_ended(
    hub, hub_here, tiny_model_dir, tmp_path, capsys
):
    pusher = checkpoint.Hub("me/tiny", tmp_path)
    (path,) = checkpoints_in(tmp_path, tiny_model_dir, 1)
    hub.refuse = ("/api/models/me/tiny/commit/main",)
    pusher.push(path)
    assert pusher.upload.future.exception(120)
    pusher.leave()
    assert "warning: " in (said := capsys.readouterr().out) and "was not pushed" in said
    assert not list(tmp_path.glob("push_*"))


def test_a_file_system_without_links_gets_copies_and_one_without_room_a_warning(
    hub, hub_here, tiny_model_dir, tmp_path, monkeypatch, capsys
):
    pusher = checkpoint.Hub("me/tiny", tmp_path)
    (path,) = checkpoints_in(tmp_path, tiny_model_dir, 1)

    def no(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no)
    pusher.push(path)
    pusher.finish()
    assert pushed(hub) == ["step_000001"] and "model.safetensors" in hub.commits[0][1]
    monkeypatch.setattr(shutil, "copy2", no)
    pusher.push(path)
    pusher.finish(stop=False)
    assert "step_000001 was not pushed" in capsys.readouterr().out
    assert not list(tmp_path.glob("push_*"))


def test_what_comes_while_an_upload_is_under_way_is_left_out_unless_it_is_the_last(
    hub, hub_here, tiny_model_dir, tmp_path, capsys
):
    pusher = checkpoint.Hub("me/tiny", tmp_path)
    first, second, shallow = checkpoints_in(tmp_path, tiny_model_dir, 3)
    (shallow / "model.safetensors").rename(tmp_path / "elsewhere")
    hub.may_commit.clear()
    for path in (first, second, shallow):
        pusher.push(path)
    hub.may_commit.set()
    pusher.push(second, last=True)
    pusher.finish()
    assert pushed(hub) == ["step_000001", "step_000002"]
    assert capsys.readouterr().out.count("not pushed") == 1


# A process whose upload the hub does not answer.
PUSHES = """
import sys
from pathlib import Path
import checkpoint
hub = checkpoint.Hub("me/tiny", Path(sys.argv[1]).parent)
hub.push(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "end, status, words", [("hub.leave()", 0, "the run ends before"), ("1 / 0", 1, "")]
)
def test_neither_a_run_that_is_stopped_nor_one_that_crashes_waits_for_an_upload(
    end, status, words, hub, tiny_model_dir, tmp_path
):
    """Python would wait at its exit for the thread of huggingface_hub."""
    (path,) = checkpoints_in(tmp_path, tiny_model_dir, 1)
    hub.may_commit.clear()
    command = [sys.executable, "-c", PUSHES + end, path]
    env = environment(hub)
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == status, done.stderr
    assert words in done.stdout and ("ZeroDivisionError" in done.stderr) == (status == 1)
    assert not hub.commits


def test_a_finished_run_that_is_started_again_uploads_its_last_checkpoint(tmp_path, monkeypatch):
    """The upload may have been cut off when the run was killed in its last minute."""
    pushed = []
    hub = SimpleNamespace(push=lambda path, last: pushed.append((path.name, last)))
    config = {"num_generations": 2, "rollout_ahead": 0, "max_logp_difference": -1, "max_steps": 3}
    config["eval_steps"] = 0
    run = SimpleNamespace(
        config=config,
        step=3,
        stopping=False,
        timer=Timer(),
        world=SimpleNamespace(rank=0),
        folder=tmp_path,
        hub=hub,
        saved_step=3,
    )
    for name in ("prove_sync", "finish"):
        monkeypatch.setattr(train, name, lambda run: None)
    newest = [tmp_path / "step_000003"]
    monkeypatch.setattr(checkpoint, "latest", lambda folder: newest[0])
    train.train(run)
    assert pushed == [("step_000003", True)]
    # it went on from a checkpoint of another name: the newest is an older one, or there is none
    for newest[0] in (tmp_path / "step_000002", None):
        train.train(run)
    assert len(pushed) == 1


def test_a_damaged_generation_config_of_a_hubs_model_is_no_missing_one(tmp_path, monkeypatch):
    """A damaged file and a missing one are the same kind of error in transformers."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    copy = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    copy.mkdir(parents=True)
    refs = tmp_path / "models--a--b" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    assert preflight.generation_eos("a/b") is None
    (copy / "generation_config.json").write_text('{"eos')
    assert "generation_config.json" in refusal(preflight.generation_eos, "a/b")


def test_a_run_that_must_stop_says_that_its_upload_is_cut_off(tmp_path, monkeypatch):
    told = []
    hub = SimpleNamespace()
    hub.abandon, hub.leave = (lambda: told.append("abandon")), (lambda: told.append("leave"))
    monkeypatch.setattr(train, "start", lambda c: SimpleNamespace(hub=hub))

    def stop(run):
        raise RunStopped("memory ran out")

    c = {"output_dir": str(tmp_path / "run")}
    monkeypatch.setattr(train, "train", stop)
    with pytest.raises(RunStopped, match="memory ran out"):
        train.main(c)
    assert told == ["abandon"]
    monkeypatch.setattr(train, "train", lambda run: None)
    train.main(c)
    assert told == ["abandon", "leave"]
