"""make env and make test where there is a GPU, by a stand-in for nvidia-smi: what is checked before
anything is downloaded, and where tests run. Nothing is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import ROOT


def machine(folder: Path, driver: str, gcc: bool = True) -> dict:
    """An environment in which nvidia-smi speaks of this driver."""
    folder.mkdir()
    programs = {"nvidia-smi": f"echo {driver}", "gcc": "true"}
    if not gcc:
        del programs["gcc"]
    for name, code in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{code}\n")
        (folder / name).chmod(0o755)
    env = {key: value for key, value in os.environ.items() if key not in ("CC", "MAKEFLAGS")}
    return env | {"PATH": f"{folder}:{env['PATH']}"}


def needs(env: dict) -> subprocess.CompletedProcess:
    command = [sys.executable, "-S", str(ROOT / "bench" / "gpu_needs.py")]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_an_old_driver_is_told_with_its_version_and_the_one_that_is_needed(tmp_path):
    done = needs(machine(tmp_path / "old", "550.54.15"))
    assert done.returncode == 2
    assert "the NVIDIA driver is 550.54.15" in done.stderr
    assert "needs 580 or newer" in done.stderr
    assert done.stderr.count("driver") == 1
    assert "driver" not in needs(machine(tmp_path / "new", "580.65.06")).stderr


def test_a_missing_compiler_is_told(tmp_path):
    env = machine(tmp_path / "bare", "580.65.06", gcc=False)
    env["PATH"] = str(tmp_path / "bare")
    done = needs(env)
    assert done.returncode == 2
    assert "error: there is no C compiler" in done.stderr


def make(folder: Path, env: dict, *words: str) -> str:
    """What make would do, in a copy of what it reads."""
    for name in ("Makefile", "requirements.txt", "requirements-cpu.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, folder)
    command = ["make", "-n", *words]
    # these tests may run under `make test VENV=x`, whose make must not speak to this one
    env = {key: value for key, value in env.items() if not key.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_driver_and_compiler_are_checked_before_anything_is_downloaded(tmp_path):
    said = make(tmp_path, machine(tmp_path / "bin", "580.65.06"), "env")
    assert "pip install" in said and "-r requirements.txt" in said
    assert said.index("bench/gpu_needs.py") < said.index("pip install")
    without = make(tmp_path, os.environ | {"PATH": no_gpu()}, "env")
    assert "gpu_needs" not in without and "-r requirements-cpu.txt" in without


def no_gpu() -> str:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU")
    return os.environ["PATH"]


@pytest.mark.parametrize("target", ["test", "test-all", "bench"])
def test_tests_and_bench_run_in_an_environment_made_for_cpus(target, tmp_path):
    said = make(tmp_path, machine(tmp_path / "bin", "580.65.06"), target)
    assert "CUDA_VISIBLE_DEVICES= " in said
    assert ".venv-cpu/bin/python -m " in said
    assert "-r requirements-cpu.txt" in said and "-r requirements.txt" not in said
    assert "torch==2.13.0+cpu" in said
    # without a GPU the only environment is one
    said = make(tmp_path, os.environ | {"PATH": no_gpu()}, target)
    assert ".venv/bin/python -m " in said and "venv-cpu" not in said


@pytest.mark.parametrize("name", ["demo", "env", "test"])
def test_the_environment_of_a_folder_that_was_renamed_is_made_anew(name, tmp_path):
    """Its torchrun and pip name a Python that is gone; `activate` too."""
    env = os.environ | {"PATH": no_gpu()}
    bin = tmp_path / "before" / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "python3").write_text("#!/bin/sh\n")
    (bin / "python3").chmod(0o755)
    (bin / "pip").write_text(f"#!{bin}/python3\n")
    (bin / "pip").chmod(0o755)
    # what make would install has the stamp's name in its last line
    said = make(tmp_path / "before", env, "env")
    stamp = tmp_path / "before" / said.split()[-1]
    stamp.touch()
    assert "pip install" not in make(tmp_path / "before", env, "env")
    after = (tmp_path / "before").rename(tmp_path / "after")
    said = make(after, env, name)
    assert said.index("rm -rf .venv") < said.index("-m venv .venv") < said.index("pip install")


def test_the_demo_of_a_real_model_makes_the_environment_then_the_model_then_compares(tmp_path):
    said = make(tmp_path, os.environ | {"PATH": no_gpu()}, "demo-real")
    steps = [
        "-r requirements-cpu.txt",
        "-m bench.smollm2 runs/smollm2",
        "-m compare config/smollm2",
    ]
    assert sorted(steps, key=said.index) == steps
    assert "--arms=compare/demo_arms.py" in said and "--ranks=1" in said


def test_what_is_compiled_under_slurm_stays_on_its_node(tmp_path):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
    unset = {*names, "SLURM_TMPDIR", "TMPDIR"}
    env = {key: value for key, value in os.environ.items() if key not in unset}
    asked = f"source slurm/common.sh; echo {' '.join('$' + name for name in names)}"
    command = ["bash", "-c", asked]

    def places(**variables) -> list[str]:
        done = subprocess.run(
            command, cwd=ROOT, env=env | variables, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    own = f"compiled-{os.getuid()}"
    wanted = [f"{tmp_path}/{own}/{name}" for name in ("inductor", "triton", "vllm")]
    assert places(SLURM_TMPDIR=str(tmp_path)) == wanted
    # a job that another has submitted gets that one's environment
    inherited = {name: f"/job/7/{own}/x" for name in names}
    assert places(SLURM_TMPDIR=str(tmp_path), **inherited) == wanted
    assert all(place.startswith(f"/tmp/{own}") for place in places(TMPDIR="/tmp"))
    assert places(VLLM_CACHE_ROOT="/mine")[2] == "/mine"
