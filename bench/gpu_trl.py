"""Check of bench.gpu: a learning step beside one of TRL's. Both are given the same completions, so
there are no rollouts. Needs trl (requirements-dev.txt)."""

import gc
import statistics
import tempfile

import torch

from bench.gpu import SHAPES, Finding
from bench.gpu_learner import Case
from bench.scenarios import tokenizer_of
from bench.shapes import GIB, PROMPT, batch_of, model_folder, seconds_of
from bench.trl_arms import PLAIN_TRL, make_clock

REPEATS = 5  # steps that count
WARM = 3  # steps before those
P, G = 4, 8
ROWS = 8  # per micro-batch of TRL's if layers are recomputed, as for long answers


def trl(setting):
    """dr_grpo. TRL with weights in float32, as it loads them (arithmetic in bfloat16), and in
    bfloat16. Ours keeps bfloat16 weights and their float32 copies."""
    # shape; tokens, counting each prompt once; whether layers are recomputed
    cases = [("0.5b", 10_700, False), ("1.5b", 21_000, True)]
    if setting.device == "cpu":
        cases = [("tiny", 1300, False)]
    # TRL's first, because ours sets a launcher's variables, with which TRL would train in parallel
    # on one GPU, with a second copy of all gradients
    for name, tokens, recomputed in cases:
        here = setting._replace(shape=name)
        for dtype in (torch.float32, torch.bfloat16):
            what = f"{name}, TRL, {str(dtype).removeprefix('torch.')}"
            yield finding_of(what, *trl_step(here, tokens, recomputed, dtype))
            gc.collect()  # engines and trainers are part of reference cycles
    for name, tokens, recomputed in cases:
        here = setting._replace(shape=name)
        yield finding_of(f"{name}, ours", *our_step(here, tokens, recomputed))
        gc.collect()


def finding_of(what: str, seconds: float, gib: float) -> Finding:
    """A finding that is measured, not judged."""
    figures = {"seconds": seconds, "gib": gib}
    return Finding(what, True, f"{seconds:.3f} s, {gib:.1f} GiB", "", figures)


def our_step(setting, tokens: int, recomputed: bool) -> tuple[float, float]:
    """(median seconds of a step, GiB at the peak)."""
    case = Case(setting, tokens=tokens, groups=P, gradient_checkpointing=recomputed)
    seconds = seconds_of(case.step, case.device, REPEATS, WARM)
    return seconds, case.peak(case.step)


def trl_step(setting, tokens: int, recomputed: bool, dtype) -> tuple[float, float]:
    """The same for TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    gpu = setting.device == "cuda"
    held = torch.cuda.memory_allocated() if gpu else 0  # bytes, held by others
    shape = SHAPES[setting.shape]
    batch = batch_of(shape.vocabulary, tokens, P, G, "cpu")
    rows = ROWS if recomputed else P * G
    changes = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": P * G // rows,
        "num_generations": G,
        "max_completion_length": int(batch["lengths"].max()),
        "beta": 0.0,
        "max_steps": WARM + REPEATS,
        "use_cpu": not gpu,
        "bf16": True,
        "gradient_checkpointing": recomputed,
    }
    # TRL's steps wait for the device by themselves; what one leaves running, the next one waits for
    clock = make_clock()
    folder = model_folder(shape, setting.device)
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
            args=GRPOConfig(**PLAIN_TRL | changes | {"output_dir": out}),
            processing_class=tokenizer_of(shape.vocabulary),
            # all different: every row has a gradient
            reward_funcs=lambda completions, **columns: list(range(len(completions))),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * (P * (WARM + REPEATS))),
            callbacks=[clock],
            rollout_func=lambda prompts, trainer: completions_of(batch),
        )
        trainer._generate = clock.timed(trainer._generate)
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    peak = torch.cuda.max_memory_allocated() - held if gpu else 0
    seconds = statistics.median(step["learn"] for step in clock.steps[WARM:])
    return seconds, peak / GIB


def completions_of(batch: dict) -> dict:
    """A batch of ours in the form that TRL's rollout_func returns."""
    lengths = batch["lengths"].tolist()
    ids = batch["ids"].tolist()
    return {
        "prompt_ids": [row[:PROMPT] for row in ids],
        "completion_ids": [row[PROMPT : PROMPT + n] for row, n in zip(ids, lengths, strict=True)],
        "logprobs": None,
    }
