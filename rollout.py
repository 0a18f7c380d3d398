"""Rollouts: everything that knows vLLM, and the way from sampled tokens to tensors.

    engine = ENGINES["vllm"](model, config, dtype, device)
    engine.sync(named_weights(lm, zero_stage))        # after every update of the policy
    rollouts = generate(engine, tokenizer, prompts_ids, n=G, sampling={"temperature", "max_tokens", "stop_token_ids", "seeds"})
    batch = to_batch(rollouts, device)

An engine has generate(prompts_ids, n, sampling, finished), sync(named_parameters), sleep(), wake() and close(). Token ids go in, token ids
come out, with the log-prob the sampler itself gave to every token; text is decoded for the rewards and never encoded again.
A rollout is {"prompt_ids", "completion_ids", "text", "logprobs", "finish_reason"}; the EOS is part of completion_ids.
"""

import gc
import json
import os
import random
import shutil
import sys
import time
import warnings
from itertools import pairwise

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, StoppingCriteria

from checks import entries
from common import DEADLINE, UserError
from policy import dtype_of


def enforce_eager(config: dict, on_gpu: bool) -> bool:
    """Whether vLLM is to run the model op by op. UserError if it can't compile here."""
    eager = config["vllm_options"].get("enforce_eager", not on_gpu)
    if not eager and not on_gpu and not shutil.which(os.environ.get("CXX", "g++")):
        raise UserError(
            "vllm_options.enforce_eager=False compiles C++ on a CPU and found no g++ (nor what CXX "
            "names): install it, or leave the option out"
        )
    return eager


def kv_cache_bytes(config: dict) -> int:
    """vllm_options.kv_cache_memory_bytes, on a CPU. vLLM's own variable would go before it: that is said. UserError for more than this machine has."""
    size = entries(config, "vllm_options")["kv_cache_memory_bytes"]
    own = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if own:
        print(
            f"vllm_options.kv_cache_memory_bytes={size} is not used: the environment has VLLM_CPU_KVCACHE_SPACE={own} (GiB), which takes precedence in vLLM",
            flush=True,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not own and size > memory:
        raise UserError(
            f"vllm_options.kv_cache_memory_bytes={size} is more than the "
            f"{memory / 2**30:.0f} GiB of memory of this machine"
        )
    return size


def memory_options(config: dict, on_gpu: bool) -> dict:
    """How much memory vLLM takes: on a GPU a share of it, or the bytes that are asked for; on a CPU
    bytes alone."""
    if not on_gpu:
        return {"kv_cache_memory_bytes": kv_cache_bytes(config)}
    options = entries(config, "vllm_options")
    memory = {"gpu_memory_utilization": options["gpu_memory_utilization"]}
    if "kv_cache_memory_bytes" in config["vllm_options"]:
        memory["kv_cache_memory_bytes"] = options["kv_cache_memory_bytes"]
    return memory


class VllmEngine:
    """vLLM inside this process, one engine per rank or one per vllm_options.tensor_parallel_size ranks, started under torchrun."""

    def __init__(self, model: str, config: dict, dtype: torch.dtype, device: torch.device):
        options = entries(config, "vllm_options")
        memory = memory_options(config, device.type == "cuda")
        # vLLM reads these from the environment only. In-process: its worker must share our memory and our torch.distributed.
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault(
            "VLLM_CPU_OMP_THREADS_BIND", "nobind"
        )  # ranks share the cores: the kernel places them
        rank, begin = dist.get_rank(), time.perf_counter()

        def say(text: str) -> None:
            if rank == 0:
                print(text, file=sys.stderr, flush=True)

        say("starting vLLM: importing it, the first of two waits of 5 to 30 seconds")
        gc.freeze()  # or the collector looks at all modules again and again while vLLM is imported and set up: two seconds
        gc.disable()
        try:
            import vllm
        except ImportError as error:
            raise UserError(
                f"rollout_engine='vllm' can't be imported ({error}): install requirements.txt on a GPU machine, requirements-cpu.txt "
                f"on others, or choose the slow rollout_engine='hf'"
            ) from None
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        self.vllm, self.on_gpu, self.tp = (
            vllm,
            device.type == "cuda",
            options["tensor_parallel_size"],
        )
        eager = enforce_eager(config, self.on_gpu)
        if (
            eager and not self.on_gpu
        ):  # vLLM compiles one small function of its sampler even so: needs g++, costs 2 s, gains nothing
            torch._dynamo.config.disable = True
        self.sleeps = self.on_gpu and options["enable_sleep_mode"]
        longest = config["max_prompt_length"] + config["max_completion_length"]
        compiles = "" if eager else ", and compiling it, which takes a minute or two"
        say(f"starting vLLM: loading {model} as {str(dtype).removeprefix('torch.')}{compiles}")
        settings = dict(
            model=model,
            dtype=str(dtype).removeprefix("torch."),
            seed=config["seed"],
            max_model_len=longest,
            tensor_parallel_size=self.tp,
            distributed_executor_backend="external_launcher",
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from: at the temperature
            generation_config="vllm",  # not the model's own top_p and repetition penalty, which the loss knows nothing of
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(
                8192, longest
            ),  # vLLM's CPU sampler fails on a seeded prompt that is cut
            enforce_eager=eager,
            enable_sleep_mode=self.sleeps,
            disable_log_stats=True,
        )
        settings = {**settings, **config["vllm_options"], **memory}
        settings["enable_sleep_mode"] = self.sleeps  # never on a CPU
        if not self.on_gpu:
            settings.pop("gpu_memory_utilization", None)  # there its bytes are given
        try:
            self.llm = vllm.LLM(**settings)
        except ValueError as error:
            if "cache" not in str(error):
                raise
            given = ", ".join(f"vllm_options.{key}={value}" for key, value in memory.items())
            reason = str(error).split(". ")[0]
            raise UserError(
                f"{given} is too little for vLLM with max_prompt_length + "
                f"max_completion_length = {longest} tokens: {reason}"
            ) from None
        gc.enable()
        say(f"vLLM {vllm.__version__} is ready after {time.perf_counter() - begin:.0f} s")
        # ranks of one tensor-parallel engine must ask for the same work: they pool their prompts
        self.group = dist.new_subgroups(self.tp, timeout=DEADLINE)[0] if self.tp > 1 else None

    def generate(
        self, prompts_ids: list[list[int]], n: int, sampling: dict, finished=None
    ) -> list[dict]:
        requests = list(zip(prompts_ids, sampling["seeds"]))
        everyone, first = self.pool(requests)
        params = [
            self.vllm.SamplingParams(
                n=n,
                temperature=sampling["temperature"],
                max_tokens=sampling["max_tokens"],
                stop_token_ids=sampling["stop_token_ids"],
                seed=seed,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for _, seed in everyone
        ]
        groups, start = (
            {},
            next(self.llm.request_counter) + 1 + first,
        )  # vLLM numbers its requests; ours begin here
        self.llm.enqueue([{"prompt_token_ids": ids} for ids, _ in everyone], params, use_tqdm=False)
        while self.llm.llm_engine.has_unfinished_requests():
            for out in self.llm.llm_engine.step():
                i = int(out.request_id) - start
                if out.finished and 0 <= i < len(requests):
                    groups[i] = [
                        {
                            "prompt_ids": out.prompt_token_ids,
                            "completion_ids": list(one.token_ids),
                            "logprobs": one.logprobs.logprobs,
                            "finish_reason": one.finish_reason,
                        }
                        for one in out.outputs
                    ]
                    if finished:
                        finished(i, groups[i])
        return [r for i in sorted(groups) for r in groups[i]]

    def pool(self, requests: list) -> tuple[list, int]:
        """The requests of all ranks of this engine, and where ours begin."""
        if self.tp == 1:
            return requests, 0
        shares = [None] * self.tp
        dist.all_gather_object(shares, requests, group=self.group)
        return [request for share in shares for request in share], sum(
            len(share) for share in shares[: dist.get_rank(self.group)]
        )

    def sync(self, named_parameters) -> None:
        """Takes over the weights of the iterator of (name, tensor); with tied embeddings it must also carry lm_head.weight."""
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(named_parameters)}
        )
        if self.sleeps:
            self.llm.wake_up(
                tags=["kv_cache"]
            )  # after the weights, so that both copies of them never lie beside the cache
        self.llm.reset_prefix_cache()  # cached keys and values belong to the old weights

    def take_counts(self) -> dict:
        """Metrics of the engine's own since the last call; servers have some."""
        return {}

    def close(self) -> None:
        """Before the process group goes: vLLM takes its own groups down."""
        self.llm.llm_engine.engine_core.shutdown()

    def sleep(self) -> None:
        """Gives GPU memory to the learner: weights to CPU memory, KV cache dropped. Nothing to do on a CPU."""
        if self.sleeps:
            self.llm.sleep(level=1)

    def wake(self) -> None:
        if self.sleeps:
            torch.cuda.empty_cache()  # vLLM takes its memory beside torch's, which held some back
            self.llm.wake_up(tags=["weights"])


class SampledLogps(LogitsProcessor, StoppingCriteria):
    """Records the log-prob of every token transformers samples: called with the logits before, and with the token after."""

    def __init__(self, temperature: float):
        self.temperature, self.logps, self.steps = temperature, None, []

    def __call__(self, input_ids, scores):
        if isinstance(scores, torch.Tensor):  # as LogitsProcessor: scores (n, V)
            self.logps = (scores.float() / self.temperature).log_softmax(1)
            return scores
        self.steps.append(
            self.logps.gather(1, input_ids[:, -1:])
        )  # as StoppingCriteria: the new token is the last one
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class HfEngine:
    """transformers' own generate on a second copy of the model: slow and plain, the oracle for the fast engines. One prompt at a
    time, so that nothing is padded and a prompt's completions depend on its own seed only (per prompt, not per completion)."""

    def __init__(self, model: str, config: dict, dtype: torch.dtype, device: torch.device):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        self.model.generation_config = (
            GenerationConfig()
        )  # the model's own would fill in its repetition penalty, which the loss knows nothing of

    @torch.no_grad()
    def generate(
        self, prompts_ids: list[list[int]], n: int, sampling: dict, finished=None
    ) -> list[dict]:
        stop, device, rollouts = sampling["stop_token_ids"], self.model.device, []
        plain = GenerationConfig(
            do_sample=True,
            temperature=sampling["temperature"],
            top_k=0,
            top_p=1.0,
            max_new_tokens=sampling["max_tokens"],
            eos_token_id=stop,
            pad_token_id=stop[0],
        )
        for i, (prompt_ids, seed) in enumerate(zip(prompts_ids, sampling["seeds"])):
            recorder = SampledLogps(sampling["temperature"])
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                ids = torch.tensor([prompt_ids] * n, device=device)
                out = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=plain,
                    logits_processor=[recorder],
                    stopping_criteria=[recorder],
                )
            completions, logps = (
                out[:, len(prompt_ids) :].tolist(),
                torch.cat(recorder.steps, 1).tolist(),
            )
            for tokens, values in zip(completions, logps):
                end = next(
                    (i + 1 for i, t in enumerate(tokens) if t in stop), len(tokens)
                )  # what follows an EOS is padding
                rollouts.append(
                    {
                        "prompt_ids": prompt_ids,
                        "completion_ids": tokens[:end],
                        "logprobs": values[:end],
                        "finish_reason": "stop" if tokens[end - 1] in stop else "length",
                    }
                )
            if finished:
                finished(i, rollouts[-n:])
        return rollouts

    @torch.no_grad()
    def sync(self, named_parameters) -> None:
        own = self.model.state_dict()
        for name, tensor in named_parameters:
            own[name].copy_(tensor)

    def take_counts(self) -> dict:
        return {}

    def sleep(self) -> None:
        pass  # its memory is too small a part to move

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def server_engine(model: str, config: dict, dtype: torch.dtype, device: torch.device):
    from server.engine import ServerEngine  # a wing of its own, for who wants it

    return ServerEngine(model, config, dtype, device)


ENGINES = {"vllm": VllmEngine, "hf": HfEngine, "server": server_engine}


def start_engine(config: dict, device: torch.device):
    """The rollout engine of a config, with the weights of config["model"]."""
    make = ENGINES[config["rollout_engine"]]
    return make(config["model"], config, dtype_of(config), device)


def prompt_seed(*parts) -> int:
    """A 62-bit seed from (seed, step, prompt index, ...); sample i of the prompt adds i. The same in every process and Python."""
    return random.Random("/".join(map(str, parts))).getrandbits(62)


def add_text(tokenizer, rollouts: list[dict]) -> list[dict]:
    for r, text in zip(
        rollouts,
        tokenizer.batch_decode([r["completion_ids"] for r in rollouts], skip_special_tokens=True),
    ):
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
    if len(rollouts) != n * len(prompts_ids):
        raise RuntimeError(
            f"the rollout engine returned {len(rollouts)} completions for {len(prompts_ids)} "
            f"prompts x {n}"
        )
    for r in rollouts:
        tokens, logps = len(r["completion_ids"]), len(r["logprobs"])
        if tokens == 0 or tokens != logps:
            raise RuntimeError(
                f"the rollout engine returned a completion of {tokens} tokens with {logps} log-probs"
            )
    return rollouts


def begin(
    engine, tokenizer, prompts_ids: list[list[int]], n: int, sampling: dict, group_done
) -> None:
    """generate() in the background; the engine keeps what comes for the call that asks for the same."""
    engine.begin(prompts_ids, n, sampling, with_text(tokenizer, group_done))


def pad(lists: list, dtype: torch.dtype) -> torch.Tensor:
    """(n, longest), zeros on the right. The zeros are never read: masks come from lengths."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(x, dtype=dtype) for x in lists], batch_first=True
    )


def to_batch(rollouts: list[dict], device) -> dict:
    """Tensors of N rows: ids (N, S) prompt and completion, right-padded; prompt_lengths, lengths (N,) in tokens, EOS included;
    sampler_logps (N, T), aligned with the completion's first token. Padding on the right needs no attention mask: attention
    is causal, so no real token ever sees it."""
    batch = {
        "ids": pad([r["prompt_ids"] + r["completion_ids"] for r in rollouts], torch.long),
        "prompt_lengths": torch.tensor([len(r["prompt_ids"]) for r in rollouts]),
        "lengths": torch.tensor([len(r["completion_ids"]) for r in rollouts]),
        "sampler_logps": pad([r["logprobs"] for r in rollouts], torch.float32),
    }
    return {key: value.to(device) for key, value in batch.items()}


def take(batch: dict, rows: torch.Tensor) -> dict:
    """The given rows, cut to their own longest sequence and completion."""
    part = {key: value[rows] for key, value in batch.items()}
    part["ids"] = part["ids"][:, : int((part["prompt_lengths"] + part["lengths"]).max())]
    return part | {
        key: part[key][:, : int(part["lengths"].max())] for key in part if key.endswith("_logps")
    }


def diversity_metrics(rollouts: list[dict], n: int) -> dict:
    """Within groups, on tokens: distinct_1 and distinct_2, the share of different tokens and bigrams, and the mean Jaccard overlap
    of the token sets of two completions; means over groups. Falling distinct and rising jaccard announce a collapse."""
    sums = torch.zeros(3, dtype=torch.float64)
    for g in range(0, len(rollouts), n):
        group = [r["completion_ids"] for r in rollouts[g : g + n]]
        pairs = [list(pairwise(ids)) for ids in group]
        for k, grams in enumerate((group, pairs)):
            sums[k] += len(set().union(*grams)) / max(1, sum(map(len, grams)))
        _, column = torch.cat([torch.tensor(ids) for ids in group]).unique(return_inverse=True)
        member = torch.arange(n).repeat_interleave(torch.tensor([len(ids) for ids in group]))
        present = torch.zeros(n, int(column.max()) + 1).index_put(
            (member, column), torch.tensor(1.0)
        )  # (n, different tokens)
        shared = present @ present.T  # (n, n) sizes of intersections
        size = present.sum(1)
        jaccard = shared / (size[:, None] + size - shared)
        sums[2] += (jaccard.sum() - n) / (n * (n - 1))
    return dict(
        zip(
            ("completions/distinct_1", "completions/distinct_2", "completions/jaccard"),
            (sums / (len(rollouts) // n)).tolist(),
        )
    )


def completion_metrics(rollouts: list[dict], n: int) -> dict:
    """Of this rank's completions: the share that was cut off, and diversity_metrics()."""
    cut_off = sum(r["finish_reason"] == "length" for r in rollouts)
    return {
        "completions/clipped_ratio": cut_off / len(rollouts),
        **diversity_metrics(rollouts, n),
    }


def show(tokenizer, rollouts: list[dict], rewards: torch.Tensor) -> str:
    """The first prompt as the model sees it, and its best and its worst rollout, special tokens visible."""
    group, scores = rollouts[: rewards.shape[1]], rewards[0].tolist()
    lines = [
        f"prompt ({len(group[0]['prompt_ids'])} tokens): {tokenizer.decode(group[0]['prompt_ids'])!r}"
    ]
    for i in (scores.index(max(scores)), scores.index(min(scores))):
        ids = group[i]["completion_ids"]
        lines.append(
            f"  reward {scores[i]:.3f}, {len(ids)} tokens ({group[i]['finish_reason']}): {tokenizer.decode(ids)!r}"
        )
    return "\n".join(lines)


def log_rollouts(folder, lived, rewards: torch.Tensor, step: int, rank: int) -> None:
    """All rollouts of this rank to rollouts/step_N.rank_r.jsonl; rewards (p, G)."""
    path = folder / "rollouts" / f"step_{step:06d}.rank_{rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for i, (r, reward) in enumerate(zip(lived.rollouts, rewards.flatten().tolist())):
            row = lived.rows[i // rewards.shape[1]]
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
            if "seed_id" in r:
                line["seed_id"] = r["seed_id"]
            file.write(json.dumps(line) + "\n")
