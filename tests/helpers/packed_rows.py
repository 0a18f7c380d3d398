"""Models of many architectures, rows that share prompts in every way, and what packed and padded
rows of them have in common."""

import copy
import random

import torch
import transformers
from hypothesis import settings
from hypothesis import strategies as st

import rollout
from policy import Policy

examples = settings(derandomize=True, deadline=None, max_examples=60)
few = settings(derandomize=True, deadline=None, max_examples=30)
BASE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
MODELS = {  # class: what it needs besides
    "Qwen2": {},
    "Qwen3": {},
    "Llama": {},
    "Llama, as many keys as queries": {"num_key_value_heads": 4},
    "Llama, one head of keys": {"num_key_value_heads": 1},
    "Mistral": {"sliding_window": None},
    "Gemma": {"tie_word_embeddings": True},
    "Phi3": {},
    "Olmo2": {},
    "Granite": {},
    "SmolLM3": {},
    "Qwen3Moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "Gemma2": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": 64,
    },
    "Gemma3Text": {"sliding_window": 64, "final_logit_softcapping": None},
}
TOLERANCE = 1e-5  # of values in nats, and of gradients relative to the largest


def model(name: str = "Qwen2", **changes):
    torch.manual_seed(1)
    make_config = getattr(transformers, f"{name.split(',')[0]}Config")
    config = make_config(**{**BASE, **MODELS.get(name, {}), **changes})
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in lm.parameters():  # enough to make every token's neighbours matter
            is_scale = p.ndim == 1 and p.any()
            p.copy_((1 if is_scale else p) + 0.1 * torch.randn_like(p))
    return lm


def batch_of(rows: list[tuple[list, list]], junk: int = 0) -> dict:
    """From (prompt, completion) token ids; `junk` more columns, and another token wherever a row
    has ended."""
    rollouts = []
    for prompt, completion in rows:
        logprobs = [0.0] * len(completion)
        rollouts.append({"prompt_ids": prompt, "completion_ids": completion, "logprobs": logprobs})
    batch = rollout.to_batch(rollouts, "cpu")
    if not junk:
        return batch
    ids = torch.nn.functional.pad(batch["ids"], (0, junk))
    ends = batch["prompt_lengths"] + batch["lengths"]
    others = torch.randint(50, ids.shape, generator=torch.Generator().manual_seed(junk))
    ended = torch.arange(ids.shape[1]) >= ends[:, None]
    return batch | {"ids": torch.where(ended, others, ids)}


def run(policy, batch: dict, **more):
    """(values, {name: gradient}) of one random linear functional of both results."""
    policy.zero_grad()
    outs = policy(batch["ids"], batch["prompt_lengths"], batch["lengths"], **more)
    outs = [x for x in outs if x is not None]
    generator = torch.Generator().manual_seed(0)
    sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outs).backward()
    grads = {}
    for name, p in policy.named_parameters():
        if p.grad is not None:
            grads[name] = p.grad.clone()
    return [x.detach() for x in outs], grads


def assert_same(a, b, tolerance=TOLERANCE):
    values, grads = a
    wanted, wanted_grads = b
    for x, y in zip(values, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    assert grads
    assert grads.keys() == wanted_grads.keys()
    scale = max(g.abs().max().item() for g in wanted_grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad,
            wanted_grads[name],
            rtol=0,
            atol=tolerance * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def both(lm, batch: dict, tolerance=TOLERANCE, seeds=0, **more):
    """Packed and padded copies of lm say and learn the same."""
    torch.manual_seed(2)
    padded = Policy(copy.deepcopy(lm), 0.7, 7, seeds, pack=False)
    packed = Policy(copy.deepcopy(lm), 0.7, 7, seeds, pack=True)
    packed.load_state_dict(padded.state_dict())
    assert_same(run(packed, batch, **more), run(padded, batch, **more), tolerance)


def tokens(rng, count: int) -> list:
    return rng.choices(range(50), k=count)


def group(prompt: list, *lengths: int, seed: int = 0) -> list:
    rng = random.Random(f"{prompt} {seed}")
    return [(prompt, tokens(rng, n)) for n in lengths]


def shared_by(before: tuple[list, list] | None, row: tuple[list, list]) -> int:
    """How many of its first tokens a row (prompt, completion) shares with the row before it."""
    if before is None:
        return 0
    prompt, completion = row
    common = 0
    while common < min(len(prompt), len(before[0])) and prompt[common] == before[0][common]:
        common += 1
    if prompt == before[0] or 2 * common >= len(prompt) + len(completion):
        return common
    return 0


A = [5, 6, 7]
B = [8, 9, 10, 11, 12]
C = [13]
EXAMPLES = [30, 31, 32, 33, 34, 35, 36, 37]  # as few-shot prompts begin
POWERS = [1, 2, 3, 4, 5, 8, 9, 16, 17]
MIXED = (
    group(A, 3, 1, 6, 2)
    + group(C, 2, 5)
    + group(B, 4)
    + group(A, 5, 2, seed=1)
    + group([1, 2, 3, 4], 1, 1, 1)
)
LAYOUTS = {
    "one group": group(A, 3, 1, 6, 2),
    "groups of prompts of different lengths": group(A, 3, 1) + group(B, 2, 5) + group(C, 4, 4),
    "prompts of one length, other ids": group(A, 3, 2)
    + group([5, 6, 8], 3, 2)
    + group([4, 6, 8], 1, 5),
    "the same prompt again later": group(A, 3, 1) + group(B, 2, 5) + group(A, 4, 2, seed=1),
    "neighbouring groups of one prompt": group(A, 3, 1) + group(A, 2, 5, seed=1),
    "single rows": group(A, 3) + group(B, 2) + group(C, 5) + group(A, 2, seed=1),
    "one row": group(A, 4),
    "one row, one token": group(C, 1),
    "one prompt of one token": group(C, 1, 2, 3),
    "completions of one token": group(A, 1, 1, 1),
    "a group between single rows": group(B, 3) + group(A, 2, 7) + group(C, 4),
    "prompts that begin another": group([5], 2, 3)
    + group([5, 6], 2, 3)
    + group([5, 6, 7], 2, 3)
    + group([5, 6], 1, 4, seed=1),
    "prompts with the same examples": group([*EXAMPLES, 1], 3, 1, 2)
    + group([*EXAMPLES, 2, 3], 2, 4)
    + group(EXAMPLES, 1, 3)
    + group([*EXAMPLES[:-1], 9, 4], 2)
    + group([*EXAMPLES[:-1], 9, 5], 1, 6),
    "prompts with the same examples and answers of every length": group([*EXAMPLES, 1], 30, 1)
    + group([*EXAMPLES, 2], 30, 1)
    + group([*EXAMPLES, 3], 1, 30),
    "a prompt and its first completion tokens": [
        ([5, 6], [7, 8, 9]),
        ([5, 6], [7, 9]),
        ([5, 6, 7], [8, 9]),
        ([5, 6, 7], [8, 8]),
    ],
    "the same row over and over": [(A, [20, 21])] * 4,
    "completions of powers of two": group(A, *POWERS),
    "prompts of powers of two": [row for n in POWERS for row in group([5 + n] * n, 1, 3)],
    "rows of powers of two": [
        row
        for n in POWERS[1:]
        for row in group(list(range(n // 2 + 1))[: n - 1], n - min(n - 1, n // 2 + 1))
    ],
    "everything": MIXED,
}
# rows of a few prompts that begin with one another, in runs of any length
shapes = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 18)), min_size=1, max_size=9)
PROMPTS = [[5], [5, 6], [5, 6, 7, 8], [9, 6, 7, 8], [5, 6, 7, 8, *range(20, 33)], [0]]
PROMPTS += [[5, 6, 7, 8, *range(20, 31), 4], [5, 6, 7, 8, *range(20, 31), 4, 4]]


def rows_of(shape) -> list:
    rng = random.Random(str(shape))
    return [(PROMPTS[which], rng.choices([0, 7, 8, 20], k=n)) for which, n in shape]
