"""rollout_engine="server": which servers a run waits for, takes and refuses, and
`python -m server`, which starts one."""

import re
import socket
import sys
import threading

import pytest
from servers import dead_url
from transformers import Qwen2Config

import preflight
import rollout
from common import UserError, check_tensor_parallel, load_config
from server import __main__ as serve
from server import http as server_http

pytest_plugins = ["server_fixtures"]


def test_servers_that_do_not_come_are_named_after_a_deadline(world, short_wait, make, stand_in):
    one = stand_in()
    dead = dead_url()
    ill = stand_in(other={"/health": lambda request: (503, b"", {})})
    with pytest.raises(UserError, match="after 60 s 2 of 3 servers are not there") as caught:
        make(one, dead, ill)
    sentence = str(caught.value)
    assert dead in sentence
    assert ill.url in sentence
    assert one.url not in sentence


def test_servers_that_come_late_are_waited_for(world, make, stand_in, capsys):
    one = stand_in()
    url = dead_url()
    port = int(url.rpartition(":")[2])
    threading.Timer(0.5, stand_in, [port]).start()
    assert len(make(one, url).live) == 2
    assert "waiting for rollout servers" in capsys.readouterr().err


def says(status: int, content):
    return lambda request: (status, content, {})


def with_settings(mode: str) -> dict:
    """A server with these settings, which takes no weights over NCCL."""
    model = {"logprobs_mode": mode}
    settings = {"vllm_config": {"model_config": model, "weight_transfer_config": None}}
    return {"/server_info": says(200, settings)}


ENDLESS = b'{"data": [{"id": "policy", "max_model_len": 1e999}]}'
NO_API = "does not speak vLLM's development API"


@pytest.mark.parametrize(
    "other, settings, words",
    [
        ({"/weight_info": says(404, {"detail": "Not Found"})}, {}, f"{NO_API} .*python -m server"),
        ({"/server_info": says(200, {"vllm_config": "a text"})}, {}, NO_API),
        ({"/server_info": says(200, [])}, {}, NO_API),
        ({"/weight_info": says(200, [1])}, {}, NO_API),
        ({"/v1/models": says(200, {"data": []})}, {}, NO_API),
        ({"/v1/models": says(200, ENDLESS)}, {}, f"{NO_API} .*infinity"),
        (
            {},
            {"max_completion_length": 60},
            r"max_model_len=64, max_prompt_length \+ max_completion_length is 76",
        ),
        (
            with_settings("raw_logprobs"),
            {},
            "logprobs_mode='raw_logprobs': start it with --logprobs-mode processed_logprobs",
        ),
        (
            with_settings("processed_logprobs"),
            {"weight_sync": "nccl"},
            "takes no weights over NCCL: start it with --weight-transfer-config",
        ),
    ],
)
def test_a_server_that_can_not_be_used_is_refused_by_name_with_the_cure(
    other, settings, words, world, make, stand_in
):
    good = stand_in()
    bad = stand_in(other=other)
    with pytest.raises(UserError, match=words) as caught:
        make(good, bad, synced=False, **settings)
    assert bad.url in str(caught.value) or "max_model_len" in words


@pytest.mark.parametrize(
    "setting, launcher, words",
    [
        ("", "", "python -m server starts one"),
        (" , ", "", "python -m server starts one"),
        ("auto", "", "no launcher has set ROLLOUT_SERVER"),
        ("auto", ",", "needs rollout_server"),
        ("localhost:8000", "", "must begin with http:// or https://"),
        ("auto", "a:1", "must begin with http"),
        ("http://a:port", "", "rollout_server"),
        ("http://", "", "rollout_server"),
        ("http://a:1/v1/", "", "leave out /v1"),
        ("http://me:secret@a:1", "", "the address of a has a user or a password in it"),
    ],
)
def test_addresses_that_can_not_be_any_are_refused(
    setting, launcher, words, world, make, monkeypatch
):
    monkeypatch.setenv("ROLLOUT_SERVER", launcher)
    with pytest.raises(UserError, match=words) as caught:
        make(setting, rollout_timeout=0.1)
    assert "secret" not in str(caught.value)


def test_addresses_are_those_of_the_config_or_for_auto_of_the_launcher(monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVER", "http://b:2/")
    given = server_http.addresses("http://a:1/, http://c:3 ,http://a:1")
    assert given == ["http://a:1", "http://c:3"]
    assert server_http.addresses("auto") == ["http://b:2"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--rollout_ahead=1"], "rollout_ahead=1 needs rollout_engine='server'"),
        (["--rollout_ahead=2", "--rollout_engine=server"], "must be at least 0 and at most 1"),
        (
            ["--rollout_ahead=1", "--rollout_engine=server", "--info_seed_num_seeds=2"],
            "does not go with info_seed_num_seeds > 0",
        ),
        (["--weight_sync=tape"], "'disk', 'nccl'"),
        (["--rollout_timeout=0"], "greater than 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(flags, words):
    with pytest.raises(UserError, match=re.escape(words)):
        load_config(flags)


def test_a_run_may_be_ahead_of_its_servers():
    c = load_config(["--rollout_ahead=1", "--rollout_engine=server"])
    assert c["rollout_ahead"] == 1


@pytest.mark.parametrize("tag", ["two\nlines", "Mädchen", "a b"])
def test_a_tag_that_is_no_header_is_refused(tag, world, make, stand_in, monkeypatch):
    monkeypatch.setenv("VLLM_CLIENT_TAG", tag)
    with pytest.raises(UserError, match="VLLM_CLIENT_TAG"):
        make(stand_in(), synced=False)


# --- python -m server


SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE["hidden_size"] = 32


@pytest.fixture
def serve_with(monkeypatch):
    """serve_with(flags): (argv, environment) of the vLLM that would be started."""
    started = []
    monkeypatch.setattr(serve.os, "execve", lambda *args: started.append(args))
    # there is no model here, but for its shape
    files = preflight.ModelFiles(Qwen2Config(**SHAPE), None, [])
    monkeypatch.setattr(preflight, "load_model_files", lambda *args: files)
    monkeypatch.setattr(rollout, "rank_memory", lambda: 2**34)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)

    def run(*flags: str) -> tuple[list[str], dict]:
        serve.main(["config/countdown_tiny.py", *flags])
        _, argv, environment = started.pop()
        return argv, environment

    return run


def test_serve_starts_stock_vllm_with_what_the_config_needs(serve_with):
    own = ["--port=8123", "--host=0.0.0.0", "--tp=2", "--dp=3"]
    keys = ["--model=here", "--dtype=float32"]
    argv, environment = serve_with(*own, *keys, "--", "--max-num-seqs", "512")
    assert argv[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert argv[-2:] == ["--max-num-seqs", "512"]
    text = " ".join(argv)
    for flags in (
        "--model here",
        "--port 8123",
        "--host 0.0.0.0",
        "--tensor-parallel-size 2",
        "--data-parallel-size 3",
        "--max-model-len 64",
        "--dtype float32",
        "--seed 42",
        "--logprobs-mode processed_logprobs",
        "--enable-request-id-headers",
        "--generation-config vllm",
        "--load-format hf --tokenizer-mode hf",
        # a replica's 128 x 2 of the 512 rows, 11 prompts to each: two blocks each, and one; of two
        # layers, 1 head of keys for each of two ranks, 8 numbers of 4 bytes
        f"--kv-cache-memory-bytes {(176 * 2 + 1) * 32 * 2 * 2 * 8 * 4}",
        "--block-size 32",
        "--enforce-eager",
        # on a CPU no prompt may be split over two batches
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens 8192",
    ):
        assert f" {flags} " in text
    assert "--weight-transfer-config" not in text
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment  # two workers, a process each


def test_a_server_on_gpus_has_what_an_engine_there_has(serve_with, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    argv, _ = serve_with("--dtype=bfloat16", "--tp=2", "--vllm_options.kv_cache_memory_bytes=99")
    text = " ".join(argv)
    assert ' --hf-overrides {"head_dtype": "float32"}' in text
    assert " --disable-custom-all-reduce" in text
    assert " --kv-cache-memory-bytes 99" in text
    assert "--block-size" not in text and "--enforce-eager" not in text
    argv, _ = serve_with("--dtype=bfloat16", "--tp=1")
    assert "--disable-custom-all-reduce" not in argv and "--kv-cache-memory-bytes" not in argv


def test_rows_longer_than_the_model_has_positions_are_refused_before_vllm_starts(serve_with):
    with pytest.raises(UserError, match="is more than the 32768 positions of model='here'"):
        serve_with("--model=here", "--max_completion_length=32760")


def test_serve_follows_the_config_and_the_environment(serve_with, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    # a compiler that is there, also on a machine without g++
    monkeypatch.setenv("CXX", sys.executable)
    argv, environment = serve_with("--weight_sync=nccl", "--vllm_options.enforce_eager=False")
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "--enforce-eager" not in argv
    assert "TORCHDYNAMO_DISABLE" not in environment
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    text = " ".join(argv)
    assert '--weight-transfer-config {"backend": "nccl"}' in text
    assert " --host 127.0.0.1 --port 8000 " in text


def test_ranks_that_only_train_need_not_divide_into_engines():
    servers = ["--rollout_engine=server", "--rollout_server=http://a:8000"]
    parallel = "--vllm_options.tensor_parallel_size=2"
    check_tensor_parallel(load_config([*servers, parallel]), 1)
    with pytest.raises(UserError, match="must divide the number of ranks, 1"):
        check_tensor_parallel(load_config([parallel]), 1)


def test_serve_hands_the_configs_vllm_options_on(serve_with):
    argv, _ = serve_with(
        "--vllm_options.max_num_seqs=7",
        "--vllm_options.enable_prefix_caching=False",
        "--vllm_options.tensor_parallel_size=2",
        "--vllm_options.cudagraph_capture_sizes=[1,2]",
    )
    text = " ".join(argv)
    assert "--max-num-seqs 7" in text
    assert "--no-enable-prefix-caching" in text
    assert "--cudagraph-capture-sizes 1 2" in text  # as vLLM reads a list
    assert "--tensor-parallel-size 1" in text  # of a server that is --tp


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--port=0"], "--port=0"),
        (["--port=http"], "port must be of type int like 8000, not str 'http'"),
        (["--port="], "port must be of type int like 8000, not str ''"),
        (["--port=70000"], "--port=70000"),
        (["--tp=-1"], "--tp=-1"),
        (["--model="], "model is empty"),
        (["--prot=1"], "unknown key 'prot'"),
    ],
)
def test_serve_refuses_what_can_not_work(flags, words, monkeypatch):
    monkeypatch.setattr(serve.os, "execve", lambda *args: pytest.fail("started"))
    with pytest.raises(UserError, match=re.escape(words)):
        serve.main(["config/countdown_tiny.py", *flags])


def test_a_port_on_which_another_listens_is_refused_before_anything_loads(monkeypatch):
    monkeypatch.setattr(serve.os, "execve", lambda *args: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"--port={port} can't be used: Address already in use"):
            serve.main(["config/countdown_tiny.py", "--model=/nowhere", f"--port={port}"])
    serve.check_port("127.0.0.1", port)
