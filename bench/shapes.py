"""Models of real shapes with random weights, batches for them, and the best that a GPU can do."""

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from bench.gpu import Shape

PROMPT = 128  # tokens per prompt
GIB = 2**30


def config_of(shape: Shape):
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.feed_forward,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    )


def random_model(shape: Shape, device, dtype=torch.bfloat16):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):  # billions of random numbers, drawn where they are needed
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)


def model_folder(shape: Shape, device) -> Path:
    """A folder with random weights, saved once, whole or not at all."""
    name = "_".join(map(str, shape))
    # this user's own, because another's folder might not be readable
    folder = Path(tempfile.gettempdir()) / f"bench_gpu_{os.getuid()}_{name}"
    if (folder / "model.safetensors").exists():
        return folder
    # made beside it, so that a process killed here leaves no half model under that name
    part = folder.with_name(folder.name + ".part")
    for remains in (part, folder):  # left by such a process
        shutil.rmtree(remains, ignore_errors=True)
    random_model(shape, device).save_pretrained(part)
    os.replace(part, folder)
    return folder


def batch_of(vocabulary: int, tokens: int, groups: int, G: int, device) -> dict:
    """A batch of about `tokens` tokens, counting each prompt once: `groups` prompts with G
    completions each, whose lengths lie between half of the longest and the longest."""
    rows = groups * G
    longest = int((tokens - groups * PROMPT) / rows / 0.75)  # the mean is 3/4 of the longest
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(longest / 2, longest, rows).long().clamp(min=1)
    lengths = lengths[torch.randperm(rows, generator=generator)]  # (N,), in no order
    # from 3 on: the first ids may be special tokens
    ids = torch.randint(3, vocabulary, (rows, PROMPT + longest), generator=generator)  # (N, W)
    ids[:, :PROMPT] = ids[::G, :PROMPT].repeat_interleave(G, 0)  # one prompt per group
    batch = {
        "ids": ids,
        "prompt_lengths": torch.full((rows,), PROMPT),
        "lengths": lengths,
        "sampler_logps": torch.zeros(rows, longest),  # (N, T)
    }
    return {key: value.to(device) for key, value in batch.items()}


def products(shape: Shape, batch: dict, groups: int) -> float:
    """Floating-point operations of a forward and a backward: 2 and 4 per weight and token. The
    vocabulary head counts on completion tokens only; attention is left out."""
    completions = int(batch["lengths"].sum())
    tokens = completions + groups * PROMPT
    # queries and output are square, keys and values narrower
    attention = shape.hidden * shape.hidden * (2 + 2 * shape.kv_heads / shape.heads)
    weights = shape.layers * (attention + 3 * shape.hidden * shape.feed_forward)
    # 6 = 2 forward + 4 backward
    return 6 * (weights * tokens + shape.hidden * shape.vocabulary * completions)


def wait_for(device) -> None:
    """Waits until the device has done all that it was given; kernels run asynchronously."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work, device, repeats: int = 5, warm: int = 2) -> float:
    """The median seconds of `repeats` calls, after `warm` calls that do not count."""
    times = []  # the first ones compile, allocate and choose kernels
    for _ in range(warm + repeats):
        wait_for(device)
        begin = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - begin)
    return sorted(times[warm:])[repeats // 2]


def gib_of(work, device) -> float:
    """GiB that `work` needs at its peak, beyond what was held before; 0 on a CPU."""
    if torch.device(device).type != "cuda":
        work()
        return 0.0
    wait_for(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    wait_for(device)
    return (torch.cuda.max_memory_allocated(device) - before) / GIB


def matrix_peak(device) -> float:
    """Operations a second of a large bfloat16 product."""
    n = 8192 if torch.device(device).type == "cuda" else 256  # large enough to fill the GPU
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16)
    # a product and a sum for each of n**3
    return 2 * n**3 / seconds_of(lambda: a @ b, device, repeats=11, warm=3)


def copy_peak(device) -> float:
    """Bytes a second of a large copy, read and written."""
    n = GIB if torch.device(device).type == "cuda" else 2**20  # far more than the caches hold
    a = torch.empty(n, device=device, dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2 * n / seconds_of(lambda: b.copy_(a), device, repeats=11, warm=3)


def distance(found, wanted) -> float:
    """|found - wanted| / |wanted|. NaN is no distance that passes."""
    found = found.detach().double()
    wanted = wanted.detach().double()
    return ((found - wanted).norm() / wanted.norm()).item()
