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

import huggingface_hub
import pytest

import checkpoint as push
from common import RunStopped, UserError

ROOT = Path(__file__).resolve().parent.parent
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
        here, data = f"http://127.0.0.1:{self.server.server_port}", self.body()
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.path in self.server.refuse:
            return self.answer({"error": "You don't have the rights"}, 403)
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(data))
            return self.answer({"url": f"{here}/me/tiny", "name": "me/tiny"})
        if "/preupload/" in self.path:
            modes = {
                file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular"
                for file in json.loads(data)["files"]
            }
            return self.answer(
                {
                    "files": [
                        {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}
                        for path, mode in modes.items()
                    ]
                }
            )
        if self.path.endswith("/objects/batch"):
            objects = [
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    "actions": {"upload": {"href": f"{here}/put/{o['oid']}"}},
                }
                for o in json.loads(data)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            time.sleep(self.server.slow)
            lines = [json.loads(line) for line in data.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            files |= {
                line["value"]["path"]: self.server.blobs[line["value"]["oid"]]
                for line in lines
                if line["key"] == "lfsFile"
            }
            self.server.commits.append(
                (next(line["value"]["summary"] for line in lines if line["key"] == "header"), files)
            )
            return self.answer(
                {
                    "commitUrl": f"{here}/me/tiny/commit/abc",
                    "commitOid": "abc",
                    "pullRequestUrl": None,
                    "success": True,
                }
            )
        self.answer({"error": f"the stand-in does not know {self.path}"}, 404)

    def do_GET(self):
        self.answer({"error": f"the stand-in does not know {self.path}"}, 404)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.commits, server.blobs, server.tokens, server.created, server.refuse, server.slow = (
        [],
        {},
        set(),
        [],
        (),
        0.0,
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def train(hub, model, folder: Path) -> subprocess.CompletedProcess:
    env = {
        key: value
        for key, value in os.environ.items()
        if key
        not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HF_HUB_OFFLINE")
    }
    env |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run(
        [
            sys.executable,
            "train.py",
            "config/countdown_tiny.py",
            f"--model={model}",
            f"--output_dir={folder}",
            *FLAGS,
        ],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_slow_hub_does_not_hold_up_the_run_models_arrive_whole_and_the_token_is_nowhere_but_in_the_requests(
    hub, tiny_model_dir, tmp_path
):
    hub.slow = 4.0
    done = train(hub, tiny_model_dir, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        hub.created[0]["name"] == "tiny"
        and hub.created[0]["visibility"] == "private"
        and hub.tokens == {f"Bearer {TOKEN}"}
    )
    assert [summary for summary, _ in hub.commits] == ["step_000001", "step_000002"]
    assert (
        not (tmp_path / "run" / "step_000001").exists() and "model.safetensors" in hub.commits[0][1]
    )  # pruned while it was on its way
    saved, files = tmp_path / "run" / "step_000002", hub.commits[1][1]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files) and all(
        files[name] == (saved / name).read_bytes() for name in files
    )
    assert not any(
        name.startswith(("engine", "rng_", "controller", "manifest", "train_config"))
        for name in files
    )
    texts = [
        done.stdout,
        done.stderr,
        *(path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*.json*")),
    ]
    assert not any(TOKEN in text for text in texts) and not list((tmp_path / "run").glob("push_*"))


@pytest.fixture
def own_endpoint(hub, monkeypatch):
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_OFFLINE", False
    )  # conftest keeps everything else off the network
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(
        push,
        "HfApi",
        lambda: huggingface_hub.HfApi(endpoint=f"http://127.0.0.1:{hub.server_port}", token=TOKEN),
    )


def test_a_repository_that_is_refused_is_a_sentence_before_the_run_begins(
    hub, own_endpoint, tmp_path
):
    hub.refuse = ("/api/repos/create",)
    with pytest.raises(UserError, match=r"push_to_hub='me/tiny'.*rights.*HF_TOKEN") as found:
        push.Hub("me/tiny", tmp_path)
    assert TOKEN not in str(found.value) and "\n" not in str(found.value)
    hub.shutdown()
    hub.server_close()
    with pytest.raises(UserError, match=r"push_to_hub='me/tiny'"):
        push.Hub("me/tiny", tmp_path)


@pytest.mark.parametrize("last", [True, False])
def test_an_upload_that_fails_is_said_and_costs_nothing_but_itself(
    last, hub, own_endpoint, tiny_model_dir, tmp_path, capsys
):
    pusher = push.Hub("me/tiny", tmp_path)
    checkpoints = [shutil.copytree(tiny_model_dir, tmp_path / f"step_00000{i}") for i in (1, 2)]
    hub.refuse = ("/api/models/me/tiny/commit/main",)
    pusher.push(checkpoints[0])
    if last:
        with pytest.raises(
            RunStopped, match=r"step_000001 was not pushed to me/tiny.*hf upload me/tiny"
        ):
            pusher.finish()
    else:
        while not pusher.going[1].done():
            time.sleep(0.05)
        hub.refuse = ()
        pusher.push(checkpoints[1])
        pusher.finish()
        assert "step_000001 was not pushed" in capsys.readouterr().out and [
            summary for summary, _ in hub.commits
        ] == ["step_000002"]
    assert not list(tmp_path.glob("push_*"))


def test_a_file_system_without_links_gets_copies_and_one_without_room_a_warning(
    hub, own_endpoint, tiny_model_dir, tmp_path, monkeypatch, capsys
):
    pusher, path = (
        push.Hub("me/tiny", tmp_path),
        shutil.copytree(tiny_model_dir, tmp_path / "step_000001"),
    )

    def no(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no)
    pusher.push(path)
    pusher.finish()
    assert [summary for summary, _ in hub.commits] == [
        "step_000001"
    ] and "model.safetensors" in hub.commits[0][1]
    monkeypatch.setattr(shutil, "copy2", no)
    pusher.push(path)
    pusher.finish(stop=False)
    assert "step_000001 was not pushed" in capsys.readouterr().out and not list(
        tmp_path.glob("push_*")
    )


def test_what_comes_while_an_upload_is_under_way_is_left_out_unless_it_is_the_last(
    hub, own_endpoint, tiny_model_dir, tmp_path, capsys
):
    pusher, hub.slow = push.Hub("me/tiny", tmp_path), 1.0
    checkpoints = [shutil.copytree(tiny_model_dir, tmp_path / f"step_00000{i}") for i in (1, 2, 3)]
    (checkpoints[2] / "model.safetensors").rename(tmp_path / "elsewhere")
    for path, last in zip(checkpoints, (False, False, False)):
        pusher.push(path, last)
    pusher.push(checkpoints[1], last=True)
    pusher.finish()
    assert [summary for summary, _ in hub.commits] == [
        "step_000001",
        "step_000002",
    ] and capsys.readouterr().out.count("not pushed") == 1
