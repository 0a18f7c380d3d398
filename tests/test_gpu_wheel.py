"""What this project relies on in vLLM stands in the sources of its GPU wheel too, which a machine
without a GPU can read, not run: names, keywords, tags, fields, routes. pip fetches its 330 MB."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import fake_vllm
import pytest
import torch
from deadlines import PATIENCE

import rollout
from common import ROOT, load_config

pytestmark = pytest.mark.slow


class Wheel:
    """The Python sources of a wheel."""

    def __init__(self, path: Path):
        self.file = zipfile.ZipFile(path)
        self.names = self.file.namelist()

    def text(self, name: str) -> str:
        return self.file.read(f"vllm/{name}").decode()

    def classes(self, name: str) -> dict:
        found = {}
        for node in ast.walk(ast.parse(self.text(name))):
            if isinstance(node, ast.ClassDef):
                found[node.name] = node
        return found

    def fields(self, name: str, cls: str) -> set[str]:
        """Of a dataclass, without those that it inherits."""
        body = self.classes(name)[cls].body
        return {node.target.id for node in body if isinstance(node, ast.AnnAssign)}

    def methods(self, name: str, cls: str) -> dict[str, list[str]]:
        """{method: names of its arguments} of a class and those of the same file."""
        found = {}
        for node in self.classes(name)[cls].body:
            if isinstance(node, ast.FunctionDef):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                found[node.name] = [a.arg for a in arguments]
        return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Wheel:
    (pin,) = re.findall(r"^vllm==\S+", (ROOT / "requirements.txt").read_text(), re.M)
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--dest", str(folder), pin]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        pytest.skip(f"pip can't fetch {pin}: {done.stderr.strip().splitlines()[-1:]}")
    (path,) = folder.glob("vllm-*.whl")
    return Wheel(path)


def settings() -> dict:
    config = load_config(["--model=m", "--dtype=bfloat16"])
    return rollout.vllm_settings("m", config, torch.bfloat16, on_gpu=True)


def test_it_takes_the_settings_of_the_engine(wheel):
    known = wheel.fields("engine/arg_utils.py", "EngineArgs")
    known |= set(wheel.methods("entrypoints/llm.py", "LLM")["__init__"])
    assert set(settings()) <= known
    assert "enable_chunked_prefill" not in settings()  # a cure for its CPU sampler only
    assert '"processed_logprobs"' in wheel.text("config/model.py")
    assert '"external_launcher"' in wheel.text("config/parallel.py")


def test_it_takes_the_parameters_of_sampling(wheel):
    source = ast.parse("class X:\n" + source_of("rollout.py", "sampling_params"))
    (call,) = [node for node in ast.walk(source) if isinstance(node, ast.Call)]
    keywords = {keyword.arg for keyword in call.keywords}
    assert {"logprobs", "flat_logprobs", "seed"} <= keywords
    assert keywords <= wheel.fields("sampling_params.py", "SamplingParams")


def source_of(file: str, method: str) -> str:
    """The text of a method of a class there, indented as it is."""
    text = (ROOT / file).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == method:
            return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
    raise LookupError(method)


def test_it_has_every_method_of_the_llm_that_the_engine_calls(wheel):
    called = set(re.findall(r"self\.llm\.(\w+)", (ROOT / "rollout.py").read_text()))
    assert {"sleep", "wake_up", "enqueue", "collective_rpc", "reset_prefix_cache"} <= called
    llm = wheel.text("entrypoints/llm.py")
    for name in called:
        assert f"def {name}(" in llm or f"self.{name} = " in llm, name
    methods = wheel.methods("entrypoints/llm.py", "LLM")
    # positional there as here, and as the fake has them
    fake = ast.parse(Path(fake_vllm.__file__).read_text())
    for node in ast.walk(fake):
        if isinstance(node, ast.FunctionDef) and node.name in methods and node.name != "__init__":
            ours = [a.arg for a in node.args.args]
            theirs = [name.replace("func", "function") for name in methods[node.name]]
            assert ours == [name for name in theirs if name in ours], node.name


def test_its_sleep_has_the_tags_and_the_rules_that_the_engine_relies_on(wheel):
    worker = wheel.text("v1/worker/gpu_worker.py")
    used = set(re.findall(r'tags=\["(\w+)"\]', (ROOT / "rollout.py").read_text()))
    assert used == {"weights", "kv_cache"}
    for tag in used:
        assert f'tag="{tag}"' in worker
    core = wheel.text("v1/engine/core.py")
    # asleep nothing is scheduled, and awake only when all memory is there
    assert "self.pause_scheduler(mode=mode" in core
    assert "fully_awake = not self.model_executor.is_sleeping" in core


@pytest.mark.parametrize("runner", ["gpu_model_runner.py", "gpu/model_runner.py"])
def test_both_of_its_runners_reload_weights_from_an_iterator(wheel, runner):
    found = []
    for cls in wheel.classes(f"v1/worker/{runner}"):
        found.append(wheel.methods(f"v1/worker/{runner}", cls).get("reload_weights"))
    arguments = [a for a in found if a]
    assert arguments and arguments[0][1:3] == ["weights_iterator", "weights_path"]


def test_its_flashinfer_sampler_takes_no_request_of_ours(wheel):
    # all have a seed, and want the log-probs of what they are sampled from
    assert '"VLLM_USE_FLASHINFER_SAMPLER"' in wheel.text("envs.py")
    sampler = wheel.text("v1/worker/gpu/sample/sampler.py")
    (condition,) = re.findall(r"eligible = not \((.*?)\n        \)", sampler, re.S)
    assert "any_explicit_seed" in condition
    assert "return_logprobs and self.logprobs_mode in PROCESSED_LOGPROBS_MODES" in condition


def test_its_nccl_transfer_has_our_fields_and_calls_our_client(wheel):
    folder = "distributed/weight_transfer"
    engine = f"{folder}/nccl_engine.py"
    fields = wheel.fields(engine, "NCCLTrainerInitInfo")
    fields |= wheel.fields(f"{folder}/base.py", "TrainerInitInfo")
    assert {"rank", "master_address", "master_port", "world_size"} <= fields
    assert {"name", "dtype", "shape"} == wheel.fields(f"{folder}/base.py", "ParamMeta")
    trainer = wheel.methods(engine, "NCCLTrainerWeightTransferEngine")
    assert trainer["trainer_init"][1:] == ["init_info", "client", "source"]
    assert {"send_weights", "shutdown"} <= set(trainer)
    ours = set(re.findall(r"def (\w+)\(", (ROOT / "server" / "nccl.py").read_text()))
    theirs = set(re.findall(r"client\.(\w+)", wheel.text(engine)))
    assert theirs and theirs <= ours
    source = set(re.findall(r"source\.(\w+)\(", wheel.text(engine)))
    assert source == {"metadata"} and source <= ours


def test_its_server_has_every_route_that_is_asked_for(wheel):
    asked = set()
    for path in (ROOT / "server").glob("*.py"):
        asked |= set(re.findall(r'(?:call|tell_all)\(\s*"(/[a-z0-9_/]+)', path.read_text()))
    assert len(asked) >= 10
    text = ""
    for name in wheel.names:
        if name.startswith("vllm/entrypoints/") and name.endswith(".py"):
            text += wheel.file.read(name).decode()
    for route in asked:
        assert f'"{route}"' in text, route


def test_its_server_takes_our_flags(wheel):
    text = source_of("server/__main__.py", "command")
    names = set(re.findall(r'^        "(\w+)":', text, re.M))
    names |= set(re.findall(r'options\["(\w+)"\]', text))
    assert {"logprobs_mode", "enable_request_id_headers", "weight_transfer_config"} <= names
    known = wheel.fields("engine/arg_utils.py", "EngineArgs")
    flags = "entrypoints/launchers/cli_args.py"
    for cls in wheel.classes(flags):
        known |= wheel.fields(flags, cls)
    assert names <= known
