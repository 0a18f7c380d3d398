"""Rollouts: everything that knows vLLM, and the way from sampled tokens to tensors.

    engine = start_engine(config, device)
    engine.sync(named_weights(lm, zero_stage))      # after every update of the policy
    sampling = {"temperature": 1.0, "max_tokens": L, "stop_token_ids": ids, "seeds": one a prompt}
    rollouts = generate(engine, tokenizer, prompts_ids, G, sampling)
    batch = to_batch(rollouts, device)

An engine, of this process or a server, has seven methods:

    generate(prompts_ids, n, sampling, finished)  n rollouts of each prompt, prompt-major
    begin(prompts_ids, n, sampling, finished)     servers only: the same in the background, kept
                                                  for the generate() that asks for the same
    sync(named_parameters)  takes over the weights of an iterator of (name, tensor)
    sleep(), wake()         its GPU memory goes to the learner, and comes back; sleeps: whether it
                            has any to give
    take_counts()           metrics of its own since the last call
    close()                 before the process group goes

finished(i, group), if given, is called with the n rollouts of prompt i as soon as they are there.
Token ids go in, token ids come out, with the log-prob the sampler itself gave to every token; text
is decoded for the rewards and never encoded again. A rollout is {"prompt_ids", "completion_ids",
"text", "logprobs", "finish_reason"}; the EOS is part of completion_ids.
"""

import gc
import json
import logging
import math
import os
import random
import shutil
import sys
import time
import warnings
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
)

from checks import entries
from common import DEADLINE, UserError, in_one_line, rank_memory, say_once
from policy import dtype_of

# Tokens of a block of vLLM's cache on a CPU. Its own 128 leave more of the last block of every row
# empty, and a prompt is shared in whole blocks only (LOG.md, 2026-11-22).
CPU_BLOCK = 32
VLLM_ROWS = 256  # completions that vllm.LLM takes on at once by itself, for each rank
CACHE_SHARE = 0.25  # of a rank's memory that vLLM's cache may take on a CPU without being asked

SMALL = 0.1  # of a GPU's memory: weights below that stay there while vLLM sleeps

# --- vLLM in this process


def enforce_eager(config: dict, on_gpu: bool) -> bool:
    """Whether vLLM is to run the model op by op. UserError if it can't compile here."""
    eager = config["vllm_options"].get("enforce_eager", not on_gpu)
    compiler = os.environ.get("CXX", "g++")  # as torch looks for it
    if not eager and not on_gpu and not shutil.which(compiler):
        raise UserError(
            "vllm_options.enforce_eager=False compiles C++ on a CPU and found no g++ (nor what CXX "
            "names): install it, or leave the option out"
        )
    return eager


def bytes_per_token(config: dict, model_config) -> int:
    """Keys and values of one token in vLLM's cache, in all layers. model_config: Hugging Face's."""
    heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    # ranks that share an engine share the heads, and each has one at least
    heads = max(1, heads // entries(config, "vllm_options")["tensor_parallel_size"])
    size = getattr(model_config, "head_dim", None)
    size = size or model_config.hidden_size // model_config.num_attention_heads
    return 2 * model_config.num_hidden_layers * heads * size * dtype_of(config).itemsize


def rows_at_once(config: dict, engines: int, at_most: int) -> int:
    """Completions that each of `engines` is asked for at once in a step. at_most: how many vLLM
    takes on by itself for each of the ranks that share an engine."""
    options = entries(config, "vllm_options")
    # the seeded completions of InfoSeed are asked for in a second request
    group = max(config["num_generations"], config["info_seed_num_seeds"])
    rows = math.ceil(config["prompts_per_step"] / engines) * group
    return min(rows, options.get("max_num_seqs", at_most * options["tensor_parallel_size"]))


class CachePlan(NamedTuple):
    """vLLM's cache of keys and values on a CPU."""

    size: int  # bytes
    rows: int  # completions that a step asks for at once
    held: int  # of them, at full length


def plan_cache(config: dict, model_config, rows: int) -> CachePlan:
    """The cache for `rows` completions: of vllm_options.kv_cache_memory_bytes, or if that is 0 as
    much as all of them need at full length, at most CACHE_SHARE of the memory, but one row."""
    block = config["vllm_options"].get("block_size", CPU_BLOCK)  # tokens
    block_size = block * bytes_per_token(config, model_config)  # bytes
    row = math.ceil(longest_sequence(config) / block) * block_size
    size = entries(config, "vllm_options")["kv_cache_memory_bytes"]
    if size == 0:
        held = min(rows, max(1, int(CACHE_SHARE * rank_memory()) // row))
        size = held * row + block_size  # vLLM keeps a block for itself
    return CachePlan(size, rows, min(rows, (size - block_size) // row))


def kv_cache_bytes(config: dict, model_config, rows: int) -> int:
    """Bytes of plan_cache(). That it holds fewer rows than a step asks for is said, as is that
    vLLM's own variable goes before it. UserError for more than this machine has."""
    size, rows, held = plan_cache(config, model_config, rows)
    memory = rank_memory()
    what = f"vllm_options.kv_cache_memory_bytes={size}"
    from_environment = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if from_environment:
        say_once(
            f"{what} is not used: the environment has VLLM_CPU_KVCACHE_SPACE={from_environment} "
            f"(GiB), which takes precedence in vLLM"
        )
    elif size > memory:
        raise UserError(
            f"{what} is more than the {memory / 2**30:.1f} GiB of memory that a rank may use here"
        )
    elif held < rows:
        say_once(
            f"vLLM's cache holds {held} of the {rows} completions that a step asks for at once, at "
            f"full length; the others wait ({what})"
        )
    return size


def longest_sequence(config: dict) -> int:
    """Tokens of a prompt and its completion."""
    return config["max_prompt_length"] + config["max_completion_length"]


def largest_prefill(config: dict) -> int:
    """vLLM's max_num_batched_tokens: its CPU sampler fails on a seeded prompt that is cut."""
    return max(8192, longest_sequence(config))


def vllm_settings(model: str, config: dict, dtype: torch.dtype, on_gpu: bool) -> dict:
    """Arguments of vllm.LLM for a config."""
    settings = {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": config["seed"],
        "max_model_len": longest_sequence(config),
        # the ranks of torchrun are vLLM's workers
        "distributed_executor_backend": "external_launcher",
        # of the distribution that is sampled from: at the temperature
        "logprobs_mode": "processed_logprobs",
        # not the model's own top_p and repetition penalty, which the loss knows nothing of
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,  # a bar of mostly one file
    }
    if not on_gpu:
        settings["enable_chunked_prefill"] = False
        settings["max_num_batched_tokens"] = largest_prefill(config)
    # what the user says goes before what stands above; checks.py refuses what must not
    settings |= entries(config, "vllm_options")
    settings["enforce_eager"] = enforce_eager(config, on_gpu)
    if not on_gpu:  # there is no GPU memory to share or to give back
        settings["enable_sleep_mode"] = False
        engines = int(os.environ.get("WORLD_SIZE", 1)) // settings["tensor_parallel_size"]
        rows = rows_at_once(config, engines, VLLM_ROWS)
        model_config = AutoConfig.from_pretrained(model)
        settings["kv_cache_memory_bytes"] = kv_cache_bytes(config, model_config, rows)
        settings.setdefault("block_size", CPU_BLOCK)
        del settings["gpu_memory_utilization"]
    elif settings["kv_cache_memory_bytes"] == 0:
        del settings["kv_cache_memory_bytes"]  # a share of the memory is enough
    return settings


def import_vllm():
    """The module; UserError if it is not there."""
    # vLLM reads these from the environment only. Its worker must share our memory and our
    # torch.distributed, so it is no process of its own
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level.upper())  # before it reads the variable itself
    # ranks share the cores: the kernel places them
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"rollout_engine='vllm' can't be imported ({error}): install requirements.txt on a GPU "
            f"machine, requirements-cpu.txt on others, or choose the slow rollout_engine='hf'"
        ) from None
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    return vllm


def start_refused(settings: dict, error: Exception) -> str:
    """vLLM's reason for not starting, as a sentence that names our keys."""
    reason = str(error)
    # pydantic's kind is of options that are no such values, or a model that it does not know
    if type(error) is ValueError and ("cache" in reason or "Free memory" in reason):
        return cache_refused(settings, reason)
    return (
        f"rollout_engine='vllm' can't start with model={settings['model']!r} and its vllm_options: "
        f"{in_one_line(reason, 500)}"
    )


def cache_refused(settings: dict, reason: str) -> str:
    """vLLM's reason for not making its cache, as a sentence that names our keys."""
    given = []
    for key in ("gpu_memory_utilization", "kv_cache_memory_bytes"):
        if key in settings:
            given.append(f"vllm_options.{key}={settings[key]}")
    if "VLLM_CPU_KVCACHE_SPACE" in os.environ:  # goes before them
        given = [f"VLLM_CPU_KVCACHE_SPACE={os.environ['VLLM_CPU_KVCACHE_SPACE']} (GiB)"]
    what = ", ".join(given)
    reason = in_one_line(reason.split(". ")[0])
    if reason.startswith(("Available memory", "Free memory")):
        return f"{what} is more than is free: lower it ({reason})"
    return (
        f"{what} is too little for vLLM's cache, which must hold max_prompt_length + "
        f"max_completion_length = {settings['max_model_len']} tokens: raise it ({reason})"
    )


def device_bytes(device: torch.device) -> int:
    """Memory of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory


class VllmEngine:
    """vLLM inside this process, one engine per rank or one per tensor_parallel_size ranks, started
    under torchrun. It needs lm_head.weight in sync() with tied embeddings too."""

    def __init__(self, model: str, config: dict, dtype: torch.dtype, device: torch.device):
        began = time.perf_counter()
        on_gpu = device.type == "cuda"
        settings = vllm_settings(model, config, dtype, on_gpu)
        # or the collector looks at all modules again and again while vLLM is imported and set up:
        # two seconds
        gc.freeze()
        gc.disable()
        wait = "the first of two waits of 5 to 30 seconds"
        say_once(f"starting vLLM: importing it, {wait}", sys.stderr)
        self.vllm = import_vllm()
        if settings["enforce_eager"] and not on_gpu:
            # even so it compiles one small function of its sampler: needs g++, costs 2 s, gains
            # nothing
            torch._dynamo.config.disable = True
        self.llm = self.load(settings)
        gc.enable()
        seconds = time.perf_counter() - began
        say_once(f"vLLM {self.vllm.__version__} is ready after {seconds:.0f} s", sys.stderr)
        self.sleeps = settings["enable_sleep_mode"]
        # a copy to CPU memory and back takes longer than what is left in place is worth
        self.keeps_weights = self.sleeps and self.weight_bytes() < SMALL * device_bytes(device)
        self.size = settings["tensor_parallel_size"]  # ranks that share this engine
        self.group = None
        if self.size > 1:  # they must ask for the same work: they pool their prompts
            self.group, _ = dist.new_subgroups(self.size, timeout=DEADLINE)

    def load(self, settings: dict):
        """The vllm.LLM; UserError for options that it does not take or can't start with."""
        wait = (
            "" if settings["enforce_eager"] else ", and compiling it, which takes a minute or two"
        )
        say_once(
            f"starting vLLM: loading {settings['model']} as {settings['dtype']}{wait}", sys.stderr
        )
        try:
            return self.vllm.LLM(**settings)
        except (TypeError, ValueError) as error:
            # its arguments are EngineArgs: one that it does not have
            if isinstance(error, TypeError) and "EngineArgs" not in str(error):
                raise
            raise UserError(start_refused(settings, error)) from None

    def generate(self, prompts_ids: list[list[int]], n: int, sampling: dict, finished=None) -> list:
        own_requests = list(zip(prompts_ids, sampling["seeds"]))
        requests, first = self.pool(own_requests)
        prompts = []
        params = []
        for prompt_ids, seed in requests:
            prompts.append({"prompt_token_ids": prompt_ids})
            params.append(self.sampling_params(n, seed, sampling))
        # vLLM numbers its requests; ours begin here
        start = next(self.llm.request_counter) + 1 + first
        self.llm.enqueue(prompts, params, use_tqdm=False)
        groups = {}
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                i = int(output.request_id) - start
                # the others are of ranks that share this engine, which see the same outputs
                if not output.finished or not 0 <= i < len(own_requests):
                    continue
                groups[i] = self.rollouts_of(output)
                if finished:
                    finished(i, groups[i])
        return [r for i in sorted(groups) for r in groups[i]]

    def sampling_params(self, n: int, seed: int, sampling: dict):
        return self.vllm.SamplingParams(
            n=n,
            temperature=sampling["temperature"],
            max_tokens=sampling["max_tokens"],
            stop_token_ids=sampling["stop_token_ids"],
            seed=seed,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,  # plain lists, not an object a token
            detokenize=False,  # generate() does it, for all engines alike
        )

    def rollouts_of(self, output) -> list[dict]:
        """A finished request of vLLM's as rollouts without text."""
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

    def pool(self, requests: list) -> tuple[list, int]:
        """The requests of all ranks of this engine, and where ours begin."""
        if self.size == 1:
            return requests, 0
        shares = [None] * self.size
        dist.all_gather_object(shares, requests, group=self.group)
        everyones = []
        for share in shares:
            everyones += share
        before = shares[: dist.get_rank(self.group)]
        return everyones, sum(map(len, before))

    def sync(self, named_parameters) -> None:
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(named_parameters)}
        )
        if self.sleeps:
            # after the weights, so that both copies of them never lie beside the cache
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()  # cached keys and values belong to the old weights

    def weight_bytes(self) -> int:
        """On this rank."""
        sizes = self.llm.apply_model(lambda lm: sum(p.nbytes for p in lm.parameters()))
        return sum(sizes)

    def sleep(self) -> None:
        """The cache is dropped, the weights go to CPU memory unless they are small beside the GPU.
        Nothing to do on a CPU."""
        if not self.sleeps:
            return
        if not self.keeps_weights:
            self.llm.sleep(level=1)
            return
        core = self.llm.llm_engine.engine_core.engine_core
        while core.batch_queue:  # one that was scheduled ahead of the last completion's end
            self.llm.llm_engine.step()
        self.llm.sleep(level=0)  # nothing is scheduled any more
        self.llm.release_kv_cache_memory()

    def wake(self) -> None:
        if self.sleeps:
            torch.cuda.empty_cache()  # vLLM takes its memory beside torch's, which held some back
            if not self.keeps_weights:
                self.llm.wake_up(tags=["weights"])

    def take_counts(self) -> dict:
        return {}

    def close(self) -> None:
        """Before the process group goes: vLLM takes its own groups down."""
        self.llm.llm_engine.engine_core.shutdown()


# --- transformers


class SampledLogps(LogitsProcessor, StoppingCriteria):
    """Records the log-prob of every token transformers samples: called with the logits before, and
    with the token after."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.logps = None  # (n, V), of the next token
        self.steps = []  # (n, 1) a token, of the one that was sampled

    def __call__(self, input_ids, scores):
        if isinstance(scores, torch.Tensor):  # as LogitsProcessor: scores (n, V)
            self.logps = (scores.float() / self.temperature).log_softmax(1)
            return scores
        # as StoppingCriteria: the new token is the last one
        self.steps.append(self.logps.gather(1, input_ids[:, -1:]))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class HfEngine:
    """transformers' own generate on a second copy of the model: slow and plain, the oracle for the
    fast engines. One prompt at a time, so that nothing is padded and a prompt's completions depend
    on its own seed only (per prompt, not per completion)."""

    sleeps = False

    def __init__(self, model: str, config: dict, dtype: torch.dtype, device: torch.device):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        # the model's own would fill in its repetition penalty, which the loss knows nothing of
        self.model.generation_config = GenerationConfig()

    def generate(self, prompts_ids: list[list[int]], n: int, sampling: dict, finished=None) -> list:
        rollouts = []
        for i, (prompt_ids, seed) in enumerate(zip(prompts_ids, sampling["seeds"])):
            group = self.group(prompt_ids, n, seed, sampling)
            rollouts += group
            if finished:
                finished(i, group)
        return rollouts

    @torch.no_grad()
    def group(self, prompt_ids: list[int], n: int, seed: int, sampling: dict) -> list[dict]:
        """The n rollouts of a prompt."""
        stop_ids = sampling["stop_token_ids"]
        device = self.model.device
        plain = GenerationConfig(
            do_sample=True,
            temperature=sampling["temperature"],
            top_k=0,
            top_p=1.0,
            max_new_tokens=sampling["max_tokens"],
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
        )
        recorder = SampledLogps(sampling["temperature"])
        # a prompt's seed is its own affair: the generator of the process stays where it was
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            ids = torch.tensor([prompt_ids] * n, device=device)
            sequences = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=plain,
                logits_processor=[recorder],
                stopping_criteria=[recorder],
            )
        completions = sequences[:, len(prompt_ids) :].tolist()  # (n, T)
        logps = torch.cat(recorder.steps, 1).tolist()  # (n, T)
        rollouts = []
        for tokens, token_logps in zip(completions, logps):
            length = self.length(tokens, stop_ids)
            rollouts.append(
                {
                    "prompt_ids": prompt_ids,
                    "completion_ids": tokens[:length],
                    "logprobs": token_logps[:length],
                    "finish_reason": "stop" if tokens[length - 1] in stop_ids else "length",
                }
            )
        return rollouts

    def length(self, tokens: list[int], stop_ids: list[int]) -> int:
        """Tokens up to the first EOS, with it: what follows is padding."""
        for i, token in enumerate(tokens):
            if token in stop_ids:
                return i + 1
        return len(tokens)

    @torch.no_grad()
    def sync(self, named_parameters) -> None:
        weights = self.model.state_dict()
        for name, tensor in named_parameters:
            weights[name].copy_(tensor)

    def sleep(self) -> None:
        pass  # its memory is too small a part to move

    def wake(self) -> None:
        pass

    def take_counts(self) -> dict:
        return {}

    def close(self) -> None:
        pass


# --- which engine


def server_engine(model: str, config: dict, dtype: torch.dtype, device: torch.device):
    from server.engine import ServerEngine  # a wing of its own, for who wants it

    return ServerEngine(model, config, dtype)


ENGINES = {"vllm": VllmEngine, "hf": HfEngine, "server": server_engine}


def start_engine(config: dict, device: torch.device):
    """The rollout engine of a config, with the weights of config["model"]; servers may hold others
    until the first sync()."""
    make = ENGINES[config["rollout_engine"]]
    return make(config["model"], config, dtype_of(config), device)


# --- from prompts to rollouts with text


def prompt_seed(*parts) -> int:
    """A 62-bit seed from (seed, step, prompt index, ...); sample i of the prompt adds i. The same
    in every process and Python."""
    return random.Random("/".join(map(str, parts))).getrandbits(62)


def add_text(tokenizer, rollouts: list[dict]) -> list[dict]:
    """The same rollouts, now with their "text", without special tokens."""
    completions_ids = [r["completion_ids"] for r in rollouts]
    texts = tokenizer.batch_decode(completions_ids, skip_special_tokens=True)
    for r, text in zip(rollouts, texts):
        r["text"] = text
    return rollouts


def with_text(tokenizer, group_done):
    """`group_done` of rollouts that have their text."""

    def done(i: int, group: list[dict]) -> None:
        group_done(i, add_text(tokenizer, group))

    return done


def generate(
    engine, tokenizer, prompts_ids: list[list[int]], n: int, sampling: dict, group_done=None
) -> list[dict]:
    """len(prompts_ids) * n rollouts, prompt-major, "text" decoded without special tokens. Anything
    but n complete rollouts a prompt, each with a log-prob for every token, is a RuntimeError: a
    missing log-prob must not pass for 0.

    group_done(i, rollouts of prompt i) is called as soon as they are there, while the engine still
    has others to do."""
    if group_done is None:
        rollouts = add_text(tokenizer, engine.generate(prompts_ids, n, sampling))
    else:
        rollouts = engine.generate(prompts_ids, n, sampling, with_text(tokenizer, group_done))
    # below, rows of tensors belong to prompts by their number alone
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
    return rollouts


def begin(
    engine, tokenizer, prompts_ids: list[list[int]], n: int, sampling: dict, group_done
) -> None:
    """generate() in the background; the engine keeps what comes for the call that asks for the
    same."""
    engine.begin(prompts_ids, n, sampling, with_text(tokenizer, group_done))


# --- from rollouts to tensors


def pad(lists: list, dtype: torch.dtype) -> torch.Tensor:
    """(n, longest), zeros on the right. The zeros are never read: masks come from lengths."""
    rows = [torch.tensor(values, dtype=dtype) for values in lists]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def to_batch(rollouts: list[dict], device) -> dict:
    """Tensors of N rows: ids (N, S) prompt and completion, right-padded; prompt_lengths, lengths
    (N,) in tokens, EOS included; sampler_logps (N, T), aligned with the completion's first token.
    Padding on the right needs no attention mask: attention is causal, so no real token sees it."""
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
        "ids": pad(ids, torch.long).to(device),  # (N, S)
        "prompt_lengths": torch.tensor(prompt_lengths).to(device),  # (N,)
        "lengths": torch.tensor(lengths).to(device),  # (N,)
        "sampler_logps": pad(logps, torch.float32).to(device),  # (N, T)
    }


def take(batch: dict, rows: torch.Tensor) -> dict:
    """The given rows, cut to their own longest sequence and completion."""
    part = {key: values[rows] for key, values in batch.items()}
    longest = int((part["prompt_lengths"] + part["lengths"]).max())
    longest_completion = int(part["lengths"].max())
    part["ids"] = part["ids"][:, :longest]
    for key in part:
        if key.endswith("_logps"):  # (n, T): of the sampler, of the reference, of the policy
            part[key] = part[key][:, :longest_completion]
    return part


# --- what is said of them


def diversity_metrics(rollouts: list[dict], n: int) -> dict:
    """Within groups, on tokens: distinct_1 and distinct_2, the share of different tokens and
    bigrams, and the mean Jaccard overlap of the token sets of two completions; means over groups.
    Falling distinct and rising jaccard announce a collapse."""
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(rollouts), n):
        group = [r["completion_ids"] for r in rollouts[start : start + n]]
        bigrams = [list(pairwise(ids)) for ids in group]
        sums[0] += distinct(group)
        sums[1] += distinct(bigrams)
        sums[2] += jaccard(group)  # a group has at least two completions
    means = (sums / (len(rollouts) // n)).tolist()
    names = ("completions/distinct_1", "completions/distinct_2", "completions/jaccard")
    return dict(zip(names, means))


def distinct(group: list[list]) -> float:
    """Different items in a group of sequences, as a share of all."""
    return len(set().union(*group)) / max(1, sum(map(len, group)))


def jaccard(group: list[list[int]]) -> torch.Tensor:
    """Mean over pairs of n sequences: tokens in both / tokens in either."""
    n = len(group)
    lengths = torch.tensor([len(ids) for ids in group])  # (n,)
    tokens = torch.cat([torch.tensor(ids) for ids in group])
    # column: a number for each different token
    _, column = tokens.unique(return_inverse=True)
    row = torch.arange(n).repeat_interleave(lengths)
    present = torch.zeros(n, int(column.max()) + 1)  # (n, different tokens)
    present[row, column] = 1.0
    shared = present @ present.T  # (n, n) sizes of intersections
    size = present.sum(1)  # (n,)
    overlap = shared / (size[:, None] + size - shared)  # (n, n), ones on the diagonal
    return (overlap.sum() - n) / (n * (n - 1))


def completion_metrics(rollouts: list[dict], n: int) -> dict:
    """Of this rank's completions: the share that was cut off, and diversity_metrics()."""
    cut_off = sum(r["finish_reason"] == "length" for r in rollouts)
    return {"completions/clipped_ratio": cut_off / len(rollouts)} | diversity_metrics(rollouts, n)


def show(tokenizer, rollouts: list[dict], rewards: torch.Tensor) -> str:
    """The first prompt as the model sees it, and its best and its worst rollout, special tokens
    visible. rewards (p, G)."""
    scores = rewards[0].tolist()
    prompt_ids = rollouts[0]["prompt_ids"]
    lines = [f"prompt ({len(prompt_ids)} tokens): {tokenizer.decode(prompt_ids)!r}"]
    for score in (max(scores), min(scores)):  # of equal ones the first
        r = rollouts[scores.index(score)]
        ids = r["completion_ids"]
        what = f"reward {score:.3f}, {len(ids)} tokens ({r['finish_reason']})"
        lines.append(f"  {what}: {tokenizer.decode(ids)!r}")
    return "\n".join(lines)


def log_rollouts(folder, lived, rewards: torch.Tensor, step: int, rank: int) -> None:
    """All rollouts of this rank to rollouts/step_N.rank_r.jsonl; rewards (p, G)."""
    path = folder / "rollouts" / f"step_{step:06d}.rank_{rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    group_size = rewards.shape[1]
    with open(path, "w", encoding="utf-8") as file:
        for i, (r, reward) in enumerate(zip(lived.rollouts, rewards.flatten().tolist())):
            row = lived.rows[i // group_size]
            line = {
                "step": step,
                "id": row["id"],
                "prompt": row["prompt"],
                "completion": r["text"],
                "reward": reward,
                "finish_reason": r["finish_reason"],
                "tokens": len(r["completion_ids"]),
                "logprob": sum(r["logprobs"]),
            }
            if "seed_id" in r:  # of InfoSeed
                line["seed_id"] = r["seed_id"]
            file.write(json.dumps(line) + "\n")
