"""What python -m bench runs in a process of its own each: a few steps of ours, of TRL's, or the least that they could cost, on the same model and prompts.

first, steps = ours("P4G8T64V2048", beta=0.0, steps=8)      # when the first step began, [{"step": s, "learn": s, "rollout": s, ...} of each]
"""

import json
import os
import re
import resource
import socket
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace


def parts(scenario: str) -> dict:
    return {name: int(number) for name, number in re.findall(r"([PGTV])(\d+)", scenario)}


def prepare(scenario: str) -> Path:
    """A folder with model, tokenizer and prompts; both arms read the same."""
    from transformers import GenerationConfig, Qwen2Tokenizer

    import sft

    V, folder = (
        parts(scenario)["V"],
        Path(tempfile.gettempdir()) / f"bench_{os.getuid()}_{scenario}",
    )
    if (folder / "rows.jsonl").exists():
        return folder
    vocabulary = ["<|end|>", *(chr(i) for i in range(33, 127)), "\u0120"]
    vocabulary += [f"\u0120w{i}" for i in range(V - len(vocabulary))]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        eos_token="<|end|>",
        pad_token="<|end|>",
    )
    sft.tiny_model(V, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=ends(scenario), pad_token_id=0).save_pretrained(folder)
    rows = [
        {"prompt": f"{i * 7919 % 1000:03d}+{i * 104729 % 1000:03d}=".rjust(20, "x"), "answer": "0"}
        for i in range(64)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def ends(scenario: str) -> list[int]:
    """Tokens that end a completion: with random weights one in 64 of them makes lengths geometric."""
    return [0, *range(100, 99 + parts(scenario)["V"] // 64)] if scenario.endswith("tail") else [0]


def reward(completion: str, answer, **row) -> float:
    """Cheap, and different within a group."""
    return len(set(completion)) / 100


def never_end(engine) -> None:
    """EOS does not end a completion of this vLLM engine of ours."""
    make = engine.vllm.SamplingParams
    engine.vllm = SimpleNamespace(
        SamplingParams=lambda **settings: make(
            **settings | {"stop_token_ids": [], "ignore_eos": True}
        )
    )


def memory_so_far() -> float:
    """Most that this process has held, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def weighed(work):
    """(what work() returns, GiB of tensors that it held at most beyond those before it)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = work()
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in found.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    return result, max(accumulate(size for _, size in events)) / 2**30


# --- arms


def ours(scenario: str, beta: float, steps: int, **more) -> tuple:
    """train.py, one rank, vLLM in process."""
    import experience
    import learner
    import rollout
    import train
    from common import load_config

    (P, G, T, _), folder, out = (
        parts(scenario).values(),
        prepare(scenario),
        Path(tempfile.mkdtemp()) / "run",
    )
    start, collect, learn, first, peaks = (
        rollout.VllmEngine.__init__,
        experience.collect,
        learner.accumulate_gradients,
        [],
        {},
    )

    def forced(engine, *args):
        start(engine, *args)
        never_end(engine)

    def noted(*args):
        first.append(time.perf_counter())
        return collect(*args)

    def learn_or_weigh(
        *args,
    ):  # one more step is weighed, which takes time and memory and does not count for either
        if len(first) <= steps:
            return learn(*args)
        peaks["memory"] = memory_so_far()
        metrics, peaks["learner"] = weighed(lambda: learn(*args))
        return metrics

    experience.collect, learner.accumulate_gradients = noted, learn_or_weigh
    if not scenario.endswith("tail"):
        rollout.VllmEngine.__init__ = forced
    settings = dict(
        model=folder,
        dataset={"name": str(folder / "rows.jsonl")},
        output_dir=out,
        prompts_per_step=P,
        num_generations=G,
        max_completion_length=T,
        max_prompt_length=32,
        reward_funcs=["bench.arms:reward"],
        objective="dr_grpo",
        importance_sampling="none",
        beta=beta,
        max_steps=steps + 1,
        save_steps=-1,
        learning_rate=1e-5,
        max_logp_difference=-1,
        max_tokens_per_micro_batch=4096,
        reward_workers=0,
    )
    train.main(load_config([f"--{key}={value}" for key, value in (settings | more).items()]))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][:steps]
    found = [
        {
            "step": line["time/step"],
            "learn": line["time/learn"] + line["time/score"],
            "rollout": line["time/rollout"],
        }
        for line in lines
    ]
    return first[0], [
        one | {"rest": 1 - (one["learn"] + one["rollout"]) / one["step"], **peaks} for one in found
    ]


def ours_compiled(scenario: str, beta: float, steps: int) -> tuple:
    return ours(scenario, beta, steps, vllm_options={"enforce_eager": False})


def trl(scenario: str, beta: float, steps: int, **more) -> tuple:
    """TRL's GRPOTrainer with transformers generation."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    (P, G, T, _), folder, found, marks = parts(scenario).values(), prepare(scenario), [], {}
    tail = scenario.endswith("tail")
    settings = dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=P * G,
        num_generations=G,
        max_completion_length=T,
        max_steps=steps,
        learning_rate=1e-5,
        beta=beta,
        loss_type="dr_grpo",
        scale_rewards="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        generation_kwargs={"eos_token_id": ends(scenario)} if tail else {"min_new_tokens": T},
        temperature=1.0,
    )

    class Clock(TrainerCallback):
        def on_step_begin(self, *a, **k):
            marks.update(begin=time.perf_counter(), generate=0.0)
            marks.setdefault("first", marks["begin"])

        def on_step_end(self, *a, **k):
            total = time.perf_counter() - marks["begin"]
            found.append(
                {"step": total, "learn": total - marks["generate"], "rollout": marks["generate"]}
            )

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=GRPOConfig(**settings | more),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=lambda completions, **k: [reward(text, "") for text in completions],
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    generate = trainer._generate

    def timed(*a, **k):
        begin = time.perf_counter()
        try:
            return generate(*a, **k)
        finally:
            marks["generate"] += time.perf_counter() - begin

    trainer._generate = timed
    trainer.train()
    return marks["first"], found


def trl_vllm(scenario: str, beta: float, steps: int) -> tuple:
    """The same with vLLM in process. TRL's own sync of weights fails on vLLM's CPU build, so it gets ours; it counts as generation.
    Of memory it can't be given less than 1 GiB for keys and values, ours takes 0.25."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_LOGGING_LEVEL="ERROR",
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(probe.getsockname()[1]),
        )
    from trl.generation.vllm_generation import VLLMGeneration

    from policy import named_weights

    def sync(self):
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": named_weights(self.model, 0)}
        )
        self.llm.reset_prefix_cache()

    VLLMGeneration.sync_weights = sync
    forced = (
        {"stop_token_ids": ends(scenario)} if scenario.endswith("tail") else {"ignore_eos": True}
    )
    return trl(
        scenario,
        beta,
        steps,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=32 + parts(scenario)["T"],
        generation_kwargs=forced,
    )


def limits(scenario: str, beta: float, steps: int) -> tuple:
    """What a step's two halves cost beside the least they could: the learning phase and a bare forward and backward of the same model on the same tokens with
    logits for the completions only; rollouts and vLLM's own generate. In turns, one process."""
    import torch
    from transformers import AutoModelForCausalLM

    import learner
    import rollout
    import train
    from common import load_config
    from preflight import load_model_files
    from ranks import start_distributed

    (P, G, T, _), folder = parts(scenario).values(), prepare(scenario)
    _, _, device = start_distributed()
    c = load_config(
        [
            f"--{key}={value}"
            for key, value in dict(
                model=folder,
                objective="dr_grpo",
                importance_sampling="none",
                beta=0.0,
                max_tokens_per_micro_batch=4096,
                max_prompt_length=32,
                max_completion_length=T,
            ).items()
        ]
    )
    sampler, tokenizer = (
        rollout.VllmEngine(str(folder), c, torch.float32, device),
        load_model_files(str(folder)).tokenizer,
    )
    engine, lm = (
        train.load_policy(c, torch.device("cpu")),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(),
    )
    prompts = [
        tokenizer(json.loads(line)["prompt"])["input_ids"]
        for line in (folder / "rows.jsonl").read_text().splitlines()[:P]
    ]
    make, found = sampler.vllm.SamplingParams, []
    never_end(sampler)

    def roll():
        sampling = {
            "temperature": 1.0,
            "max_tokens": T,
            "stop_token_ids": [0],
            "seeds": list(range(P)),
        }
        return rollout.generate(sampler, tokenizer, prompts, G, sampling)

    def vllm():
        params = [
            make(
                n=G,
                temperature=1.0,
                max_tokens=T,
                ignore_eos=True,
                seed=i,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for i in range(P)
        ]
        sampler.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    batch = rollout.to_batch(roll(), device)
    group = {
        "rewards": torch.rand(P, G, generator=torch.Generator().manual_seed(0)),
        "lengths": batch["lengths"].view(P, G),
    }
    targets = learner.group_targets(group, 0.0, 0.0, c)
    norm, begins = (
        learner.step_counts(targets, group["lengths"]),
        int(batch["prompt_lengths"][0]),
    )  # prompts are of one length

    def learn():
        batch.pop("old_logps", None)
        learner.accumulate_gradients(engine, batch, targets, 0.0, c, norm)

    def bare():
        hidden = lm.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state[
            :, begins - 1 : -1
        ]
        torch.nn.functional.cross_entropy(
            lm.lm_head(hidden).flatten(0, 1), batch["ids"][:, begins:].flatten()
        ).backward()

    for i in range(steps):
        times = {}
        for work in (learn, bare, roll, vllm) if i % 2 else (bare, learn, vllm, roll):
            sampler.llm.reset_prefix_cache()
            begin = time.perf_counter()
            work()
            times[work.__name__] = time.perf_counter() - begin
        engine.optimizer.zero_grad(set_to_none=False)
        lm.zero_grad(set_to_none=False)
        found.append(
            times
            | {
                "learn / bare": times["learn"] / times["bare"],
                "vllm / rollout": times["vllm"] / times["roll"],
            }
        )
    return 0.0, found
