"""What the tests of server/ ask servers for, and what they expect; real servers, and runs with
them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import child
import httpx
import torch
from deadlines import PATIENCE
from engine_worker import PROMPTS, sampling
from stand_ins import choice

from common import load_config
from server.engine import ServerEngine

ROOT = Path(__file__).resolve().parents[2]


# read once, not by each rank that is a thread: Python 3.11 can't ast.parse in two threads at a time
# where a garbage collection may switch between them (SystemError: AST constructor recursion depth)
CONFIG = load_config(
    ["--rollout_timeout=60", "--max_prompt_length=16", "--max_completion_length=16"]
)


def make_engine(model: Path, urls: str, folder: Path, **settings):
    config = CONFIG | {"output_dir": str(folder), "rollout_server": urls} | settings
    return ServerEngine(str(model), config, torch.float32)


def any_weights():
    """For stand-ins, which read none."""
    head = torch.arange(6.0).view(2, 3)
    yield "embedding", head
    yield "layer", torch.ones(4)
    yield "lm_head.weight", head


def request(prompts: int, seed: int = 0):
    """What a training step asks an engine for."""
    return sampling(seed, prompts)._replace(names=[f"s1-p{i}" for i in range(prompts)])


def bare(rollouts: list[dict]) -> list[tuple]:
    return [(r["prompt_ids"], r["completion_ids"], r["finish_reason"]) for r in rollouts]


def expected(prompts=PROMPTS, n: int = 2) -> list[tuple]:
    """What healthy stand-ins answer to prompts with the seeds of request(...), as bare() has it."""
    rollouts = []
    for prompt, seed in zip(prompts, sampling(0, len(prompts)).seeds):
        body = {"prompt": prompt, "seed": seed, "max_tokens": 12}
        for i in range(n):
            rollouts.append((prompt, choice(body, i)["token_ids"], "stop"))
    return rollouts


def dead_url() -> str:
    """Where nobody listens."""
    return f"http://127.0.0.1:{child.free_port()}"


# --- real ones


def environment() -> dict:
    """Without what torch.distributed of this process, or of an outer one, has left there."""
    left = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VLLM_CLIENT_TAG")
    own = {key: value for key, value in os.environ.items() if key not in left}
    return own | {"PYTHONPATH": str(ROOT / "tests" / "helpers")}


def start_script(argv: list, log: Path) -> subprocess.Popen:
    """In a session of its own, so that all its processes can be killed together."""
    with open(log, "a") as file:
        return subprocess.Popen(
            [sys.executable, *map(str, argv)],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            env=environment(),
            start_new_session=True,
        )


class Fleet:
    """Two vLLM servers: 0 has the tied model, 1 the untied one, whose head takes the tied weights
    too."""

    def __init__(self, models: list[Path], folder: Path, config: str = "config/countdown_tiny.py"):
        self.config = config
        self.models = models
        self.folder = folder
        self.processes = {}
        self.urls = [dead_url(), dead_url()]
        self.ports = [int(url.rpartition(":")[2]) for url in self.urls]

    def start(self, i: int) -> None:
        argv = ["-m", "server", self.config]
        argv += [f"--model={self.models[i]}", f"--port={self.ports[i]}"]
        self.processes[i] = start_script(argv, self.log(i))

    def log(self, i: int) -> Path:
        return self.folder / f"server_{i}.log"

    def ready(self, *which: int, seconds: float = PATIENCE) -> str:
        """Starts these servers where they do not run, and waits for them; their URLs as
        rollout_server takes them."""
        for i in which:
            if i not in self.processes or self.processes[i].poll() is not None:
                self.start(i)
        end = time.monotonic() + seconds
        for i in which:
            while not self.answers(i):
                said = self.log(i).read_text()[-3000:]
                assert time.monotonic() < end, said
                assert self.processes[i].poll() is None, said
                time.sleep(0.2)
        return ",".join(self.urls[i] for i in which)

    def answers(self, i: int) -> bool:
        try:
            answer = httpx.get(self.urls[i] + "/health", timeout=10, trust_env=False)
            return answer.status_code == 200
        except httpx.HTTPError:
            return False

    def signal(self, i: int, number: int) -> None:
        os.killpg(self.processes[i].pid, number)
        if number == signal.SIGKILL:
            self.processes[i].wait(30)

    def close(self) -> None:
        for i, process in self.processes.items():
            if process.poll() is None:
                self.signal(i, signal.SIGKILL)


# --- runs of train.py

FLAGS = [
    "--prompts_per_step=8",
    "--num_generations=4",
    "--max_completion_length=16",
    "--eval_steps=0",
    "--learning_rate=3e-3",
    "--max_steps=3",
    "--max_logp_difference=2e-5",
    "--reward_funcs=['parity_reward:parity']",
    "--reward_timeout=300",
    "--rollout_timeout=120",
    "--report_to=",
]


def train(model: Path, folder: Path, *flags: str, ranks: int = 0) -> subprocess.Popen:
    """A run, by default of three steps, that writes its words to folder.log."""
    argv = ["train.py", "config/countdown_tiny.py", *FLAGS]
    if ranks:
        argv = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks, *argv]
    argv += [f"--model={model}", f"--output_dir={folder}", *flags]
    return start_script(argv, words_of(folder))


def words_of(folder: Path) -> Path:
    return Path(f"{folder}.log")


def finish(process: subprocess.Popen, folder: Path, seconds: float = PATIENCE) -> tuple[int, str]:
    """(exit status, all that the run has said)."""
    try:
        return process.wait(seconds), words_of(folder).read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def steps_in(folder: Path) -> list[dict]:
    """The whole lines of a run's metrics.jsonl so far."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
