"""Slow and plain versions of what a GPU does with kernels of its own, to compare with."""

import torch
from torch import Tensor


def bottom_right(Q: int, K: int) -> Tensor:
    """(Q, K) bool: the last query sees all keys, the one before it all but the last, and so on."""
    return torch.ones(Q, K, dtype=torch.bool).tril(K - Q)


def bottom_right_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, 0),
    enable_gqa: bool = True,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn in the dtype it is given, one segment at a time.
    query (sum of Q, heads, d); key, value (sum of K, kv heads, d); ends (segments + 1,)."""
    assert window_size == (-1, 0) and enable_gqa
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    parts = []
    for i in range(len(ends_q) - 1):
        queries = slice(int(ends_q[i]), int(ends_q[i + 1]))
        keys = slice(int(ends_k[i]), int(ends_k[i + 1]))
        q = query[queries].transpose(0, 1)  # (heads, Q, d)
        k = key[keys].repeat_interleave(groups, 1).transpose(0, 1)  # (heads, K, d)
        v = value[keys].repeat_interleave(groups, 1).transpose(0, 1)
        Q, K = q.shape[1], k.shape[1]
        assert Q <= longest_q and K <= longest_k
        seen = bottom_right(Q, K).to(q.device)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        parts.append((scores.softmax(2) @ v).transpose(0, 1))
    return torch.cat(parts)
