"""A fake of vLLM on a GPU, for machines without: transformers samples, on the CPU, but engine and
learner go the way they go on a GPU, by vLLM's rules of sleep: asleep there is nothing to generate
with, nor to load weights into. It shows the order of calls, no kernel and no memory.

    import fake_vllm
    fake_vllm.install()         # before an engine is made
"""

import itertools
from types import SimpleNamespace

import torch

import rollout

EVERYTHING = {"weights", "kv_cache"}
GPU = torch.device("cuda", 0)
calls = []  # what was asked of the fake, in this process


class FakeLLM:
    def __init__(self, **settings):
        if not settings.get("enable_sleep_mode"):
            raise RuntimeError("fake vLLM: on a GPU the engine is to sleep")
        dtype = getattr(torch, settings["dtype"])
        self.sampler = rollout.HfEngine(settings["model"], {}, dtype, torch.device("cpu"))
        self.asleep = set()
        self.paused = False
        self.request_counter = itertools.count()
        self.waiting = []
        # code of its own for the model
        self.model_config = SimpleNamespace(using_transformers_backend=lambda: False)
        scheduler = SimpleNamespace(has_requests=lambda: bool(self.waiting))
        queues = SimpleNamespace(batch_queue=[], scheduler=scheduler)
        core = SimpleNamespace(shutdown=lambda: None, engine_core=queues)
        self.llm_engine = SimpleNamespace(
            has_unfinished_requests=lambda: bool(self.waiting), step=self.step, engine_core=core
        )

    def refuse_asleep(self, what: str, needed: set) -> None:
        missing = self.asleep & needed
        if missing or (self.paused and "kv_cache" in needed):
            raise RuntimeError(f"fake vLLM: {what} while {missing or 'all'} sleeps")

    def enqueue(self, prompts: list, sampling_params: list, use_tqdm: bool) -> None:
        self.refuse_asleep("generate", EVERYTHING)
        calls.append("generate")
        for prompt, asked in zip(prompts, sampling_params, strict=True):
            number = str(next(self.request_counter))
            self.waiting.append((number, prompt["prompt_token_ids"], asked))

    def step(self) -> list:
        self.refuse_asleep("step", EVERYTHING)
        number, prompt_ids, asked = self.waiting.pop(0)
        sampling = rollout.Sampling(
            temperature=asked.temperature,
            max_tokens=asked.max_tokens,
            stop_token_ids=asked.stop_token_ids,
            seeds=[asked.seed % 2**62],
        )
        completions = []
        for r in self.sampler.generate([prompt_ids], asked.n, sampling):
            logps = SimpleNamespace(logprobs=r["logprobs"])
            completions.append(
                SimpleNamespace(
                    token_ids=r["completion_ids"], logprobs=logps, finish_reason=r["finish_reason"]
                )
            )
        done = SimpleNamespace(request_id=number, finished=True, outputs=completions)
        done.prompt_token_ids = prompt_ids
        return [done]

    def collective_rpc(self, method: str, kwargs: dict) -> None:
        if method != "reload_weights" or set(kwargs) != {"weights_iterator"}:
            raise RuntimeError(f"fake vLLM: no {method}({', '.join(kwargs)})")
        self.refuse_asleep("reload_weights", {"weights"})
        calls.append("reload")
        # vLLM copies what it is given
        self.sampler.sync((name, w.clone()) for name, w in kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> None:
        self.refuse_asleep("reset_prefix_cache", {"kv_cache"})

    def sleep(self, level: int) -> None:
        calls.append(f"sleep {level}")
        self.paused = True
        if level > 0:
            self.asleep = set(EVERYTHING)

    def release_kv_cache_memory(self) -> None:
        if not self.paused or self.asleep:
            raise RuntimeError("fake vLLM: release_kv_cache_memory() requires a completed pause")
        self.asleep.add("kv_cache")

    def wake_up(self, tags: list[str]) -> None:
        calls.append(f"wake {' '.join(tags)}")
        if not set(tags) <= EVERYTHING | {"scheduling"}:
            raise RuntimeError(f"fake vLLM: no such tags: {tags}")
        self.asleep -= set(tags)
        self.paused = bool(self.asleep)  # scheduling goes on once all is awake

    def apply_model(self, function) -> list:
        return [function(self.sampler.model)]


def install() -> None:
    """Engines made in this process from now on are vLLM on a GPU, by its fake."""
    fake = SimpleNamespace(__version__="(fake)", LLM=FakeLLM, SamplingParams=SimpleNamespace)

    def start_engine(config: dict, device):
        return rollout.VllmEngine(config["model"], config, rollout.dtype_of(config), GPU)

    rollout.import_vllm = lambda: fake
    rollout.start_engine = start_engine
    rollout.device_bytes = lambda device: 80 * 2**30
