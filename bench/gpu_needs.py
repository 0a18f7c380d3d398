"""What a machine with a GPU must have before gigabytes are downloaded for it; `make env` asks.
Knows only Python's own library, for nothing is installed yet.

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
    """ "" also where there is no GPU: a login node, which shares its environment with others."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    version = asked.stdout.partition("\n")[0].strip()
    major = version.partition(".")[0]
    if asked.returncode or not major.isdecimal() or int(major) >= DRIVER:
        return ""
    return (
        f"the NVIDIA driver is {version}, and torch 2.13.0 (CUDA 13.0) needs {DRIVER} or newer: "
        f"have it updated; `make env GPU=` installs for the CPU instead"
    )


def compiler_problem() -> str:
    # as Triton looks for it
    names = [os.environ.get("CC") or "gcc", "gcc", "clang"]
    if any(shutil.which(name) for name in names):
        return ""
    return (
        "there is no C compiler (gcc, clang, or what CC names), with which Triton builds its "
        "helper at the first use of a GPU: install gcc"
    )


def header_problem() -> str:
    path = Path(sysconfig.get_paths()["include"]) / "Python.h"
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
