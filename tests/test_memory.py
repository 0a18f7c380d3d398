"""What a rank's memory is good for: the size of a micro-batch, limits of containers, what is said
where memory runs out, and vLLM's sleep on a GPU."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

import common
import preflight
import rollout
import train
from common import (
    RolloutsLost,
    RunStopped,
    core_limits,
    load_config,
    memory_limits,
    usable_cores,
)
from journal import Timer
from policy import ParameterCounts
from preflight import fitting_tokens, memory_estimate, tokens_at_once

GIB = 2**30
SMOL = LlamaConfig(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
)
PARAMETERS = ParameterCounts(134_515_008, 134_515_008)


def config(*flags: str) -> dict:
    return load_config(["--dtype=float32", "--max_prompt_length=256", *flags])


# --- the size of a micro-batch


@pytest.fixture
def memory(monkeypatch):
    """memory(size): that of a rank, in GiB."""
    for module in (preflight, rollout):
        monkeypatch.setattr(module, "rank_memory", lambda: 24 * GIB)

    def give(size: float) -> None:
        monkeypatch.setattr(preflight, "device_memory", lambda: size * GIB)

    return give


def together(c: dict, tokens: int, world: int = 1) -> float:
    """GiB of the estimate with micro-batches of so many tokens."""
    c = c | {"max_tokens_per_micro_batch": tokens}
    return sum(memory_estimate(c, SMOL, PARAMETERS, world).values()) / GIB


@pytest.mark.parametrize("tokens", [1024, 2048])
def test_the_default_is_the_largest_power_of_two_whose_estimate_fits(memory, tokens, monkeypatch):
    monkeypatch.setattr(preflight, "MOST_VALUES_ON_CPU", 2**30)
    c = config()
    needed = together(c, tokens) / preflight.MEMORY_SHARE
    memory(needed * 1.001)
    assert fitting_tokens(c, SMOL, PARAMETERS, 1) == tokens
    memory(needed * 0.999)
    assert fitting_tokens(c, SMOL, PARAMETERS, 1) == tokens // 2


def test_the_default_has_bounds(memory, monkeypatch):
    memory(10_000)
    assert fitting_tokens(config(), SMOL, PARAMETERS, 1) == 512  # x 576 values in an activation
    narrow = LlamaConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4)
    assert fitting_tokens(config(), narrow, PARAMETERS, 1) == 4096
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: True)
    assert fitting_tokens(config(), SMOL, PARAMETERS, 1) == preflight.MOST_TOKENS
    monkeypatch.undo()
    memory(0.1)
    assert fitting_tokens(config(), SMOL, PARAMETERS, 1) == preflight.FEWEST_TOKENS


@pytest.mark.parametrize(
    "tokens, world, wanted",
    [
        (100_000, 1, 12 * 300),  # all there are
        (100_000, 2, 6 * 300),
        (2000, 1, 2000),
        (100, 1, 300),  # no row is cut
    ],
)
def test_a_micro_batch_is_counted_with_no_more_tokens_than_a_step_has(tokens, world, wanted):
    flags = ["--max_completion_length=44", "--prompts_per_step=2", "--num_generations=6"]
    c = config(*flags, f"--max_tokens_per_micro_batch={tokens}")
    assert tokens_at_once(c, world) == wanted


def test_ranks_agree_on_the_smallest_and_a_run_that_goes_on_takes_what_it_had(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(train, "fitting_tokens", lambda *args: 4096)
    monkeypatch.setattr(train, "across_ranks", lambda tensor, op: torch.tensor(1024))
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 2)
    inputs = SimpleNamespace(model_config=SMOL)

    def chosen(given: int, path=None) -> int:
        c = config(f"--max_tokens_per_micro_batch={given}")
        return train.micro_batch_tokens(c, inputs, PARAMETERS, path)

    assert chosen(0) == 1024
    assert "max_tokens_per_micro_batch=1024" in capsys.readouterr().out
    assert chosen(77) == 77
    saved = {"reward_funcs": [], "max_tokens_per_micro_batch": 512}
    (tmp_path / "train_config.json").write_text(json.dumps(saved))
    (tmp_path / "rng_0.pt").touch()
    assert chosen(0, tmp_path) == 1024  # of one rank, which had more memory
    (tmp_path / "rng_1.pt").touch()
    assert chosen(0, tmp_path) == 512
    assert chosen(77, tmp_path) == 77


# --- how much memory there is


def test_the_tightest_limit_of_a_process_and_of_the_groups_around_it_counts(tmp_path):
    membership = tmp_path / "cgroup"
    root = tmp_path / "fs"
    job = root / "slurm" / "job_7"
    (job / "task_0").mkdir(parents=True)
    (job / "task_0" / "memory.max").write_text("max\n")
    (job / "memory.max").write_text("5000\n")
    (root / "slurm" / "memory.max").write_text("9000\n")
    membership.write_text("0::/slurm/job_7/task_0\n")
    assert sorted(memory_limits(membership, root)) == [5000, 9000]
    old = root / "memory" / "docker"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("700\n")
    membership.write_text("9:cpu:/docker\n8:memory:/docker\n")
    assert memory_limits(membership, root) == [700]
    assert memory_limits(tmp_path / "none", root) == []


def test_so_do_limits_of_processor_time(tmp_path, monkeypatch):
    membership = tmp_path / "cgroup"
    root = tmp_path / "fs"
    job = root / "slurm" / "job_7"
    job.mkdir(parents=True)
    (job / "cpu.max").write_text("max 100000\n")
    (root / "slurm" / "cpu.max").write_text("150000 100000\n")
    membership.write_text("0::/slurm/job_7\n")
    assert core_limits(membership, root) == [1.5]
    old = root / "cpu,cpuacct" / "docker"
    old.mkdir(parents=True)
    for folder, quota in ((old, "400000\n"), (old.parent, "-1\n")):
        (folder / "cpu.cfs_quota_us").write_text(quota)
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    membership.write_text("8:memory:/docker\n4:cpu,cpuacct:/docker\n3:cpuset:/docker\n")
    assert core_limits(membership, root) == [4]
    # mounted with its names in another order than they are listed in, and linked
    membership.write_text("4:cpuacct,cpu:/docker\n")
    assert core_limits(membership, root) == []
    (root / "cpu").symlink_to(root / "cpu,cpuacct")
    assert core_limits(membership, root) == [4]
    (old / "cpu.cfs_period_us").unlink()  # a share of what?
    assert core_limits(membership, root) == []
    bound = len(os.sched_getaffinity(0))
    for limits, cores in (([], bound), ([0.5], 1), ([bound + 3.0], bound)):
        monkeypatch.setattr(common, "core_limits", lambda *args, limits=limits: limits)
        assert usable_cores() == cores
    monkeypatch.setattr(common, "core_limits", lambda *args: [])
    monkeypatch.delattr(os, "sched_getaffinity")  # as on a Mac
    assert usable_cores() == os.cpu_count()


def test_an_optimizer_on_the_cpu_gets_its_ranks_share_of_the_cores(monkeypatch):
    given = []
    monkeypatch.setattr(train, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for offloads, device in ((True, "cuda"), (True, "cpu"), (False, "cuda")):
        train.share_cores({"offload_optimizer": offloads}, torch.device(device))
    assert given == [4]


def test_an_offloaded_optimizer_is_in_main_memory_and_so_deepspeed_is_told():
    for offloads in (True, False):
        c = load_config([f"--offload_optimizer={offloads}", "--zero_stage=1", "--dtype=float32"])
        told = train.deepspeed_config(c)["zero_optimization"].get("offload_optimizer")
        assert told == ({"device": "cpu"} if offloads else None)
        counts = ParameterCounts(1000, 1000)
        table = memory_estimate(c, LlamaConfig(num_hidden_layers=2), counts, 1)
        # two moments, and ZeRO's own copy of the weights
        sizes = {what: size for what, size in table.items() if what.startswith("optimizer")}
        assert sizes == {f"optimizer{preflight.IN_CPU_MEMORY if offloads else ''}": 12000}


def test_ranks_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(common, "memory_limits", lambda *args: [6000])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert common.rank_memory() == 6000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert common.rank_memory() == 1500


# --- out of memory


def more_than_any_machine_has():
    torch.empty(2**50)  # the CPU allocator's own words


def on_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def in_vllms_allocator():
    raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:145")


@pytest.mark.parametrize("fail", [more_than_any_machine_has, on_a_gpu, in_vllms_allocator])
@pytest.mark.parametrize(
    "phase, flags, words",
    [
        ("learn", (), "lower max_tokens_per_micro_batch=2048 or set gradient_checkpointing=True,"),
        ("learn", ("--gradient_checkpointing=True",), "lower max_tokens_per_micro_batch=2048, and"),
        ("rollout", (), "lower num_generations=8 or max_completion_length=512, and"),
        ("evaluate", (), "lower eval_num_generations=8 or max_completion_length=512, and"),
        ("sync", (), "lower vllm_options.gpu_memory_utilization=0.3, and"),
        # if a size is given, vLLM takes that and no share
        (
            "sync",
            ("--vllm_options.kv_cache_memory_bytes=9000",),
            "lower vllm_options.kv_cache_memory_bytes=9000, and",
        ),
    ],
)
def test_out_of_memory_is_one_sentence_with_the_key_to_lower(
    fail, phase, flags, words, monkeypatch
):
    # a fake GPU: without one a sync has no cache of vLLM to make room for
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    c = config("--max_tokens_per_micro_batch=2048", *flags)
    with pytest.raises(RunStopped) as caught:
        with train.enough_memory(phase, c):
            fail()
    sentence = str(caught.value)
    assert words in sentence
    assert "\n" not in sentence
    assert "memory" in sentence.rpartition(";")[2]  # the library's own words


def test_memory_that_a_gpus_library_lacks_is_known_by_its_status():
    """With vLLM's cache beside it, a GPU may have none left when a rank first needs cuBLAS."""
    with pytest.raises(RunStopped, match=r"^memory ran out .*: lower max_tokens_per_micro"):
        with train.enough_memory("learn", config()):
            raise RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            )


def test_a_sync_without_a_gpu_names_no_key_of_one():
    with pytest.raises(RunStopped, match="lower max_tokens_per_micro_batch=64"):
        with train.enough_memory("sync", config("--max_tokens_per_micro_batch=64")):
            more_than_any_machine_has()


@pytest.mark.parametrize(
    "module, function, key",
    [
        ("evaluate", "evaluate", "eval_num_generations=8"),
        ("train", "trial_batch", "num_generations"),
    ],
)
def test_memory_that_runs_out_outside_of_a_step_names_its_key_too(
    module, function, key, monkeypatch
):
    c = config()
    monkeypatch.setattr(f"{module}.{function}", lambda *args: more_than_any_machine_has())
    for name in ("flip_signs", "sync_weights"):
        monkeypatch.setattr(train, name, lambda *args: None)
    run = SimpleNamespace(
        config=c,
        world=None,
        inputs=SimpleNamespace(eval_rows=[{}]),
        sampler=None,
        engine=SimpleNamespace(module=SimpleNamespace(lm=None)),
        timer=Timer(),
        step=0,
    )
    work = {"evaluate": train.evaluate_now, "trial_batch": train.prove_sync}[function]
    with pytest.raises(RunStopped, match=f"memory ran out .*: lower {key}"):
        work(run)


def test_transformers_sample_as_many_rows_at_once_as_they_like():
    """So the number of a prompt's completions may not be what matters."""
    c = config() | {"rollout_engine": "hf"}
    for phase, key in (("rollout", "num_generations"), ("evaluate", "eval_num_generations")):
        cure = f"lower {key}={c[key]} or max_completion_length={c['max_completion_length']}, or HF"
        with pytest.raises(RunStopped, match=f"memory ran out .*: {cure}_TOKENS"):
            with train.enough_memory(phase, c):
                more_than_any_machine_has()
        for engine in ("vllm", "server"):
            assert "HF_TOKENS" not in train.less_memory(phase, c | {"rollout_engine": engine})


@pytest.mark.parametrize("engine, at_gpu", [("vllm", True), ("vllm", False), ("server", True)])
def test_only_a_vllm_that_shares_the_gpu_can_leave_a_sync_more_memory(monkeypatch, engine, at_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: at_gpu)
    c = config() | {"rollout_engine": engine}
    own = engine == "vllm" and at_gpu
    key = "vllm_options.gpu_memory_utilization" if own else "max_tokens_per_micro_batch"
    assert train.less_memory("sync", c).startswith(f"lower {key}=")


def test_a_micro_batch_that_holds_one_row_only_can_be_made_smaller_by_shorter_rows_only():
    c = config() | {"max_prompt_length": 40, "max_completion_length": 24}
    for budget in (64, 65):
        cure = train.less_memory("learn", c | {"max_tokens_per_micro_batch": budget})
        assert cure.startswith(f"lower max_tokens_per_micro_batch={budget}")
        assert ("or max_completion_length=24" in cure) == (budget == 64)


def test_other_errors_of_the_learner_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes"):
        with train.enough_memory("learn", config()):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_what_a_server_says_of_its_memory_is_no_lack_of_ours():
    with pytest.raises(RolloutsLost, match=r"^no server is left"):
        with train.enough_memory("rollout", config()):
            raise RolloutsLost("no server is left: it answered 500: 'CUDA out of memory'")


# --- vLLM's sleep on a GPU


class Core:
    """Of vLLM's engine what sleep and sync touch."""

    def __init__(self):
        self.batch_queue = ["scheduled ahead"]
        self.swept = True  # whether requests that have finished are out of the scheduler
        self.engine_core = self.scheduler = self

    def has_requests(self):
        return not self.swept


class FakeLLM:
    """vLLM's rules of sleep: the cache can be let go only while nothing is scheduled, weights are
    written only where they are, and nothing is awake before both are there."""

    def __init__(self, **settings):
        self.there = {"weights", "kv_cache"}
        self.paused = False
        self.dropped = 0  # times that the weights went
        self.llm_engine = SimpleNamespace(engine_core=Core(), step=self.step)

    def step(self):
        core = self.llm_engine.engine_core
        if core.batch_queue:
            core.batch_queue.pop()
        core.swept = True

    def apply_model(self, function):
        return [function(torch.nn.Linear(10, 10, bias=False))]  # 400 bytes

    def sleep(self, level):
        self.paused = True
        if level == 2:
            self.there.clear()
            self.dropped += 1

    def release_kv_cache_memory(self):
        core = self.llm_engine.engine_core
        if not self.paused or core.batch_queue or core.has_requests():
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        self.there.remove("kv_cache")

    def wake_up(self, tags):
        assert not self.there & set(tags)
        self.there |= set(tags)
        self.paused = self.there != {"weights", "kv_cache"}

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and "weights" in self.there

    def reset_prefix_cache(self):
        assert not self.paused


def engine_on_a_gpu(monkeypatch, model: Path, gpu: int):
    """vLLM by the fake above, on a GPU of so many bytes."""
    vllm = SimpleNamespace(LLM=FakeLLM, __version__="none")
    monkeypatch.setattr(rollout, "import_vllm", lambda: vllm)
    monkeypatch.setattr(rollout, "device_bytes", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return rollout.VllmEngine(str(model), config(), torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("gpu, dropped", [(4001, 0), (3999, 2)])
def test_weights_that_are_small_beside_the_gpu_stay_there_while_vllm_sleeps(
    gpu, dropped, monkeypatch, tiny_model_dir
):
    engine = engine_on_a_gpu(monkeypatch, tiny_model_dir, gpu)
    for _ in range(2):
        engine.sleep()
        assert engine.llm.there == (set() if dropped else {"weights"})
        engine.wake()
        engine.sync([])
        assert engine.llm.there == {"weights", "kv_cache"}
        assert not engine.llm.paused
        engine.llm.llm_engine.engine_core.batch_queue.append("scheduled ahead")
    assert engine.llm.dropped == dropped


def test_without_asynchronous_scheduling_finished_requests_are_swept_out_first(
    monkeypatch, tiny_model_dir
):
    engine = engine_on_a_gpu(monkeypatch, tiny_model_dir, 4001)
    core = engine.llm.llm_engine.engine_core
    core.batch_queue = None
    core.swept = False
    engine.sleep()
    assert engine.llm.there == {"weights"}
