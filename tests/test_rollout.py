"""Real vLLM against transformers and against the trainer's own log-probs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from child import ended_well

import rollout
from common import UserError
from sft import tiny_model, tiny_tokenizer

WORKER = Path(__file__).parent / "helpers" / "engine_worker.py"
TINY = Path(__file__).parent.parent / "config" / "countdown_tiny.py"


def work(what: str, model, *flags, ranks: int = 0) -> dict:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks
        else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, str(WORKER), what, str(model), *flags],
        capture_output=True,
        text=True,
        timeout=240,
    )
    ended_well(done)
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


@pytest.fixture(scope="module", params=["tied", "untied"])
def synced(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tiny_tokenizer()
    tiny_model(len(tokenizer), seed=0, layers=2, tied=request.param == "tied").save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return request.param, work("syncs", folder)


def test_vllm_log_probs_equal_the_trainers_after_each_of_five_syncs(synced):
    assert len(synced[1]["differences"]) == 5 and max(synced[1]["differences"]) < 2e-5


def test_weights_that_do_not_arrive_show_in_the_log_probs(synced):
    """The tolerance above would notice: a stale engine and a forgotten lm_head differ a hundred times as much."""
    kind, result = synced
    assert result["stale"] > 2e-3
    assert kind == "untied" or result["headless"] > 2e-3


def test_seeds_decide_the_samples_and_every_completion_is_whole(synced):
    result = synced[1]
    assert result["same_seed_same_tokens"] and result["other_seed_other_tokens"]
    assert result["count"] == 24 and result["within_group_distinct"] > 1 and result["ends"]


@pytest.mark.slow
def test_a_compiled_vllm_takes_over_weights_as_an_eager_one_does(tiny_model_dir):
    result = work("syncs", tiny_model_dir, "--vllm_options.enforce_eager=False")
    assert (
        result["compiled"]
        and max(result["differences"]) < 2e-5
        and min(result["stale"], result["headless"]) > 2e-3
    )


def test_vllm_is_eager_on_a_cpu_unless_told_otherwise_and_says_when_it_can_not_compile(
    synced, monkeypatch
):
    assert not synced[1]["compiled"]
    eager = lambda choice, on_gpu: rollout.enforce_eager({"vllm_enforce_eager": choice}, on_gpu)  # noqa: E731
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert [eager("auto", False), eager("auto", True), eager("yes", True), eager("no", True)] == [
        True,
        False,
        True,
        False,
    ]
    with pytest.raises(UserError, match="no g\\+\\+"):
        eager("no", False)


def test_a_cache_size_from_the_environment_is_said_to_go_before_the_configs(monkeypatch, capsys):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert (
        rollout.kv_cache_bytes({"vllm_kv_cache_gib": 0.25}) == 2**28
        and capsys.readouterr().out == ""
    )
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    rollout.kv_cache_bytes({"vllm_kv_cache_gib": 0.25})
    assert (
        "vllm_kv_cache_gib=0.25 is not used" in (said := capsys.readouterr().out)
        and "VLLM_CPU_KVCACHE_SPACE=3" in said
    )


def test_a_cache_larger_than_the_machine_is_refused(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    with pytest.raises(UserError, match=r"vllm_kv_cache_gib=10000\.0 is more than the .* GiB"):
        rollout.kv_cache_bytes({"vllm_kv_cache_gib": 10_000.0})


@pytest.mark.slow
def test_a_cache_too_small_for_one_completion_is_one_sentence(tiny_model_dir):
    flags = ["--max_completion_length=950", "--vllm_kv_cache_gib=0.001", "--eval_max_prompts=1"]
    done = subprocess.run(
        [sys.executable, "evaluate.py", TINY, f"--model={tiny_model_dir}", *flags],
        cwd=TINY.parent.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "error: vllm_kv_cache_gib=0.001 is too little for vLLM" in done.stderr


@pytest.mark.slow
def test_vllm_and_transformers_sample_the_same_distribution(tiny_model_dir):
    """Chi-square of 4,000 first tokens of each engine against the exact probabilities, at fixed seeds; rare tokens pooled.
    A correct sampler exceeds mean + 4 standard deviations about once in 10,000 choices of the seed."""
    result = work("samples", tiny_model_dir)
    exact = torch.tensor(result["exact"])
    common = exact * 4000 >= 5
    for engine in ("vllm", "hf"):
        seen = torch.tensor(result[engine], dtype=torch.float32)
        assert seen.sum() == 4000
        cells = torch.cat([exact[common], exact[~common].sum()[None]]).clamp(min=1e-9) * 4000
        counts = torch.cat([seen[common], seen[~common].sum()[None]])
        statistic, freedom = ((counts - cells) ** 2 / cells).sum().item(), len(cells) - 1
        assert freedom >= 5 and statistic < freedom + 4 * (2 * freedom) ** 0.5, (
            engine,
            statistic,
            freedom,
        )
        assert result[engine + "_difference"] < 2e-4


def test_two_ranks_share_one_tensor_parallel_engine(tiny_model_dir):
    result = work("tensor_parallel", tiny_model_dir, ranks=2)
    assert result["every_rank_got_its_own"] and result["difference"] < 2e-5


def test_transformers_sample_without_the_penalties_of_the_models_own_generation_config(
    tiny_model_dir, tmp_path
):
    """Qwen's models bring a repetition penalty, for example."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "generation_config.json").write_text(
        json.dumps(
            {"eos_token_id": 0, "repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "min_p": 0.2}
        )
    )
    samples = []
    for path in (tiny_model_dir, folder):
        engine = rollout.HfEngine(str(path), {}, torch.float32, torch.device("cpu"))
        samples.append(
            engine.generate(
                [[5, 6, 7]],
                8,
                {"temperature": 1.0, "max_tokens": 12, "stop_token_ids": [0], "seeds": [3]},
            )
        )
    assert samples[0] == samples[1] and any(
        len(set(r["completion_ids"])) < len(r["completion_ids"]) for r in samples[0]
    )
