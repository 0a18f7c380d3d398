"""The smallest Triton kernel: bench.gpu sees with it whether Triton can compile here. A file of its
own, because Triton reads a kernel's source, and importing triton fails where there is none."""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # numbers that one program adds


@triton.jit
def add_kernel(a, b, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n  # the last block may reach beyond the end
    first = tl.load(a + at, mask=inside)
    second = tl.load(b + at, mask=inside)
    tl.store(out + at, first + second, mask=inside)


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b of any shape, contiguous, on a GPU."""
    out = torch.empty_like(a)
    n = a.numel()
    blocks = triton.cdiv(n, BLOCK)
    add_kernel[(blocks,)](a, b, out, n, BLOCK=BLOCK)
    return out
