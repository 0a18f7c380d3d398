"""Checks of bench.gpu: the machine itself."""

import os
import shutil
import subprocess

import torch
import torch.distributed as dist

from bench.gpu import Finding
from bench.gpu_needs import DRIVER, find_compiler, find_header
from bench.shapes import copy_peak, distance, matrix_peak


def output_of(*command: str) -> str:
    """What a command prints; empty if there is no such command or it fails."""
    if shutil.which(command[0]) is None:  # also for an empty name
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""


def driver(setting):
    """The driver must be new enough for the wheels' CUDA; with an older one torch sees no GPU."""
    query = ("--query-gpu=driver_version,name,memory.total", "--format=csv,noheader")
    found = output_of("nvidia-smi", *query).splitlines()
    if not found:
        yield Finding("version", setting.device == "cpu", "nvidia-smi says nothing", f">= {DRIVER}")
        return
    version = found[0].split(",")[0]
    good = int(version.split(".")[0]) >= DRIVER
    yield Finding("version", good, "; ".join(found), f">= {DRIVER}")


def compiler(setting):
    """The C compiler, with which Triton compiles its driver helper at first use."""
    version = output_of(find_compiler(), "--version")
    measured = version.split("\n")[0] or "none"
    yield Finding("of C", bool(version), measured, "$CC, or else gcc or clang")


def python_h(setting):
    """Python.h, which Triton's helper includes and many images lack."""
    path = find_header()
    yield Finding("header", path.exists(), str(path), "exists (python3-dev)")


def nccl(setting):
    """Whether NCCL starts at all, with one rank."""
    cuda = setting.device == "cuda"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = dist.HashStore()  # in memory: needs no port
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    x = torch.ones(1000, device=setting.device)
    dist.all_reduce(x)  # NCCL starts here, not above
    good = bool((x == 1).all())
    dist.destroy_process_group()
    version = ".".join(map(str, torch.cuda.nccl.version())) if cuda else "gloo stands for it"
    yield Finding("all-reduce of one rank", good, version, "runs")


def triton(setting):
    """Whether Triton can compile and run a kernel."""
    if setting.device == "cpu":
        yield Finding("one kernel", True, "needs a GPU")
        return
    # imported here, because it imports triton
    from bench.triton_kernel import add

    a, b = torch.randn(2, 100_000, device=setting.device)
    error = distance(add(a, b), a + b)
    yield Finding("one kernel", error == 0, f"error {error}", "0")


def peaks(setting):
    """The GPU's peak speeds, of which other checks report shares."""
    # measured, not the data sheet's: clocks and power limits differ between machines
    products = matrix_peak(setting.device)
    copies = copy_peak(setting.device)
    figures = {"flops": products, "bytes_per_second": copies}
    measured = f"{products / 1e12:.3g} Tflop/s in bfloat16, {copies / 1e12:.3g} TB/s"
    yield Finding("products and copies", True, measured, "", figures)
