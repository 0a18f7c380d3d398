"""Slow and plain versions of what a GPU does with special kernels, to compare with."""

import torch
from torch import Tensor


def bottom_right(Q: int, K: int) -> Tensor:
    """(Q, K) bool: the last query sees all keys, the one before all but the last, and so on."""
    return torch.ones(Q, K, dtype=torch.bool).tril(K - Q)


def bottom_right_attention(query: Tensor, key: Tensor, value: Tensor, *plan, **options) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn in the dtype it is given, one segment at a time.

    query (sum of Q, heads, d); key, value (sum of K, kv heads, d). plan: ends of the segments among
    queries and among keys, (segments + 1,) each, then the longest Q and K. options: scale, and
    window_size and enable_gqa as below."""
    ends_q, ends_k, longest_q, longest_k = plan
    # the kernel has other options; nothing here uses them
    assert options.pop("window_size", (-1, 0)) == (-1, 0), "causal only"
    assert options.pop("enable_gqa", True), "kv heads are repeated here"
    scale = options.pop("scale", None)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    assert not options, f"unknown to this stand-in: {', '.join(options)}"
    groups = query.shape[1] // key.shape[1]  # query heads that share a head of keys

    parts = []
    for i in range(len(ends_q) - 1):
        queries = slice(int(ends_q[i]), int(ends_q[i + 1]))
        keys = slice(int(ends_k[i]), int(ends_k[i + 1]))
        q = query[queries].transpose(0, 1)  # (heads, Q, d)
        k = key[keys].repeat_interleave(groups, 1).transpose(0, 1)  # (heads, K, d)
        v = value[keys].repeat_interleave(groups, 1).transpose(0, 1)  # (heads, K, d)
        Q, K = q.shape[1], k.shape[1]
        # the kernel relies on these: wrong ones would read beyond a segment
        assert Q <= longest_q and K <= longest_k
        seen = bottom_right(Q, K).to(q.device)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)  # (heads, Q, K)
        parts.append((scores.softmax(2) @ v).transpose(0, 1))  # (Q, heads, d)
    return torch.cat(parts)
