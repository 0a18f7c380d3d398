"""Check of bench.gpu: a learning step beside one of TRL's, of the same completions, which both are
given: rollouts do not count. Needs trl (requirements-dev.txt)."""

import gc
import tempfile

import torch

from bench.arms import make_clock, words
from bench.gpu import Finding
from bench.gpu_learner import Case
from bench.shapes import GIB, PROMPT, SHAPES, batch_of, model_folder, wait_for

STEPS = 8
WARM = 3  # of these do not count
P, G = 4, 8
ROWS = 8  # of a micro-batch of TRL's where layers are recomputed: as it is used for long answers


def trl(setting):
    """dr_grpo. TRL with weights in float32, as it loads them (arithmetic in bfloat16), and in
    bfloat16. Ours keeps bfloat16 weights and their float32 copies."""
    # tokens with each prompt once; whether layers are recomputed
    cases = [("0.5b", 10_700, False), ("1.5b", 21_000, True)]
    if setting.device == "cpu":
        cases = [("tiny", 1300, False)]
    for name, tokens, recomputed in cases:
        here = setting._replace(shape=name)
        yield finding_of(f"{name}, ours", our_steps(here, tokens, recomputed))
        for dtype in (torch.float32, torch.bfloat16):
            steps = trl_steps(here, tokens, recomputed, dtype)
            yield finding_of(f"{name}, TRL, {str(dtype).removeprefix('torch.')}", steps)


def finding_of(what: str, steps: tuple) -> Finding:
    """steps: what our_steps() and trl_steps() return. Measured, not judged."""
    held, seconds, peak = steps
    median = sorted(seconds[WARM:])[len(seconds[WARM:]) // 2]
    figures = {"seconds": median, "gib": peak - held}
    return Finding(what, True, f"{median:.3f} s, {peak - held:.1f} GiB", "", figures)


def held_gib(setting) -> float:
    """GiB that are in use, of what can be freed none."""
    gc.collect()
    if setting.device == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / GIB


def peak_gib(setting) -> float:
    return torch.cuda.max_memory_allocated() / GIB if setting.device == "cuda" else 0.0


def our_steps(setting, tokens: int, recomputed: bool) -> tuple[float, list, float]:
    """(GiB held before, seconds of each step, GiB at the peak)"""
    held = held_gib(setting)
    case = Case(setting, tokens=tokens, groups=P, gradient_checkpointing=recomputed)
    clock = make_clock()
    for _ in range(STEPS):
        wait_for(case.device)
        clock.on_step_begin()
        case.step()
        wait_for(case.device)
        clock.on_step_end()
    return held, [step["step"] for step in clock.steps], peak_gib(setting)


def trl_steps(setting, tokens: int, recomputed: bool, dtype) -> tuple[float, list, float]:
    """The same of TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, Qwen2Tokenizer
    from trl import GRPOConfig, GRPOTrainer

    held = held_gib(setting)
    shape = SHAPES[setting.shape]
    vocabulary = words(shape.vocabulary)
    end = vocabulary[0]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        eos_token=end,
        pad_token=end,
    )
    batch = batch_of(shape.vocabulary, tokens, P, G, "cpu")
    rows = ROWS if recomputed else P * G
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=P * G // rows,
        num_generations=G,
        max_completion_length=int(batch["lengths"].max()),
        temperature=1.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        learning_rate=1e-6,
        max_steps=STEPS,
        use_cpu=setting.device == "cpu",
        bf16=True,
        gradient_checkpointing=recomputed,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    clock = make_clock()
    folder = model_folder(shape, setting.device)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        args=args,
        processing_class=tokenizer,
        # all different: every row has a gradient
        reward_funcs=lambda completions, **columns: list(range(len(completions))),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * (P * STEPS)),
        callbacks=[clock],
        rollout_func=lambda prompts, trainer: completions_of(batch),
    )
    trainer.train()
    return held, [step["step"] for step in clock.steps], peak_gib(setting)


def completions_of(batch: dict) -> dict:
    """A batch of ours as TRL's rollout_func gives it."""
    lengths = batch["lengths"].tolist()
    ids = batch["ids"].tolist()
    return {
        "prompt_ids": [row[:PROMPT] for row in ids],
        "completion_ids": [row[PROMPT : PROMPT + n] for row, n in zip(ids, lengths, strict=True)],
        "logprobs": None,
    }
