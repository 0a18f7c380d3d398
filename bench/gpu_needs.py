"""Checks what a machine with a GPU must have, before gigabytes are downloaded for it; `make env`
runs this. Uses only Python's own library, because nothing is installed yet.

    python bench/gpu_needs.py       a sentence for each thing that is missing, and status 2
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

DRIVER = 580  # the oldest for CUDA 13.0, which torch 2.13.0 of PyPI is built with


def driver_problem() -> str:
    """What is wrong with the driver; "" if nothing is, or if there is no GPU, as on a login node,
    which shares its environment with others."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs shows when it is used
        return ""
    version = asked.stdout.partition("\n")[0].strip()
    major = version.partition(".")[0]
    if asked.returncode or not major.isdecimal() or int(major) >= DRIVER:
        return ""
    return (
        f"the NVIDIA driver is {version}, and torch 2.13.0 (CUDA 13.0) needs {DRIVER} or newer: "
        f"have it updated; `make env GPU=` installs for the CPU instead"
    )


def find_compiler() -> str:
    """The C compiler that Triton will call (its runtime/build.py); empty if there is none."""
    if "CC" in os.environ:  # then Triton tries no other, whatever it says
        return shutil.which(os.environ["CC"]) or ""
    return shutil.which("gcc") or shutil.which("clang") or ""


def compiler_problem() -> str:
    if find_compiler():
        return ""
    missing, cure = "C compiler, neither gcc nor clang", "install gcc"
    if "CC" in os.environ:
        missing = f"program {os.environ['CC']!r}, which the environment variable CC names"
        cure = "unset CC, or let it be the path of a C compiler without options"
    return (
        f"there is no {missing}, and Triton builds its helper with it at the first use of a GPU: "
        f"{cure}"
    )


def find_header() -> Path:
    """The path at which Triton's compiler will look for Python.h, whether it exists or not."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's; its packages do not write there
        scheme = "posix_prefix"
    return Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"


def header_problem() -> str:
    path = find_header()
    if path.exists():
        return ""
    return (
        f"there is no {path}, which Triton's helper is built with: install the development files "
        f"of this Python (python3-dev, or python3-devel)"
    )


def main() -> None:
    problems = [driver_problem(), compiler_problem(), header_problem()]
    for problem in problems:
        if problem:
            print(f"error: {problem}", file=sys.stderr)
    if any(problems):
        sys.exit(2)


if __name__ == "__main__":
    main()
