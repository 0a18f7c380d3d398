"""Arms of `python -m bench` that are ours: a few steps of train.py, in a process of its own.

    first, steps = ours("P4G8T64V2048", beta=0.0, steps=8)

first: the time at which the first step began (time.perf_counter). steps: what each step took in
seconds, {"step": ..., "learn": ..., "rollout": ...} and more.
"""

import json
import resource
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

from bench.scenarios import LONGEST_PROMPT, REAL, has_tail, parts, prepare

NO_TOKEN = -1  # one that is never sampled
GIB = 2**30
# GiB for keys and values in both when TRL has vLLM too: TRL's vLLM can't be given less
CACHE = 1


# --- what is measured, and how


def never_end(engine) -> None:
    """Makes our vLLM engine end no completion early, so that each has T tokens, as TRL's have."""
    make = engine.vllm.SamplingParams

    def endless(**settings):
        return make(**settings | {"stop_token_ids": [], "ignore_eos": True})

    engine.vllm = SimpleNamespace(SamplingParams=endless)


def never_end_hf(engine) -> None:
    """The same for our engine that samples with transformers."""
    sample = engine.sample_together

    def endless(prompts_ids, n, sampling):
        return sample(prompts_ids, n, sampling._replace(stop_token_ids=[NO_TOKEN]))

    engine.sample_together = endless


def make_endless() -> None:
    """Makes every engine of ours from now on sample T tokens a completion."""
    import rollout

    for engine, never in ((rollout.VllmEngine, never_end), (rollout.HfEngine, never_end_hf)):
        engine.__init__ = followed_by(engine.__init__, never)


def followed_by(start, never):
    def start_endless(engine, *args):
        start(engine, *args)
        never(engine)

    return start_endless


def memory_so_far() -> float:
    """The most memory that this process has held, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # Linux counts KiB


def weighed(work):
    """(what work() returns, the most GiB of tensors that it held beyond those from before)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    changes = []  # (when, bytes), negative for memory that is freed
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
    held = accumulate(size for _, size in sorted(changes))
    return result, max(held) / GIB


# --- ours


def ours(scenario: str, beta: float, steps: int, **changes) -> tuple:
    """train.py, one rank, vLLM in process. Patches train.py's modules for good, so call it once per
    process."""
    import train

    began, peaks = watch(steps)
    if not has_tail(scenario):
        make_endless()
    with tempfile.TemporaryDirectory() as base:
        out = Path(base) / "run"  # a new folder: train.py refuses a used one
        settings = settings_of_ours(scenario, beta, steps) | {"output_dir": out} | changes
        config = checked_config(settings)
        train.main(config)
        lines = (out / "metrics.jsonl").read_text().splitlines()
    times = []
    for line in lines[:steps]:  # not the step that was weighed
        times.append(times_of(json.loads(line)) | peaks)
    return began[0], times


def checked_config(settings: dict) -> dict:
    """Our config with these settings, given as flags so that they are checked like a user's."""
    from common import load_config

    return load_config([f"--{key}={value}" for key, value in settings.items()])


def settings_of_ours(scenario: str, beta: float, steps: int) -> dict:
    """The config of train.py that corresponds to what trl() sets for TRL."""
    size = parts(scenario)
    folder = prepare(scenario)
    settings = {
        "model": folder,
        "dataset": {"name": str(folder / "rows.jsonl")},
        "prompts_per_step": size["P"],
        "num_generations": size["G"],
        "max_completion_length": size["T"],
        "max_prompt_length": LONGEST_PROMPT,
        "reward_funcs": ["bench.scenarios:reward"],
        "reward_workers": 0,  # TRL's reward runs in its process too
        "objective": "dr_grpo",
        "importance_sampling": "none",
        "beta": beta,
        "learning_rate": 1e-5,
        "max_steps": steps + 1,  # the last one is weighed
        "save_steps": -1,  # TRL's saves are off too
    }
    if scenario != REAL:
        settings["max_logp_difference"] = -1  # this check could stop a run of random weights
    return settings


def tokens_of_ours(scenario: str, lm) -> int:
    """max_tokens_per_micro_batch as train.py chooses it if the config does not say."""
    from policy import count_parameters
    from preflight import fitting_tokens

    settings = settings_of_ours(scenario, beta=0.0, steps=1)
    config = checked_config(settings)
    return fitting_tokens(config, lm.config, count_parameters(lm), ranks=1)


def watch(steps: int) -> tuple[list[float], dict]:
    """(when each step of the run that follows began, peaks in GiB: "memory" of the process in
    `steps` steps, "learner" of the tensors of a learning phase). Both fill while it runs."""
    import learner
    from experience import Experience

    began = []
    peaks = {}
    collect = Experience.collect
    learn = learner.accumulate_gradients

    def collect_noted(*args):
        began.append(time.perf_counter())
        return collect(*args)

    def learn_or_weigh(*args):
        if len(began) <= steps:
            return learn(*args)
        # weighing takes time and memory, so it has a step of its own, which counts for neither
        peaks["memory"] = memory_so_far()
        metrics, peaks["learner"] = weighed(lambda: learn(*args))
        return metrics

    Experience.collect = collect_noted
    learner.accumulate_gradients = learn_or_weigh
    return began, peaks


def times_of(line: dict) -> dict:
    """A line of metrics.jsonl in the form that arms return. Whatever is not rollout is learning, as
    in TRL's arms; the sync of weights is part of the rollout that needs it."""
    step = line["time/step"]
    rollout = line["time/rollout"] + line["time/sync"]
    return {"step": step, "learn": step - rollout, "rollout": rollout}


def ours_compiled(scenario: str, beta: float, steps: int) -> tuple:
    """ours() with vLLM compiled, as TRL leaves it, with the same memory for keys and values, and
    with the importance sampling that TRL uses with vLLM. TRL makes one more forward for that."""
    options = {"enforce_eager": False, "kv_cache_memory_bytes": CACHE * GIB}
    changes = {"vllm_options": options, "importance_sampling": "sequence_mask"}
    return ours(scenario, beta, steps, **changes)


def ours_hf(scenario: str, beta: float, steps: int) -> tuple:
    """ours() without vLLM: transformers samples."""
    return ours(scenario, beta, steps, rollout_engine="hf")
