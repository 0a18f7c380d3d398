"""Rollouts: the engines that sample completions, and the way from sampled tokens to tensors.

    sampler = start_engine(config, device)
    sampler.sync(named_weights(lm, zero_stage))      # after every step
    sampling = Sampling(temperature=1.0, max_tokens=L, stop_token_ids=ids, seeds=[one per prompt])
    rollouts = generate(sampler, tokenizer, prompts_ids, G, sampling)
    batch = to_batch(rollouts, device)

Token ids go in, and token ids come out with the log-prob that the sampler itself gave to each. Text
is decoded only for the rewards and never encoded again. A rollout is {"prompt_ids",
"completion_ids", "text", "logprobs", "finish_reason"}; completion_ids include the EOS. Those of
infoseed.py also have a "seed_id".

Here and in server/ an engine samples. The files of the training step call it the sampler; their
`engine` is DeepSpeed's, which trains.
"""

import gc
import inspect
import logging
import math
import os
import random
import shutil
import sys
import time
import warnings
from dataclasses import fields
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from checks import ENTRIES, entries, max_sequence_length
from common import (
    DEADLINE,
    RunStopped,
    UserError,
    check_tensor_parallel,
    check_writable,
    did_you_mean,
    from_launcher,
    in_one_line,
    launched_rank,
    launched_ranks,
    rank_memory,
    say_on_rank_0,
)
from loss import equal_groups
from packing import head_width
from policy import dtype_of, named_weights, plain_config
from prompts import closing_token

# Tokens per block of vLLM's cache on a CPU. vLLM's default of 128 wastes more of each row's last
# block and shares less of a prompt, because only whole blocks are shared (LOG.md, 2026-11-22).
CPU_BLOCK = 32
# From a Mistral repository vLLM would load consolidated.safetensors and params.json. Policy and
# tokenizer come from the Hugging Face files, and only those are up to date after a fine-tune.
HF_FILES = {"config_format": "hf", "load_format": "hf", "tokenizer_mode": "hf"}
VLLM_ROWS = 256  # completions that vllm.LLM runs at once by default, per rank
# HfEngine samples at most this many completions and tokens at once, but at least one prompt's.
HF_ROWS = 64  # each has a row of logits
HF_TOKENS = 32_768  # each has keys and values
# of transformers' caches: those that hold keys and values alone, which can be repeated
REPEATABLE = {DynamicLayer, DynamicSlidingWindowLayer}
CACHE_SHARE = 0.25  # share of a rank's memory that vLLM's cache takes on a CPU by default
STAY_SHARE = 0.1  # of a GPU's memory: smaller weights stay there while vLLM sleeps


# --- what every engine takes and does


class Sampling(NamedTuple):
    """How an engine is to sample completions; `seeds` and `names` have an entry per prompt."""

    temperature: float
    max_tokens: int  # of a completion
    stop_token_ids: list[int]
    seeds: list[int]
    names: list[str] | None = None  # what a server's log calls the requests


class Engine:
    """The interface of every engine: VllmEngine and HfEngine below, ServerEngine in
    server/engine.py. The last can also begin() to sample in the background, for rollout_ahead."""

    sleeps = False  # whether it has GPU memory to lend to the learner

    def generate(
        self, prompts_ids: list[list[int]], n: int, sampling: Sampling, group_done=None
    ) -> list:
        """n rollouts of each prompt, prompt-major, still without "text", which the function
        generate() below adds. group_done(i, group), if given, is called with the n rollouts of
        prompt i as soon as they are complete."""
        raise NotImplementedError

    def sync(self, named_parameters) -> None:
        """Takes the weights from an iterator of (name, tensor)."""
        raise NotImplementedError

    # an engine overrides the following only where it has something to do

    def wait(self) -> None:
        """Returns when nothing is being sampled in the background."""

    def sleep(self) -> None:
        """Lends the engine's GPU memory to the learner."""

    def wake(self) -> None:
        """Takes the memory back. A sync() must follow: it brings back weights and cache."""

    def take_metrics(self) -> dict:
        """The engine's own metrics since the last call."""
        return {}

    def close(self) -> None:
        """Shuts down. Call it before the process group is destroyed."""


def in_prompt_order(groups: dict[int, list[dict]]) -> list[dict]:
    """The rollouts, prompt-major. groups: {index of a prompt: its rollouts}, in the order in which
    the engine finished them."""
    return [r for i in sorted(groups) for r in groups[i]]


# --- from prompts to rollouts with text


def prompt_seed(*parts) -> int:
    """A 62-bit seed from (seed, step, prompt index, ...), the same in every process and every
    version of Python. vLLM samples completion i of a prompt with seed + i; HfEngine seeds once per
    prompt."""
    return random.Random("/".join(map(str, parts))).getrandbits(62)


def with_text(tokenizer, sampling: Sampling, group_done=None):
    """A callback that adds "text" to a group of rollouts, then passes the group on to `group_done`.
    The text leaves out special tokens and the end of the turn. Other stop tokens stay, such as
    </answer>, because a reward may look for them."""
    token, _ = closing_token(tokenizer)
    # not every tokenizer marks the end of the turn as special
    ends = [token] if token in sampling.stop_token_ids else []

    def answer_of(ids: list[int]) -> list[int]:
        return ids[:-1] if ids[-1:] == ends else ids

    def done(i: int, group: list[dict]) -> None:
        completions_ids = [answer_of(r["completion_ids"]) for r in group]
        texts = tokenizer.batch_decode(completions_ids, skip_special_tokens=True)
        for r, text in zip(group, texts):
            r["text"] = text
        if group_done:
            group_done(i, group)

    return done


def generate(
    sampler, tokenizer, prompts_ids: list[list[int]], n: int, sampling: Sampling, group_done=None
) -> list[dict]:
    """len(prompts_ids) * n rollouts, prompt-major, with the "text" of with_text(). RuntimeError if
    there are fewer or more, if one is empty, or if one lacks a log-prob, which padding would turn
    into 0. RunStopped if a log-prob is not finite.

    group_done(i, rollouts of prompt i) is called as soon as these are complete, while the engine
    still samples others."""
    rollouts = sampler.generate(
        prompts_ids, n, sampling, with_text(tokenizer, sampling, group_done)
    )
    # in the tensors made from these, only a row's position tells which prompt it belongs to
    if len(rollouts) != n * len(prompts_ids):
        raise RuntimeError(
            f"the rollout engine returned {len(rollouts)} completions for {len(prompts_ids)} "
            f"prompts x {n}"
        )
    for r in rollouts:
        tokens = len(r["completion_ids"])
        logps = len(r["logprobs"])
        if tokens == 0 or tokens != logps:
            raise RuntimeError(
                f"the rollout engine returned a completion of {tokens} tokens with {logps} "
                f"log-probs"
            )
        if not math.isfinite(sum(r["logprobs"])):
            raise RunStopped(
                "the rollout engine returned log-probs that are not finite: its logits do not fit "
                "into its dtype, or the model's weights hold NaN or infinity: in a run, lower "
                "learning_rate and go on from an earlier checkpoint"
            )
    return rollouts


def begin(
    sampler, tokenizer, prompts_ids: list[list[int]], n: int, sampling: Sampling, group_done
) -> None:
    """Starts a generate() in the background. The engine keeps the rollouts until generate() is
    called with the same arguments."""
    sampler.begin(prompts_ids, n, sampling, with_text(tokenizer, sampling, group_done))


def groups_of(rollouts: list[dict], prompts: int) -> list[list[dict]]:
    """The rollouts, prompt-major, as one list for each of the prompts."""
    n = len(rollouts) // max(1, prompts)  # a rank may have no prompts
    return [rollouts[i * n : (i + 1) * n] for i in range(prompts)]


# --- from rollouts to tensors


def pad(lists: list, dtype: torch.dtype) -> torch.Tensor:
    """(n, longest), zeros on the right. The zeros are never read: masks come from lengths."""
    rows = [torch.tensor(values, dtype=dtype) for values in lists]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def to_batch(rollouts: list[dict], device) -> dict:
    """Tensors of N rows: ids (N, W), prompt and completion, right-padded; prompt_lengths and
    lengths (those of completions, EOS included) (N,); sampler_logps (N, T), where column 0 is the
    completion's first token. Padding on the right needs no attention mask: attention is causal, so
    no real token sees it."""
    ids = []
    logps = []
    prompt_lengths = []
    lengths = []
    for r in rollouts:
        ids.append(r["prompt_ids"] + r["completion_ids"])
        logps.append(r["logprobs"])
        prompt_lengths.append(len(r["prompt_ids"]))
        lengths.append(len(r["completion_ids"]))
    return {
        "ids": pad(ids, torch.long).to(device),  # (N, W)
        "prompt_lengths": torch.tensor(prompt_lengths).to(device),  # (N,)
        "lengths": torch.tensor(lengths).to(device),  # (N,)
        "sampler_logps": pad(logps, torch.float32).to(device),  # (N, T)
    }


def take(batch: dict, rows: torch.Tensor) -> dict:
    """The given rows of a batch, cut to the longest sequence and completion among them. What is as
    wide as the sampler's log-probs, (N, T) or (N, T, ...), is taken to be per completion token,
    whatever its name, so that a tensor of a user's own is cut too."""
    part = {key: values[rows] for key, values in batch.items()}
    longest = int((part["prompt_lengths"] + part["lengths"]).max())
    longest_completion = int(part["lengths"].max())
    width = batch["sampler_logps"].shape[1]  # T
    for key, values in part.items():
        if key == "ids":  # (N, W): wider, as a prompt has a token at least
            part[key] = values[:, :longest]
        elif values.dim() > 1 and values.shape[1] == width:
            part[key] = values[:, :longest_completion]
    return part


# --- vLLM in this process


def enforce_eager(config: dict, on_gpu: bool) -> bool:
    """Whether vLLM runs the model op by op, without compiling it. UserError if the config asks for
    compilation and there is no compiler."""
    eager = config["vllm_options"].get("enforce_eager", not on_gpu)
    compiler = os.environ.get("CXX", "g++")  # where torch looks for it too
    if not eager and not on_gpu and not shutil.which(compiler):
        raise UserError(
            "vllm_options.enforce_eager=False compiles C++ on a CPU and found no g++ (nor what CXX "
            "names): install it, or leave the option out"
        )
    return eager


def bytes_per_token(config: dict, model_config) -> int:
    """Bytes that one token's keys and values take in vLLM's cache, over all layers, on one rank.
    model_config: Hugging Face's."""
    heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    # ranks that share an engine divide the heads among them; each has at least one
    heads = max(1, heads // entries(config, "vllm_options")["tensor_parallel_size"])
    numbers = 2 * model_config.num_hidden_layers * heads * head_width(model_config)
    return numbers * dtype_of(config).itemsize


def rows_at_once(config: dict, engines: int, at_most: int) -> int:
    """Completions that one of `engines` engines samples at the same time in a step. at_most: vLLM's
    default limit for each of the ranks that share an engine."""
    options = entries(config, "vllm_options")
    # InfoSeed's completions come in a second call of generate(), not on top of the first
    per_prompt = max(config["num_generations"], config["info_seed_num_seeds"])
    rows = math.ceil(config["prompts_per_step"] / engines) * per_prompt
    return min(rows, options.get("max_num_seqs", at_most * options["tensor_parallel_size"]))


class CachePlan(NamedTuple):
    """vLLM's cache of keys and values on a CPU."""

    size: int  # bytes
    held: int  # how many of a step's completions fit into it at full length


def plan_cache(config: dict, model_config, rows: int) -> CachePlan:
    """The cache for `rows` completions. vllm_options.kv_cache_memory_bytes sets its size. If that
    is 0, the cache holds all rows at full length, or as many as fit into CACHE_SHARE of the memory,
    but at least one. UserError if a given size holds none."""
    block_tokens = config["vllm_options"].get("block_size", CPU_BLOCK)
    block_bytes = block_tokens * bytes_per_token(config, model_config)
    # a row at full length takes whole blocks
    row_bytes = math.ceil(max_sequence_length(config) / block_tokens) * block_bytes
    size = entries(config, "vllm_options")["kv_cache_memory_bytes"]
    if size == 0:
        held = min(rows, max(1, int(CACHE_SHARE * rank_memory()) // row_bytes))
        size = held * row_bytes + block_bytes  # vLLM keeps one block for itself
    held = min(rows, (size - block_bytes) // row_bytes)
    if held < 1 and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:  # which takes precedence
        raise UserError(
            f"vllm_options.kv_cache_memory_bytes={size} holds no completion: one of "
            f"max_prompt_length + max_completion_length = {max_sequence_length(config)} tokens "
            f"takes {row_bytes + block_bytes} bytes; raise it, or leave it out"
        )
    return CachePlan(size, max(0, held))


def kv_cache_bytes(config: dict, model_config, rows: int) -> int:
    """Size of plan_cache() in bytes. UserError if it exceeds the memory of this machine. Prints a
    sentence if the cache holds fewer rows than a step samples at the same time, or if vLLM's own
    environment variable overrides the size."""
    size, held = plan_cache(config, model_config, rows)
    memory = rank_memory()
    what = f"vllm_options.kv_cache_memory_bytes={size}"
    from_environment = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if from_environment:
        say_on_rank_0(
            f"{what} is not used: the environment has VLLM_CPU_KVCACHE_SPACE={from_environment} "
            f"(GiB), which takes precedence in vLLM"
        )
    elif size > memory:
        raise UserError(
            f"{what} is more than the {memory / 2**30:.1f} GiB of memory that a rank may use here"
        )
    elif held < rows:
        say_on_rank_0(
            f"vLLM's cache holds {held} of the {rows} completions that a step asks for at once, at "
            f"full length; the others wait ({what})"
        )
    return size


def largest_prefill(config: dict) -> int:
    """vLLM's max_num_batched_tokens on a CPU. A whole prompt must fit in: the CPU sampler fails on
    a request with a seed whose prompt is split over two batches."""
    return max(8192, max_sequence_length(config))


def vllm_settings(model: str, config: dict, dtype: torch.dtype, on_gpu: bool) -> dict:
    """Arguments of vllm.LLM for a config."""
    settings = {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": config["seed"],
        "max_model_len": max_sequence_length(config),
        # torchrun's ranks are vLLM's workers
        "distributed_executor_backend": "external_launcher",
        # log-probs of the distribution that is sampled from: after the temperature
        "logprobs_mode": "processed_logprobs",
        # ignore the model's generation_config.json: the loss knows no top_p or repetition penalty
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,  # the bar counts files, and usually there is only one
    } | HF_FILES
    if not on_gpu:
        settings["enable_chunked_prefill"] = False
        settings["max_num_batched_tokens"] = largest_prefill(config)
    # the user's options override those above; checks.py refuses options that must stay as they are
    settings |= entries(config, "vllm_options")
    settings["enforce_eager"] = enforce_eager(config, on_gpu)
    use_float32_logits(settings, dtype, on_gpu)
    use_nccl_all_reduce(settings, on_gpu)
    if not on_gpu:  # there is no GPU memory to share or to give back
        settings["enable_sleep_mode"] = False
        engines = launched_ranks() // settings["tensor_parallel_size"]
        rows = rows_at_once(config, engines, VLLM_ROWS)
        model_config = AutoConfig.from_pretrained(model)
        settings["kv_cache_memory_bytes"] = kv_cache_bytes(config, model_config, rows)
        settings.setdefault("block_size", CPU_BLOCK)
        del settings["gpu_memory_utilization"]
    elif settings["kv_cache_memory_bytes"] == 0:
        del settings["kv_cache_memory_bytes"]  # gpu_memory_utilization sizes the cache
    return settings


def use_float32_logits(options: dict, dtype: torch.dtype, on_gpu: bool) -> None:
    """Makes vLLM compute the logits of a 16-bit model on a GPU in float32, as loss.py does: vLLM
    would round them to 16 bits, which alone shifts log-probs by .02 to .05 nats a token. The user's
    own hf_overrides take precedence."""
    if on_gpu and dtype.itemsize == 2:
        options["hf_overrides"] = {"head_dtype": "float32"} | options.get("hf_overrides", {})


def use_nccl_all_reduce(options: dict, on_gpu: bool) -> None:
    """Turns off vLLM's own all-reduce in the options of an engine on several GPUs. It shares the
    memory of CUDA graphs between processes, which together with the expandable segments of
    common.set_up_libraries() kills the process without a Python error. The user's own option takes
    precedence."""
    if on_gpu and options["tensor_parallel_size"] > 1:
        options.setdefault("disable_custom_all_reduce", True)


def own_cache(environment) -> None:
    """On the second and later nodes of a run, gives vLLM another folder for what it compiles, by
    the number of ranks on a node. vLLM files compiled code by the rank alone, and such code names
    its GPU by number: rank 4 has GPU 4 on one node with eight ranks, and GPU 0 on the second of two
    nodes with four, where the code of the other run would fail. `environment` is os.environ."""
    if launched_rank() == from_launcher("LOCAL_RANK", 0):
        return
    home = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    usual = environment.get("VLLM_CACHE_ROOT") or os.path.join(home, "vllm")
    name = f"nodes-of-{from_launcher('LOCAL_WORLD_SIZE', 1)}"
    if os.path.basename(usual) != name:  # else this was done before
        environment["VLLM_CACHE_ROOT"] = os.path.join(usual, name)


def import_vllm():
    """The vllm module; UserError if it can't be imported."""
    # vLLM reads these settings only from the environment. Its worker must share our memory and our
    # torch.distributed, so it has to run in this process
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level.upper())  # before vLLM reads the variable itself
    # ranks share the cores, so the kernel places the threads, instead of vLLM pinning them
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # FlashInfer's sampler takes no requests with a seed, and all of ours have one: don't load it
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    own_cache(os.environ)
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"rollout_engine='vllm' can't be imported ({error}): install requirements.txt on a GPU "
            f"machine, requirements-cpu.txt on others, or choose the slow rollout_engine='hf'"
        ) from None
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    # advice to let float32 products round to 10 bits: log-probs would drift from the trainer's
    warnings.filterwarnings("ignore", message="TensorFloat32")
    return vllm


def check_options(c: dict) -> None:
    """UserError for an entry of vllm_options that vLLM does not know: for a dry run, which starts
    no engine that would say so. Imports vLLM only if some entry is not one of ours."""
    ours = ENTRIES["vllm_options"]
    others = [name for name in c["vllm_options"] if name not in ours]
    if not others or c["rollout_engine"] != "vllm":
        return
    try:
        vllm = import_vllm()
    except UserError as error:  # a login node may have no vLLM
        say_on_rank_0(f"warning: vllm_options are not checked: {error}")
        return
    known = [field.name for field in fields(vllm.EngineArgs)]
    known += inspect.signature(vllm.LLM).parameters
    for name in others:
        if name not in known:
            hint = did_you_mean(name, [*ours, *known])
            raise UserError(f"vllm_options: vLLM {vllm.__version__} has no option {name!r}{hint}")


def start_refused(settings: dict, error: Exception) -> str:
    """vLLM's reason for not starting, as a sentence that names our config keys."""
    reason = str(error)
    # type(), not isinstance(): pydantic's errors are subclasses of ValueError, and are about bad
    # options or an unknown model
    if type(error) is ValueError and ("cache" in reason or "Free memory" in reason):
        return cache_refused(settings, reason)
    return (
        f"rollout_engine='vllm' can't start with model={settings['model']!r} and its vllm_options: "
        f"{in_one_line(reason, 500)}"
    )


def cache_refused(settings: dict, reason: str) -> str:
    """vLLM's reason for not allocating its cache, as a sentence that names our config keys."""
    given = []
    for key in ("gpu_memory_utilization", "kv_cache_memory_bytes"):
        if key in settings:
            given.append(f"vllm_options.{key}={settings[key]}")
    if "VLLM_CPU_KVCACHE_SPACE" in os.environ:  # overrides both
        given = [f"VLLM_CPU_KVCACHE_SPACE={os.environ['VLLM_CPU_KVCACHE_SPACE']} (GiB)"]
    what = ", ".join(given)
    reason = in_one_line(reason.split(". ")[0])
    if reason.startswith(("Available memory", "Free memory")):
        return f"{what} is more than is free: lower it ({reason})"
    return (
        f"{what} is too little for vLLM's cache, which must hold max_prompt_length + "
        f"max_completion_length = {settings['max_model_len']} tokens: raise it ({reason})"
    )


def device_bytes(device: torch.device | int) -> int:
    """Total memory of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory


def stays_on_gpu(weights: int, memory: int) -> bool:
    """Whether vLLM's weights (bytes) stay on a GPU with this much memory while vLLM sleeps: small
    ones do, because moving them would free too little to be worth the work."""
    return weights < STAY_SHARE * memory


class VllmEngine(Engine):
    """vLLM inside this process, under torchrun: one engine per rank, or one shared by
    tensor_parallel_size ranks. sync() must be given lm_head.weight even if the model ties its
    embeddings: without it the reload is silently wrong."""

    def __init__(self, model: str, config: dict, dtype: torch.dtype, device: torch.device):
        began = time.perf_counter()
        on_gpu = device.type == "cuda"
        settings = vllm_settings(model, config, dtype, on_gpu)
        # otherwise the garbage collector would scan all modules again and again while vLLM is
        # imported and set up, which takes two seconds
        gc.freeze()
        gc.disable()
        wait = "the first of two waits of 5 to 30 seconds"
        say_on_rank_0(f"starting vLLM: importing it, {wait}", sys.stderr)
        self.vllm = import_vllm()
        if settings["enforce_eager"] and not on_gpu:
            # enforce_eager still compiles one small function of the sampler, which needs g++, takes
            # 2 s and gains nothing
            torch._dynamo.config.disable = True
        self.llm = self.load(settings)
        gc.enable()
        seconds = time.perf_counter() - began
        say_on_rank_0(f"vLLM {self.vllm.__version__} is ready after {seconds:.0f} s", sys.stderr)
        self.sleeps = settings["enable_sleep_mode"]
        self.keeps_weights = self.sleeps and stays_on_gpu(self.weight_bytes(), device_bytes(device))
        self.size = settings["tensor_parallel_size"]  # ranks that share this engine
        self.process_group = None
        if self.size > 1:  # these ranks must all make the same requests, see all_requests()
            self.process_group, _ = dist.new_subgroups(self.size, timeout=DEADLINE)

    def load(self, settings: dict):
        """The vllm.LLM; UserError if vLLM does not know an option or can't start."""
        wait = (
            "" if settings["enforce_eager"] else ", and compiling it, which takes a minute or two"
        )
        say_on_rank_0(
            f"starting vLLM: loading {settings['model']} as {settings['dtype']}{wait}", sys.stderr
        )
        try:
            return self.vllm.LLM(**settings)
        except (TypeError, ValueError) as error:
            # an unknown option is a TypeError that names EngineArgs; any other TypeError is a bug
            if isinstance(error, TypeError) and "EngineArgs" not in str(error):
                raise
            raise UserError(start_refused(settings, error)) from None

    def generate(
        self, prompts_ids: list[list[int]], n: int, sampling: Sampling, group_done=None
    ) -> list:
        local_requests = list(zip(prompts_ids, sampling.seeds))
        requests, before = self.all_requests(local_requests)  # before: how many precede ours
        prompts = []
        params = []
        for prompt_ids, seed in requests:
            prompts.append({"prompt_token_ids": prompt_ids})
            params.append(self.sampling_params(n, seed, sampling))
        # vLLM numbers requests by a counter; next() takes one number, and the requests get those
        # after it
        start = next(self.llm.request_counter) + 1 + before
        local_ids = range(start, start + len(local_requests))
        self.llm.enqueue(prompts, params, use_tqdm=False)
        groups = {}
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.engine_step():
                # ranks that share an engine all see every output; each keeps its own
                if not output.finished or int(output.request_id) not in local_ids:
                    continue
                i = local_ids.index(int(output.request_id))
                groups[i] = self.rollouts_of(output)
                if group_done:
                    group_done(i, groups[i])
        return in_prompt_order(groups)

    def engine_step(self) -> list:
        try:
            return self.llm.llm_engine.step()
        except RuntimeError as error:
            # vLLM starts with such a model, and finds out at the first request
            if "Unsupported CPU attention" not in str(error):
                raise
            raise UserError(
                f"vLLM on a CPU can't run this model ({in_one_line(str(error), 200)}; heads of 32, "
                f"64, 80, 96, 112 or 128 numbers are among those it takes): choose the slow "
                f"rollout_engine='hf', or another model"
            ) from None

    def sampling_params(self, n: int, seed: int, sampling: Sampling):
        return self.vllm.SamplingParams(
            n=n,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sampling.stop_token_ids,
            seed=seed,
            logprobs=0,  # the sampled token's only
            flat_logprobs=True,  # plain lists instead of one object per token
            detokenize=False,  # the function generate() above decodes, for all engines alike
        )

    def rollouts_of(self, output) -> list[dict]:
        """The rollouts, still without "text", of one finished vLLM request."""
        rollouts = []
        for completion in output.outputs:
            rollouts.append(
                {
                    "prompt_ids": output.prompt_token_ids,
                    "completion_ids": list(completion.token_ids),
                    "logprobs": completion.logprobs.logprobs,
                    "finish_reason": completion.finish_reason,
                }
            )
        return rollouts

    def all_requests(self, local_requests: list) -> tuple[list, int]:
        """The requests of all ranks that share this engine, in rank order, and how many come before
        this rank's."""
        if self.size == 1:
            return local_requests, 0
        shares = [None] * self.size
        dist.all_gather_object(shares, local_requests, group=self.process_group)
        requests = []
        for share in shares:
            requests += share
        before = shares[: dist.get_rank(self.process_group)]
        return requests, sum(map(len, before))

    def sync(self, named_parameters) -> None:
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(named_parameters)}
        )
        if self.sleeps:
            # only now: while weights are copied, two copies of them may need the cache's memory
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()  # cached keys and values belong to the old weights

    def weight_bytes(self) -> int:
        """Bytes of vLLM's weights on this rank."""
        sizes = self.llm.apply_model(lambda lm: sum(p.nbytes for p in lm.parameters()))
        return sum(sizes)

    def sleep(self) -> None:
        """Frees the cache, and the weights unless stays_on_gpu(). Does nothing on a CPU or with
        enable_sleep_mode=False."""
        if not self.sleeps:
            return
        if not self.keeps_weights:
            # level 2 drops the weights: the next sync brings all of them. Level 1 would copy them
            # to pinned memory, which torch rounds up to powers of two: 27 GiB for 14 GiB of weights
            self.llm.sleep(level=2)
            return
        core = self.llm.llm_engine.engine_core.engine_core
        # when the last completion has ended, a batch that was scheduled ahead may still be queued
        # or, without asynchronous scheduling, finished requests are still in the scheduler
        while core.batch_queue or core.scheduler.has_requests():
            self.llm.llm_engine.step()
        self.llm.sleep(level=0)  # level 0 stops scheduling and moves nothing
        self.llm.release_kv_cache_memory()

    def wake(self) -> None:
        if self.sleeps:
            # vLLM allocates outside torch's caching allocator, which must give back what it holds
            torch.cuda.empty_cache()
            if not self.keeps_weights:
                self.llm.wake_up(tags=["weights"])

    def close(self) -> None:
        """Before the process group is destroyed, because vLLM has to destroy its own groups
        first."""
        self.llm.llm_engine.engine_core.shutdown()


# --- transformers


class Draws(LogitsProcessor):
    """Draws every token itself, because transformers has one random generator for all rows: here
    each prompt has its own. It keeps the tokens' log-probs, and returns scores that make a greedy
    generate() pick the drawn tokens."""

    def __init__(self, n: int, seeds: list[int], temperature: float):
        self.n = n
        self.temperature = temperature
        # on the CPU, so that a seed draws the same on every device
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.logps = []  # one (rows, 1) per token

    def __call__(self, input_ids, scores):
        logps = (scores.float() / self.temperature).log_softmax(1)  # (rows, V)
        if logps.isnan().any():
            raise RunStopped(
                "the policy's logits are not finite, so nothing can be sampled: lower "
                "learning_rate, and start from an earlier checkpoint or from another model"
            )
        tokens = self.draw(logps)  # (rows, 1)
        self.logps.append(logps.gather(1, tokens))
        return torch.full_like(scores, -math.inf).scatter(1, tokens, 0.0)

    def draw(self, logps: torch.Tensor) -> torch.Tensor:
        """(rows, 1): the token at which the running sum of probabilities passes a random number.
        This is several times as fast as torch.multinomial, which needs a random number per token of
        the vocabulary."""
        shares = []
        for generator in self.generators:
            shares.append(torch.rand(self.n, 1, generator=generator, dtype=torch.float64))
        sums = logps.double().exp().cumsum(1)  # (rows, V)
        at = torch.cat(shares).to(sums.device) * sums[:, -1:]  # (rows, 1)
        # right: skips tokens of probability 0, whose sum is that of the token before
        tokens = torch.searchsorted(sums, at, right=True)  # (rows, 1)
        return tokens.clamp(max=sums.shape[1] - 1)  # `at` may be rounded up to the whole sum


class HfEngine(Engine):
    """transformers' own generate(): slow and plain, to compare the fast engines with. A prompt's
    completions depend only on that prompt and its seed, except for rounding: prompts that are
    sampled together are padded to the longest."""

    def __init__(self, model: str, config: dict, dtype: torch.dtype, device: torch.device):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        # the model's own config may have a repetition penalty, which the loss knows nothing about
        self.model.generation_config = GenerationConfig()
        plain_config(self.model)
        self.shares_prompts = True  # until prompt_cache() finds that the architecture can't

    def generate(
        self, prompts_ids: list[list[int]], n: int, sampling: Sampling, group_done=None
    ) -> list:
        groups = {}
        # by length, so that there is little padding
        order = sorted(range(len(prompts_ids)), key=lambda i: len(prompts_ids[i]))
        longest = sampling.max_tokens + max(map(len, prompts_ids), default=0)
        size = max(1, min(HF_ROWS, HF_TOKENS // longest) // n)  # prompts in a batch
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            batch_sampling = sampling._replace(seeds=[sampling.seeds[i] for i in batch])
            batch_prompts = [prompts_ids[i] for i in batch]
            sampled = self.sample_together(batch_prompts, n, batch_sampling)
            for i, group in zip(batch, sampled):
                groups[i] = group
                if group_done:
                    group_done(i, group)
        return in_prompt_order(groups)

    @torch.no_grad()
    def sample_together(self, prompts_ids: list[list[int]], n: int, sampling: Sampling) -> list:
        """The n rollouts of each prompt, as a list for each."""
        stop_ids = sampling.stop_token_ids
        greedy = GenerationConfig(  # because Draws has already chosen
            max_new_tokens=sampling.max_tokens,
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
        )
        longest = max(map(len, prompts_ids))
        padded = []
        real = []  # 1: a token of the prompt, 0: padding
        for prompt_ids in prompts_ids:
            padding = longest - len(prompt_ids)  # on the left: completions begin in one column
            padded.append([0] * padding + prompt_ids)
            real.append([0] * padding + [1] * len(prompt_ids))
        prompts = torch.tensor(padded, device=self.model.device)  # (P, longest)
        mask = torch.tensor(real, device=self.model.device)  # (P, longest)
        draws = Draws(n, sampling.seeds, sampling.temperature)
        cache = self.prompt_cache(prompts, mask, n)
        # not as None: an architecture without a cache refuses the argument
        computed = {} if cache is None else {"past_key_values": cache}
        sequences = self.model.generate(
            prompts.repeat_interleave(n, 0),  # (rows, longest)
            attention_mask=mask.repeat_interleave(n, 0),  # (rows, longest)
            generation_config=greedy,
            logits_processor=[draws],
            **computed,
        )
        completions = sequences[:, longest:].tolist()  # (rows, T)
        logps = torch.cat(draws.logps, 1).tolist()  # (rows, T)
        rollouts = []
        for row, (tokens, token_logps) in enumerate(zip(completions, logps)):
            # a completion that has stopped is followed by padding
            ends = [i + 1 for i, token in enumerate(tokens) if token in stop_ids]
            length = ends[0] if ends else len(tokens)
            rollouts.append(
                {
                    "prompt_ids": prompts_ids[row // n],
                    "completion_ids": tokens[:length],
                    "logprobs": token_logps[:length],
                    "finish_reason": "stop" if ends else "length",
                }
            )
        return groups_of(rollouts, len(prompts_ids))

    def prompt_cache(self, prompts, mask, n: int):
        """The keys and values of all but the last token of each prompt, computed once and repeated
        n times. None where nothing is shared: then generate() computes the prompt of every row.

        prompts, mask: (P, longest)."""
        if n == 1 or prompts.shape[1] == 1 or not self.shares_prompts:
            return None
        one_token = GenerationConfig(max_new_tokens=1, return_dict_in_generate=True)
        # the token that it samples, which is dropped, is not in the cache
        cache = self.model.generate(
            prompts[:, :-1], attention_mask=mask[:, :-1], generation_config=one_token
        ).past_key_values
        self.shares_prompts = (
            type(cache) is DynamicCache
            and {type(layer) for layer in cache.layers} <= REPEATABLE  # no recurrent states
            # 0 tokens: the layer keeps nothing, or a recurrent state somewhere else
            and {layer.get_seq_length() for layer in cache.layers} == {prompts.shape[1] - 1}
        )
        if not self.shares_prompts:
            return None
        cache.batch_repeat_interleave(n)
        return cache

    def sync(self, named_parameters) -> None:
        """Takes over the tensors themselves. From the first sync on, sampler and policy share their
        memory, except for tensors that are copies: ZeRO-3's gathered weights and those merged with
        adapters."""
        for name, tensor in named_parameters:
            self.model.get_parameter(name).data = tensor


# --- which engine


def server_engine(model: str, config: dict, dtype: torch.dtype, device: torch.device):
    from server.engine import ServerEngine  # here, so that only runs with servers import server/

    return ServerEngine(model, config, dtype)


ENGINES = {"vllm": VllmEngine, "hf": HfEngine, "server": server_engine}


def start_engine(config: dict, device: torch.device):
    """The rollout engine that a config asks for, with the weights of config["model"]. Servers may
    hold other weights until the first sync()."""
    make = ENGINES[config["rollout_engine"]]
    return make(config["model"], config, dtype_of(config), device)


def check_class_unchanged(sampler, c: dict) -> None:
    """UserError if vLLM, in this process, has changed the transformers class that the policy needs,
    as it does for models that it has no code of its own for."""
    if isinstance(sampler, VllmEngine) and sampler.llm.model_config.using_transformers_backend():
        raise UserError(
            f"rollout_engine='vllm' has no code of its own for model={c['model']!r}: it changes "
            f"transformers', and then no policy can be made in the same process: set "
            f"rollout_engine='hf', or start servers for rollout_engine='server'"
        )


def start_sampler(c: dict, device: torch.device):
    """The rollout engine with the weights of config["model"], for scripts that do not train."""
    check_tensor_parallel(c, dist.get_world_size())
    serves = c["rollout_engine"] == "server"
    if serves and "/" in c["weight_sync"]:
        check_writable("weight_sync", c["weight_sync"], folder=True)
    sampler = start_engine(c, device)
    if serves:  # the servers may hold the weights of another model
        lm = AutoModelForCausalLM.from_pretrained(c["model"], dtype=dtype_of(c))
        sampler.sync(named_weights(lm.to(device), 0))
    return sampler


# --- metrics and logs of rollouts


def diversity_metrics(rollouts: list[dict], n: int) -> dict:
    """How much the n completions of a group differ, in tokens: distinct_1 and distinct_2, the share
    of different tokens and bigrams, and jaccard, the mean Jaccard overlap of two completions' token
    sets. Each is a mean over groups. When distinct falls and jaccard rises, a collapse is near."""
    sums = torch.zeros(3, dtype=torch.float64)
    for group in groups_of(rollouts, len(rollouts) // n):
        completions_ids = [r["completion_ids"] for r in group]
        bigrams = [list(pairwise(ids)) for ids in completions_ids]
        sums[0] += distinct(completions_ids)
        sums[1] += distinct(bigrams)
        sums[2] += jaccard(completions_ids)  # defined: a group has at least two completions
    means = (sums / (len(rollouts) // n)).tolist()
    names = ("completions/distinct_1", "completions/distinct_2", "completions/jaccard")
    return dict(zip(names, means))


def distinct(group: list[list]) -> float:
    """Different items in a group of sequences, as a share of all items."""
    return len(set().union(*group)) / max(1, sum(map(len, group)))


def jaccard(group: list[list[int]]) -> torch.Tensor:
    """Mean over pairs of n sequences: tokens in both / tokens in either."""
    n = len(group)
    lengths = torch.tensor([len(ids) for ids in group])  # (n,)
    tokens = torch.cat([torch.tensor(ids) for ids in group])  # (k,) of all sequences
    # column: numbers the different tokens from 0
    _, column = tokens.unique(return_inverse=True)  # (k,)
    row = torch.arange(n).repeat_interleave(lengths)  # (k,)
    present = torch.zeros(n, int(column.max()) + 1)  # (n, different tokens)
    present[row, column] = 1.0
    shared = present @ present.T  # (n, n) sizes of intersections
    size = present.sum(1)  # (n,)
    overlap = shared / (size[:, None] + size - shared)  # (n, n), ones on the diagonal
    return (overlap.sum() - n) / (n * (n - 1))


def completion_metrics(rollouts: list[dict], n: int) -> dict:
    """Metrics of this rank's completions: the share that was cut off, and diversity_metrics().
    mean_over_ranks() averages them, which gives the step's mean because all ranks have equally many
    completions. Every rank must return the same keys."""
    cut_off = sum(r["finish_reason"] == "length" for r in rollouts)
    return {"completions/clipped_ratio": cut_off / len(rollouts)} | diversity_metrics(rollouts, n)


def show(tokenizer, rollouts: list[dict], rewards: torch.Tensor) -> str:
    """A prompt with its best and its worst rollout, special tokens included, as the model sees
    them. It is the first prompt whose rewards differ. If there is none, it is the first prompt,
    with its first completion and the last that is different. rewards (p, G)."""
    # argmin finds the first of equal ones: of the unequal groups or, without any, of all groups
    chosen = int(equal_groups(rewards).int().argmin())
    group = groups_of(rollouts, len(rewards))[chosen]
    values = rewards[chosen].tolist()  # G
    prompt_ids = group[0]["prompt_ids"]
    lines = [f"prompt ({len(prompt_ids)} tokens): {tokenizer.decode(prompt_ids)!r}"]
    # index() finds the first of equal ones
    shown = [values.index(max(values)), values.index(min(values))]
    if shown[0] == shown[1]:  # equal rewards
        first = group[0]["completion_ids"]
        shown = [0] + [i for i, r in enumerate(group) if r["completion_ids"] != first][-1:]
    for i in shown:
        r = group[i]
        ids = r["completion_ids"]
        what = f"reward {values[i]:.3f}, {len(ids)} tokens ({r['finish_reason']})"
        lines.append(f"  {what}: {tokenizer.decode(ids)!r}")
    return "\n".join(lines)
