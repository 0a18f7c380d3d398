"""The smallest Triton kernel, with which bench.gpu sees whether Triton can compile here. It has a
file of its own because Triton reads a kernel's source, and triton may not be installed."""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # numbers that one program instance adds


@triton.jit
def add_kernel(a, b, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n  # the last block may extend beyond the end
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
