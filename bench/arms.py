"""What `python -m bench` runs, each in a process of its own: a few steps of ours, of TRL's, or the
least that they could cost, on the same model and prompts.

    first, steps = ours("P4G8T64V2048", beta=0.0, steps=8)

first: when the first step began, on the clock of time.perf_counter. steps: what each step took, in
seconds, {"step": ..., "learn": ..., "rollout": ...} and more.
"""

import json
import os
import re
import resource
import tempfile
import time
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

REAL = "smollm2"  # a scenario: the pretrained model of bench/smollm2.py instead of a random one
END = 0  # the token that ends a completion of a random model
NO_TOKEN = -1  # one that is never sampled
LONGEST_PROMPT = 32  # tokens; prompts have 20
GIB = 2**30
# GiB for keys and values beside TRL with vLLM, in both: less can't be given to its vLLM
CACHE = 1


def parts(scenario: str) -> dict:
    """{"P": prompts a step, "G": completions of each, "T": tokens in each, "V": vocabulary}"""
    if scenario == REAL:
        return {"P": 4, "G": 8, "T": 64, "V": 49152}
    pairs = re.findall(r"([PGTV])(\d+)", scenario)
    return {letter: int(number) for letter, number in pairs}


def has_tail(scenario: str) -> bool:
    """Whether completions end by chance; else all have T tokens."""
    return scenario.endswith("tail")


def ends(scenario: str) -> list[int]:
    """Tokens that end a completion. In a tail one in 64 of them does: the weights are random, so
    that makes lengths geometric, 64 on average."""
    if not has_tail(scenario):
        return [END]
    # single characters are below 100: all of them stay text
    return [END, *range(100, 99 + parts(scenario)["V"] // 64)]


# --- model and prompts


def prepare(scenario: str) -> Path:
    """A folder with model, tokenizer and prompts: all arms read the same one. Made once."""
    from transformers import GenerationConfig

    import sft

    size = parts(scenario)["V"]
    folder = Path(tempfile.gettempdir()) / f"bench_{os.getuid()}_{scenario}"
    if (folder / "rows.jsonl").exists():  # written last: the folder is whole
        return folder
    if scenario == REAL:
        return prepare_real(folder)
    # random weights: what a step costs does not depend on them
    sft.tiny_model(size, seed=0).save_pretrained(folder)
    tokenizer_of(size).save_pretrained(folder)
    # TRL has no flag for the ends of a completion: it reads them here
    GenerationConfig(eos_token_id=ends(scenario), pad_token_id=END).save_pretrained(folder)
    write_rows(folder / "rows.jsonl")
    return folder


def prepare_real(folder: Path) -> Path:
    """The pretrained model and prompts for it."""
    from transformers import AutoTokenizer

    from bench import smollm2

    # of its own: a broken attempt leaves no rows, and make() looks only for a model
    smollm2.make(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # ours would use it and TRL, which is given plain texts, would not
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    # every digit is a token, so that these are of one length too
    write_rows(folder / "rows.jsonl")
    return folder


def words(size: int) -> list[str]:
    """A vocabulary: the end, the characters of ASCII, the space, then words to fill it."""
    vocabulary = ["<|end|>"]
    vocabulary += [chr(i) for i in range(33, 127)]
    vocabulary.append("\u0120")  # how Qwen's tokenizer writes a space
    vocabulary += [f"\u0120w{i}" for i in range(size - len(vocabulary))]
    return vocabulary


def tokenizer_of(size: int):
    """A tokenizer of `size` words."""
    from transformers import Qwen2Tokenizer

    vocabulary = words(size)
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],  # every word is whole: prompts are one token a character
        eos_token=vocabulary[END],
        pad_token=vocabulary[END],
    )


def write_rows(path: Path) -> None:
    """64 prompts, all of 20 tokens (11 of the real model's): neither arm gains by how it pads."""
    with open(path, "w") as file:
        for i in range(64):
            # two primes: sums that look random and are the same in every run
            left = i * 7919 % 1000
            right = i * 104729 % 1000
            row = {"prompt": f"{left:03d}+{right:03d}=".rjust(20, "x"), "answer": "0"}
            file.write(json.dumps(row) + "\n")


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def reward(completion: str, answer, **row) -> float:
    """Cheap, and different within a group: else there would be nothing to learn."""
    return len(set(completion)) / 100


# --- what is measured, and how


def never_end(engine) -> None:
    """No token ends a completion of this vLLM engine of ours: each has T tokens, as TRL's have."""
    make = engine.vllm.SamplingParams

    def endless(**settings):
        return make(**settings | {"stop_token_ids": [], "ignore_eos": True})

    engine.vllm = SimpleNamespace(SamplingParams=endless)


def never_end_hf(engine) -> None:
    """The same of our engine that samples with transformers."""
    group = engine.group

    def endless(prompt_ids, n, seed, sampling):
        return group(prompt_ids, n, seed, sampling._replace(stop_token_ids=[NO_TOKEN]))

    engine.group = endless


def make_endless() -> None:
    """Every engine of ours that is made from now on samples T tokens a completion."""
    import rollout

    for engine, never in ((rollout.VllmEngine, never_end), (rollout.HfEngine, never_end_hf)):
        engine.__init__ = followed_by(engine.__init__, never)


def followed_by(start, never):
    def start_endless(engine, *args):
        start(engine, *args)
        never(engine)

    return start_endless


def memory_so_far() -> float:
    """Most that this process has held, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # Linux counts KiB


def weighed(work):
    """(what work() returns, GiB of tensors that it held at most beyond those before it)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    changes = []  # (when, bytes): negative when they are given back
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
    held = accumulate(size for _, size in sorted(changes))
    return result, max(held) / GIB


# --- ours


def ours(scenario: str, beta: float, steps: int, **changes) -> tuple:
    """train.py, one rank, vLLM in process. Changes train.py's modules for good: one call a
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
    """A config of ours with these settings, given as flags: checked as a user's would be."""
    from common import load_config

    return load_config([f"--{key}={value}" for key, value in settings.items()])


def settings_of_ours(scenario: str, beta: float, steps: int) -> dict:
    """The config of train.py that means what trl() asks of TRL."""
    size = parts(scenario)
    folder = prepare(scenario)
    settings = {
        "model": folder,
        "dataset": {"name": str(folder / "rows.jsonl")},
        "prompts_per_step": size["P"],
        "num_generations": size["G"],
        "max_completion_length": size["T"],
        "max_prompt_length": LONGEST_PROMPT,
        "reward_funcs": ["bench.arms:reward"],
        "reward_workers": 0,  # TRL's reward runs in its process too
        "objective": "dr_grpo",
        "importance_sampling": "none",
        "beta": beta,
        "learning_rate": 1e-5,
        "max_steps": steps + 1,  # the last one is weighed
        "save_steps": -1,  # TRL's saves are off too
    }
    if scenario != REAL:
        settings["max_logp_difference"] = -1  # a guard of ours, which random weights could trip
    return settings


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
        # weighing takes time and memory: it has a step of its own, which counts for neither
        peaks["memory"] = memory_so_far()
        metrics, peaks["learner"] = weighed(lambda: learn(*args))
        return metrics

    Experience.collect = collect_noted
    learner.accumulate_gradients = learn_or_weigh
    return began, peaks


def times_of(line: dict) -> dict:
    """A line of metrics.jsonl as the arms say it. What is no rollout is learning, as in TRL's arms,
    where the sync of weights is part of the rollout that needs it."""
    step = line["time/step"]
    rollout = line["time/rollout"] + line["time/sync"]
    return {"step": step, "learn": step - rollout, "rollout": rollout}


def ours_compiled(scenario: str, beta: float, steps: int) -> tuple:
    """The same with vLLM compiled, as TRL leaves it, with as much for keys and values, and with the
    importance sampling that TRL has beside vLLM. TRL makes a forward more for it."""
    options = {"enforce_eager": False, "kv_cache_memory_bytes": CACHE * GIB}
    changes = {"vllm_options": options, "importance_sampling": "sequence_mask"}
    return ours(scenario, beta, steps, **changes)


def ours_hf(scenario: str, beta: float, steps: int) -> tuple:
    """The same without vLLM: transformers samples, one prompt's completions at a time."""
    return ours(scenario, beta, steps, rollout_engine="hf")


# --- TRL's


def trl(scenario: str, beta: float, steps: int, **changes) -> tuple:
    """TRL's GRPOTrainer with transformers generation."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not changes.get("use_vllm"):
        hide_vllm_from_trl()
    from trl import GRPOConfig, GRPOTrainer

    def rewards(completions, **columns):
        return [reward(text, "") for text in completions]

    folder = prepare(scenario)
    # as ours on a CPU, whatever type the folder holds: SmolLM2's is bfloat16
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    clock = make_clock()
    with tempfile.TemporaryDirectory() as out:
        settings = settings_of_trl(scenario, beta, steps, rows_of_trl(scenario, lm))
        trainer = GRPOTrainer(
            model=lm,
            args=GRPOConfig(**settings | {"output_dir": out} | changes),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=rewards,
            train_dataset=Dataset.from_list(read_rows(folder)),
            callbacks=[clock],
        )
        # its rollouts and nothing else, with either engine
        trainer._generate = clock.timed(trainer._generate)
        trainer.train()
    return clock.first, clock.steps


# of a GRPOConfig, for every comparison: dr_grpo, and nothing kept or shown, as ours
PLAIN_TRL = {
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "temperature": 1.0,
    "learning_rate": 1e-5,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


def hide_vllm_from_trl() -> None:
    """Before TRL is imported: it would load a vLLM that is installed, even to leave it unused."""
    from trl import import_utils

    import_utils.is_vllm_available = lambda min_version=None: False


def tokens_of_ours(scenario: str, lm) -> int:
    """max_tokens_per_micro_batch, as train.py chooses it where the config leaves it open."""
    from policy import count_parameters
    from preflight import fitting_tokens

    settings = settings_of_ours(scenario, beta=0.0, steps=1)
    config = checked_config(settings)
    return fitting_tokens(config, lm.config, count_parameters(lm), ranks=1)


def rows_of_trl(scenario: str, lm) -> int:
    """Rows in a micro-batch of TRL's: as many as have the tokens of one of ours, a power of two."""
    size = parts(scenario)
    longest = LONGEST_PROMPT + size["T"]
    tokens = tokens_of_ours(scenario, lm)
    rows = size["P"] * size["G"]
    while rows > 1 and rows * longest > tokens:
        rows //= 2
    return rows


def settings_of_trl(scenario: str, beta: float, steps: int, rows: int) -> dict:
    """The GRPOConfig that means what settings_of_ours() asks of ours, with so many rows in a
    micro-batch."""
    size = parts(scenario)
    if has_tail(scenario):
        generation = {"eos_token_id": ends(scenario)}
    else:
        generation = {"min_new_tokens": size["T"]}
    return PLAIN_TRL | {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": size["P"] * size["G"] // rows,  # one update of all
        "num_generations": size["G"],
        "max_completion_length": size["T"],
        "generation_kwargs": generation,
        "beta": beta,
        "max_steps": steps,
        "use_cpu": True,
        "bf16": False,  # no autocast: float32, as ours
        "gradient_checkpointing": False,
    }


def make_clock():
    """A callback for a Trainer, with .first and .steps as an arm returns them."""
    from transformers import TrainerCallback  # takes seconds to import: here

    class Clock(TrainerCallback):
        def __init__(self):
            self.first = None
            self.steps = []

        def on_step_begin(self, *args, **kwargs):
            self.begin = time.perf_counter()
            self.generating = 0.0
            if self.first is None:
                self.first = self.begin

        def on_step_end(self, *args, **kwargs):
            step = time.perf_counter() - self.begin
            learn = step - self.generating  # whatever isn't a rollout
            self.steps.append({"step": step, "learn": learn, "rollout": self.generating})

        def timed(self, generate):
            def generate_timed(*args, **kwargs):
                begin = time.perf_counter()
                try:
                    return generate(*args, **kwargs)
                finally:
                    self.generating += time.perf_counter() - begin

            return generate_timed

    return Clock()


def trl_vllm(scenario: str, beta: float, steps: int) -> tuple:
    """The same with vLLM in process, of float32 as ours. TRL's own sync of weights fails on vLLM's
    CPU build, so it gets ours; it counts as generation."""
    prepare_vllm_of_trl()
    if has_tail(scenario):
        generation = {"stop_token_ids": ends(scenario)}
    else:
        generation = {"ignore_eos": True}
    changes = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": LONGEST_PROMPT + parts(scenario)["T"],
        "generation_kwargs": generation,  # in place of transformers' own
    }
    return trl(scenario, beta, steps, **changes)


def prepare_vllm_of_trl() -> None:
    """A sync that works on a CPU, and float32: TRL leaves the type to vLLM, which takes bfloat16.
    Before TRL is imported: vLLM reads the environment once."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # in process, as ours is
        VLLM_CPU_KVCACHE_SPACE=str(CACHE),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    # only now: see above
    from trl.generation import vllm_generation

    from policy import named_weights

    def sync(self):
        weights = named_weights(self.model, 0)  # ZeRO stage 0: whole tensors
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()

    vllm_generation.VLLMGeneration.sync_weights = sync
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32")


# --- the least it could cost


def limits(scenario: str, beta: float, steps: int) -> tuple:
    """What a step's two halves cost beside the least that they could: the learning phase beside a
    bare forward and backward of the same tokens, rollouts beside vLLM's own generate. In turns, in
    one process; beta is not looked at. There is no first step: 0."""
    import torch

    import rollout
    from ranks import start_distributed

    device = start_distributed().device
    folder = prepare(scenario)
    # what the engine and the learner read of a config
    settings = {
        "model": folder,
        "objective": "dr_grpo",
        "importance_sampling": "none",
        "beta": 0.0,
        "max_prompt_length": LONGEST_PROMPT,
        "max_completion_length": parts(scenario)["T"],
    }
    config = checked_config(settings)
    sampler = rollout.VllmEngine(str(folder), config, torch.float32, device)
    never_end(sampler)
    roll, vllm = rollouts_and_limit(sampler, scenario)
    batch = rollout.to_batch(roll(), device)
    learn, bare, forget = learning_and_limit(batch, scenario, config)

    found = []
    for i in range(steps):
        # the order alternates: what the first leaves in the caches helps neither
        order = (learn, bare, roll, vllm) if i % 2 else (bare, learn, vllm, roll)
        times = {}
        for work in order:
            sampler.llm.reset_prefix_cache()  # or the second to generate would have its prompts
            begin = time.perf_counter()
            work()
            times[work.__name__] = time.perf_counter() - begin
        forget()
        times["learn / bare"] = times["learn"] / times["bare"]
        times["vllm / rollout"] = times["vllm"] / times["roll"]
        found.append(times)
    return 0.0, found


def rollouts_and_limit(sampler, scenario: str) -> tuple:
    """(rollouts as train.py asks for them, the same completions from vLLM's own generate), as
    functions."""
    import rollout
    from preflight import load_model_files

    size = parts(scenario)
    folder = prepare(scenario)
    tokenizer = load_model_files(str(folder)).tokenizer
    prompts = []
    for row in read_rows(folder)[: size["P"]]:
        prompts.append(tokenizer(row["prompt"])["input_ids"])
    # one a prompt, the same for both: they sample the same tokens
    seeds = list(range(size["P"]))

    def roll():
        sampling = rollout.Sampling(
            temperature=1.0,
            max_tokens=size["T"],
            stop_token_ids=[END],
            seeds=seeds,
        )
        return rollout.generate(sampler, tokenizer, prompts, size["G"], sampling)

    def vllm():
        params = []
        for seed in seeds:
            one = sampler.vllm.SamplingParams(
                n=size["G"],
                temperature=1.0,
                max_tokens=size["T"],
                seed=seed,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            params.append(one)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        sampler.llm.generate(requests, params, use_tqdm=False)

    return roll, vllm


def learning_and_limit(batch: dict, scenario: str, config: dict) -> tuple:
    """(the learning phase, a bare forward and backward on the same tokens with logits for the
    completions only, what makes both forget their gradients), as functions."""
    import torch
    from transformers import AutoModelForCausalLM

    import learner
    import train

    size = parts(scenario)
    engine = train.load_policy(config, torch.device("cpu"))
    lm = AutoModelForCausalLM.from_pretrained(prepare(scenario), dtype=torch.float32).train()
    config = config | {"max_tokens_per_micro_batch": tokens_of_ours(scenario, lm)}
    # (P, G), all different: every row has an advantage, so every row is learned from
    rewards = torch.rand(size["P"], size["G"], generator=torch.Generator().manual_seed(0))
    lengths = batch["lengths"].view(size["P"], size["G"])
    measured = learner.GroupMeasures(rewards, rewards, lengths)
    targets = learner.group_targets(measured, 0.0, 0.0, config)
    counts = learner.step_counts(targets, lengths)
    begins = int(batch["prompt_lengths"][0])  # prompts are of one length

    def learn():
        batch.pop("old_logps", None)  # each time is the first update of its batch
        learner.accumulate_gradients(engine, batch, targets, 0.0, config, counts)

    def bare():
        output = lm.base_model(input_ids=batch["ids"], use_cache=False)
        hidden = output.last_hidden_state[:, begins - 1 : -1]  # (N, T, width)
        logits = lm.lm_head(hidden).flatten(0, 1)  # (N * T, V)
        sampled = batch["ids"][:, begins:].flatten()  # (N * T,)
        torch.nn.functional.cross_entropy(logits, sampled).backward()

    def forget():
        # kept as zeros: no work finds its gradients to be allocated
        engine.optimizer.zero_grad(set_to_none=False)
        lm.zero_grad(set_to_none=False)

    return learn, bare, forget
