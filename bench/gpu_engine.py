"""Checks of bench.gpu: vLLM in this process, on random weights."""

import torch

import rollout
from bench.arms import checked_config
from bench.gpu import SHAPES, Finding
from bench.shapes import GIB, model_folder
from policy import Policy, named_weights
from ranks import start_distributed

GAP = 0.03  # nats a token in bfloat16 between sampler and trainer
PROMPTS = 8
TOKENS = 48  # per completion


class Case:
    """An engine, and the policy whose weights it should have."""

    def __init__(self, setting):
        from transformers import AutoModelForCausalLM

        self.device = start_distributed().device
        shape = SHAPES[setting.shape]._replace(layers=4)  # real widths; depth only adds time
        folder = model_folder(shape, self.device)
        on_gpu = self.device.type == "cuda"
        values = {
            "model": folder,
            "dtype": "bfloat16",
            "max_prompt_length": 32,
            "max_completion_length": TOKENS,
            # on a GPU the default share; on a CPU half a GiB of keys and values is plenty here
            "vllm_options": {} if on_gpu else {"kv_cache_memory_bytes": 2**29},
        }
        c = checked_config(values)
        # the engine first, because it measures what is free
        self.engine = rollout.VllmEngine(str(folder), c, torch.bfloat16, self.device)
        self.engine.sleep()
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(self.device)
        self.policy = Policy(lm, 1.0, 512)  # temperature, tokens in a chunk of the head
        generator = torch.Generator().manual_seed(0)
        # from 3 on: the first ids may be special tokens
        prompts = torch.randint(3, shape.vocabulary, (PROMPTS, 20), generator=generator)
        self.prompts = prompts.tolist()
        self.sync()

    def sync(self) -> None:
        self.engine.wake()
        self.engine.sync(named_weights(self.policy.lm, 0))

    def generate(self, temperature: float = 1.0) -> list[dict]:
        sampling = rollout.Sampling(
            temperature=temperature,
            max_tokens=TOKENS,
            stop_token_ids=[0],
            seeds=list(range(PROMPTS)),  # the same each time: the same weights, the same tokens
        )
        return self.engine.generate(self.prompts, 2, sampling)

    @torch.no_grad()
    def gap(self, rollouts: list[dict], temperature: float = 1.0) -> float:
        """Mean difference between the sampler's log-probs and the policy's."""
        self.policy.temperature = temperature
        batch = rollout.to_batch(rollouts, self.device)
        logps, _ = self.policy(batch["ids"], batch["prompt_lengths"], batch["lengths"])  # (N, T)
        apart = (logps - batch["sampler_logps"]).abs().sum()  # both are 0 behind a row's end
        return (apart / batch["lengths"].sum()).item()


def tokens_of(rollouts: list[dict]) -> list:
    return [r["completion_ids"] for r in rollouts]


def about(engine) -> str:
    """What vLLM has chosen to run."""
    config = engine.llm.llm_engine.vllm_config
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    # vllm.v1.worker.gpu.model_runner is the second of vLLM's, ...gpu_model_runner the first
    runner = type(worker.model_runner).__module__.removeprefix("vllm.v1.worker.")
    scheduling = getattr(config.scheduler_config, "async_scheduling", "?")  # not in all versions
    return (
        f"vLLM {engine.vllm.__version__}, {runner}, "
        f"async {scheduling}, eager {config.model_config.enforce_eager}"
    )


def engine(setting):
    """Log-probs, seeds, the sync of weights, sleep: everything that the trainer relies on."""
    case = Case(setting)
    for temperature in (1.0, 0.7):  # vLLM must report those of the distribution it samples from
        gap = case.gap(case.generate(temperature), temperature)
        what = f"log-probs at T {temperature}"
        wanted = f"< {GAP} nats ({about(case.engine)})"
        yield Finding(what, gap < GAP, f"{gap:.4f} nats", wanted, {"gap": gap})
    first = case.generate()
    same = tokens_of(case.generate()) == tokens_of(first)
    yield Finding("seeds", same, "repeat" if same else "give others", "repeat")
    yield proof_of_sync(case, first)
    yield from naps(case, first)


def proof_of_sync(case: Case, first: list[dict]) -> Finding:
    """The sampler follows weights that change, and follows them back."""
    before = [p.detach().clone() for p in case.policy.parameters()]
    with torch.no_grad():
        for p in case.policy.parameters():
            # by a third of their own spread, far more than the gap. A single number has no spread
            p.add_(torch.randn_like(p) * 0.3 * p.float().std().nan_to_num(0.0))
    stale = case.gap(first)
    case.sync()
    fresh = case.gap(case.generate())
    # and back: the old tokens return only if every weight was written
    with torch.no_grad():
        for p, old in zip(case.policy.parameters(), before, strict=True):
            p.copy_(old)
    case.sync()
    same = tokens_of(case.generate()) == tokens_of(first)
    good = fresh < GAP < stale and same
    measured = f"{stale:.3f} nats before, {fresh:.4f} after; {'same' if same else 'other'} tokens"
    return Finding("a sync", good, measured, f"> {GAP}, < {GAP}, then the old tokens")


def naps(case: Case, first: list[dict]):
    """Sleep frees memory, and the engine wakes up unchanged."""
    on_gpu = case.device.type == "cuda"
    # first weights stay where they are, as in small models; then they are dropped, as in large
    # ones. Twice each, because a leak shows from the second time on
    for i, keeps in enumerate((True, True, False, False)):
        case.engine.keeps_weights = keeps
        free = torch.cuda.mem_get_info()[0] if on_gpu else 0
        case.engine.sleep()
        freed = (torch.cuda.mem_get_info()[0] - free) / GIB if on_gpu else 0.0
        case.sync()  # wakes it
        same = tokens_of(case.generate()) == tokens_of(first)
        good = same and (freed > 1 or not on_gpu)  # on a CPU it never sleeps
        measured = f"{freed:.1f} GiB freed, {'same' if same else 'other'} tokens"
        what = f"sleep {i + 1}, weights {'stay' if keeps else 'go'}"
        yield Finding(what, good, measured, "> 1 GiB, same tokens", {"gib": freed})
