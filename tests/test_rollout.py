"""Real vLLM against transformers and against the trainer's own log-probs."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from child import ended_well
from deadlines import PATIENCE
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    MiniMaxConfig,
    MistralConfig,
    OpenAIGPTConfig,
    Qwen2Config,
    RecurrentGemmaConfig,
)

import rollout
import sft
from common import RunStopped, UserError, load_config
from sft import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "tests" / "helpers" / "engine_worker.py"


def work(what: str, model, *flags, ranks: int = 0) -> dict:
    launcher = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, str(WORKER), what, str(model), *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    ended_well(done)
    objects = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(objects[-1])


# the quick tests have the log-probs of an untied model by a server, test_server_vllm.py
UNTIED = pytest.param("untied", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["tied", UNTIED])
def synced(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), seed=0, layers=2, tied=request.param == "tied")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return request.param, work("syncs", folder)


def test_vllm_log_probs_equal_the_trainers_after_each_of_five_syncs(synced):
    _, result = synced
    assert len(result["differences"]) == 5
    assert max(result["differences"]) < 2e-5


def test_weights_that_do_not_arrive_show_in_the_log_probs(synced):
    """The tolerance above would notice: a stale engine and a forgotten lm_head differ a hundred
    times as much."""
    kind, result = synced
    assert result["stale"] > 2e-3
    assert kind == "untied" or result["headless"] > 2e-3


def test_seeds_decide_the_samples_and_every_completion_is_whole(synced):
    _, result = synced
    assert result["same_seed_same_tokens"]
    assert result["other_seed_other_tokens"]
    assert result["count"] == 32
    assert result["within_group_distinct"] > 1
    assert result["ends"]


@pytest.mark.slow
def test_a_compiled_vllm_takes_over_weights_as_an_eager_one_does(tiny_model_dir):
    result = work("syncs", tiny_model_dir, "--vllm_options.enforce_eager=False")
    assert result["compiled"]
    assert max(result["differences"]) < 2e-5
    assert result["stale"] > 2e-3
    assert result["headless"] > 2e-3


def test_vllm_is_eager_on_a_cpu_unless_told_otherwise_and_says_when_it_can_not_compile(
    synced, monkeypatch
):
    _, result = synced
    assert not result["compiled"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert rollout.enforce_eager({"vllm_options": {}}, on_gpu=False)
    assert not rollout.enforce_eager({"vllm_options": {}}, on_gpu=True)
    assert rollout.enforce_eager({"vllm_options": {"enforce_eager": True}}, on_gpu=True)
    compiled = {"vllm_options": {"enforce_eager": False}}
    assert not rollout.enforce_eager(compiled, on_gpu=True)
    with pytest.raises(UserError, match=r"no g\+\+"):
        rollout.enforce_eager(compiled, on_gpu=False)


def config_of(**changes) -> dict:
    c = load_config(["--dtype=float32", "--max_prompt_length=40", "--max_completion_length=30"])
    return c | {"prompts_per_step": 6, "num_generations": 5} | changes


def cache_of(size: int) -> dict:
    return config_of(vllm_options={"kv_cache_memory_bytes": size})


# keys and values of a token: 2 x 3 layers x 2 heads of keys x 8 x 4 bytes
SHAPE = Qwen2Config(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
)
TOKEN = 2 * 3 * 2 * 8 * 4
ROW = 3 * 32 * TOKEN  # 40 + 30 tokens are three blocks of 32


@pytest.fixture
def memory(monkeypatch):
    """memory(size): what a rank may use, bytes, whatever this machine has."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(rollout, "rank_memory", lambda: 2**34)
    return lambda size: monkeypatch.setattr(rollout, "rank_memory", lambda: size)


def test_the_cache_holds_all_rows_that_a_step_asks_for(memory, capsys):
    """And one block more, which vLLM keeps for itself."""
    plan = rollout.plan_cache(config_of(), SHAPE, 30)
    assert plan == (30 * ROW + 32 * TOKEN, 30)
    assert rollout.kv_cache_bytes(config_of(), SHAPE, 30) == plan.size
    assert capsys.readouterr().out == ""
    with_blocks = config_of(vllm_options={"block_size": 64})
    assert rollout.plan_cache(with_blocks, SHAPE, 1).size == 3 * 64 * TOKEN
    shared = config_of(vllm_options={"tensor_parallel_size": 2})  # a head of keys for each rank
    assert rollout.plan_cache(shared, SHAPE, 1).size == (ROW + 32 * TOKEN) // 2
    halves = config_of(dtype="bfloat16")
    assert rollout.plan_cache(halves, SHAPE, 1).size == (ROW + 32 * TOKEN) // 2


def test_rows_that_do_not_fit_into_a_quarter_of_the_memory_wait_and_that_is_said(memory, capsys):
    memory(4 * (7 * ROW + 5))
    assert rollout.kv_cache_bytes(config_of(), SHAPE, 30) == 7 * ROW + 32 * TOKEN
    assert "holds 7 of the 30 completions" in capsys.readouterr().out
    memory(2 * ROW)  # one row always fits, or nothing could be sampled
    assert rollout.kv_cache_bytes(config_of(), SHAPE, 30) == ROW + 32 * TOKEN


@pytest.mark.parametrize(
    "engines, changes, rows",
    [
        (1, {}, 30),
        (2, {}, 15),
        (4, {}, 10),  # two ranks of the four have two prompts
        (1, {"info_seed_num_seeds": 9}, 54),
        (1, {"prompts_per_step": 600}, 256),
        (1, {"prompts_per_step": 600, "vllm_options": {"tensor_parallel_size": 2}}, 512),
        (1, {"vllm_options": {"max_num_seqs": 8}}, 8),
    ],
)
def test_a_step_asks_for_so_many_rows_at_once(engines, changes, rows):
    assert rollout.rows_at_once(config_of(**changes), engines, at_most=256) == rows


def test_a_cache_size_from_the_environment_is_said_to_go_before_the_configs(
    memory, monkeypatch, capsys
):
    assert rollout.kv_cache_bytes(cache_of(2**27), SHAPE, 30) == 2**27
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    rollout.kv_cache_bytes(cache_of(2**27), SHAPE, 30)
    said = capsys.readouterr().out
    assert f"vllm_options.kv_cache_memory_bytes={2**27} is not used" in said
    assert "VLLM_CPU_KVCACHE_SPACE=3" in said


def compiled_at(monkeypatch, rank: int, ranks_on_a_node: int, **environment) -> str:
    """Where vLLM's compiled code of a rank lies: vLLM appends the rank to its root, and to that
    nothing that tells GPUs apart."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank % ranks_on_a_node))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_on_a_node))
    for _ in range(2):  # a second import changes nothing
        rollout.own_cache(environment)
    root = environment.get("VLLM_CACHE_ROOT", "usual")
    return f"{root}/rank_{rank}"


def test_a_rank_never_finds_what_vllm_compiled_for_another_gpu(monkeypatch):
    """Compiled code names its GPU by number."""
    gpus = {}  # {place: numbers of the GPUs that code there is for}
    for ranks_on_a_node in (1, 2, 4, 8):
        for rank in range(16):
            place = compiled_at(monkeypatch, rank, ranks_on_a_node)
            gpus.setdefault(place, set()).add(rank % ranks_on_a_node)
    assert {len(numbers) for numbers in gpus.values()} == {1}
    # on the first node, usually the only one, the place is vLLM's own, and the user's goes first
    assert compiled_at(monkeypatch, 3, 8) == "usual/rank_3"
    assert compiled_at(monkeypatch, 3, 8, VLLM_CACHE_ROOT="/a") == "/a/rank_3"
    assert compiled_at(monkeypatch, 9, 8, VLLM_CACHE_ROOT="/a") == "/a/nodes-of-8/rank_9"
    assert compiled_at(monkeypatch, 9, 8, XDG_CACHE_HOME="/b") == "/b/vllm/nodes-of-8/rank_9"


def test_a_cache_that_holds_no_completion_is_refused(memory, monkeypatch):
    least = ROW + 32 * TOKEN
    assert rollout.plan_cache(cache_of(least), SHAPE, 30).held == 1
    for size in (1, least - 1):
        with pytest.raises(UserError, match=f"bytes={size} holds no completion: .* {least} bytes"):
            rollout.plan_cache(cache_of(size), SHAPE, 30)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")  # vLLM takes this instead
    assert rollout.plan_cache(cache_of(1), SHAPE, 30).held == 0


def test_a_cache_larger_than_the_machine_is_refused(memory):
    words = "vllm_options.kv_cache_memory_bytes=10000000000000 is more than the 16.0 GiB"
    with pytest.raises(UserError, match=words):
        rollout.kv_cache_bytes(cache_of(10**13), SHAPE, 30)


def test_vllm_options_of_the_config_go_to_vllm(memory, tiny_model_dir):
    options = {"max_num_seqs": 7, "enable_sleep_mode": True, "gpu_memory_utilization": 0.4}
    config = config_of(vllm_options=options)
    model = str(tiny_model_dir)
    on_cpu = rollout.vllm_settings(model, config, torch.float32, on_gpu=False)
    assert on_cpu["max_num_seqs"] == 7
    # 2 layers of 2 heads of 32: seven rows of three blocks, and one block
    assert on_cpu["kv_cache_memory_bytes"] == (7 * 3 + 1) * 32 * 2 * 2 * 2 * 32 * 4
    assert on_cpu["block_size"] == 32
    assert on_cpu["load_format"] == on_cpu["config_format"] == "hf"  # not Mistral's own files
    assert on_cpu["enforce_eager"]
    assert not on_cpu["enable_sleep_mode"]
    assert "gpu_memory_utilization" not in on_cpu
    on_gpu = rollout.vllm_settings(model, config, torch.bfloat16, on_gpu=True)
    assert on_gpu["max_num_seqs"] == 7
    assert on_gpu["gpu_memory_utilization"] == 0.4
    assert on_gpu["dtype"] == "bfloat16"
    assert on_gpu["enable_sleep_mode"]
    assert not on_gpu["enforce_eager"]
    assert "kv_cache_memory_bytes" not in on_gpu
    assert "block_size" not in on_gpu  # a GPU's own
    # logits as the learner makes them; in float32 there is nothing to say
    assert on_gpu["hf_overrides"] == {"head_dtype": "float32"}
    assert "hf_overrides" not in on_cpu
    own = config_of(vllm_options={"hf_overrides": {"head_dtype": "model", "x": 1}})
    given = rollout.vllm_settings(model, own, torch.bfloat16, on_gpu=True)
    assert given["hf_overrides"] == {"head_dtype": "model", "x": 1}
    whole = rollout.vllm_settings(model, config, torch.float32, on_gpu=True)
    assert "hf_overrides" not in whole
    assert "disable_custom_all_reduce" not in on_gpu
    two = config_of(vllm_options={"tensor_parallel_size": 2})
    several = rollout.vllm_settings(model, two, torch.bfloat16, on_gpu=True)
    assert several["disable_custom_all_reduce"] is True
    two = config_of(vllm_options={"tensor_parallel_size": 2, "disable_custom_all_reduce": False})
    several = rollout.vllm_settings(model, two, torch.bfloat16, on_gpu=True)
    assert several["disable_custom_all_reduce"] is False
    other = config_of(vllm_options={"block_size": 64})
    assert rollout.vllm_settings(model, other, torch.float32, on_gpu=False)["block_size"] == 64


@pytest.mark.parametrize(
    "reason, words",
    [
        ("To serve at least one request, 1 GiB KV cache", "=9 is too little for vLLM's cache"),
        ("Available memory on node 0 (1/23 GiB) on kv cache", "=9 is more than is free: lower it"),
        ("Free memory on device cuda:0 (1/79 GiB) on startup", "=9 is more than is free: lower it"),
    ],
)
def test_a_cache_that_vllm_refuses_is_one_sentence_with_our_key(reason, words, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    settings = {"model": "m", "max_model_len": 64, "kv_cache_memory_bytes": 9}
    said = rollout.start_refused(settings, ValueError(reason))
    assert f"vllm_options.kv_cache_memory_bytes{words}" in said
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    sentence = rollout.cache_refused(settings, reason)
    assert "VLLM_CPU_KVCACHE_SPACE=1 (GiB) is" in sentence and "bytes=9" not in sentence


def test_an_option_that_vllm_does_not_have_is_a_sentence_and_a_bug_is_none():
    engine = object.__new__(rollout.VllmEngine)
    for words in ("EngineArgs.__init__() got an unexpected keyword argument 'x'", "a bug"):

        def fail(words=words, **settings):
            raise TypeError(words)

        engine.vllm = SimpleNamespace(LLM=fail)
        kind = UserError if "EngineArgs" in words else TypeError
        with pytest.raises(kind, match=re.escape(words)):
            engine.load({"model": "m", "dtype": "float32", "enforce_eager": True})


def test_heads_that_vllm_does_not_take_on_a_cpu_are_a_sentence_and_a_bug_is_none():
    engine = object.__new__(rollout.VllmEngine)
    for words in ("Unsupported CPU attention configuration: head_dim=16 isa=2", "a bug"):

        def fail(words=words):
            raise RuntimeError(words)

        engine.llm = SimpleNamespace(llm_engine=SimpleNamespace(step=fail))
        kind = UserError if "head_dim" in words else RuntimeError
        with pytest.raises(kind, match=re.escape(words)):
            engine.engine_step()


def test_what_else_vllm_refuses_is_its_own_sentence_and_not_about_the_cache():
    class Refused(ValueError):
        """Stands for pydantic's ValidationError."""

    said = rollout.start_refused({"model": "m"}, Refused("cache_dtype\nshould be 'auto'"))
    assert "model='m' and its vllm_options: cache_dtype should be 'auto'" in said


@pytest.mark.slow
def test_a_cache_too_small_for_one_completion_is_one_sentence(tiny_model_dir):
    size = "vllm_options.kv_cache_memory_bytes=1000000"
    flags = [f"--model={tiny_model_dir}", "--max_completion_length=950", f"--{size}"]
    done = subprocess.run(
        [sys.executable, "evaluate.py", "config/countdown_tiny.py", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert f"error: {size} holds no completion" in done.stderr


@pytest.mark.slow
def test_vllm_and_transformers_sample_the_same_distribution(tiny_model_dir):
    """Chi-square of 4,000 first tokens of each engine against the exact probabilities, at fixed
    seeds; rare tokens pooled. A correct sampler exceeds mean + 4 standard deviations about once in
    10,000 choices of the seed."""
    result = work("samples", tiny_model_dir)
    exact = torch.tensor(result["exact"])
    often = exact * 4000 >= 5
    for engine in ("vllm", "hf"):
        seen = torch.tensor(result[engine], dtype=torch.float32)
        assert seen.sum() == 4000
        cells = torch.cat([exact[often], exact[~often].sum()[None]]).clamp(min=1e-9) * 4000
        counts = torch.cat([seen[often], seen[~often].sum()[None]])
        statistic = ((counts - cells) ** 2 / cells).sum().item()
        freedom = len(cells) - 1
        assert freedom >= 5
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (engine, statistic, freedom)
        assert result[f"{engine}_difference"] < 2e-4


@pytest.mark.slow
def test_two_ranks_share_one_tensor_parallel_engine(tiny_model_dir):
    result = work("tensor_parallel", tiny_model_dir, ranks=2)
    assert result["every_rank_got_its_own"]
    assert result["difference"] < 2e-5


def test_transformers_sample_without_the_penalties_of_the_models_own_generation_config(
    tiny_model_dir, tmp_path
):
    """Qwen's models bring a repetition penalty, for example."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    penalties = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "min_p": 0.2}
    text = json.dumps({"eos_token_id": 0} | penalties)
    (folder / "generation_config.json").write_text(text)
    sampling = rollout.Sampling(temperature=1.0, max_tokens=12, stop_token_ids=[0], seeds=[3])

    def samples(path: Path) -> list[dict]:
        engine = rollout.HfEngine(str(path), {}, torch.float32, torch.device("cpu"))
        return engine.generate([[5, 6, 7]], 8, sampling)

    plain = samples(tiny_model_dir)
    assert samples(folder) == plain
    repeats = [len(set(r["completion_ids"])) < len(r["completion_ids"]) for r in plain]
    assert any(repeats)


def test_a_policy_of_nans_is_a_sentence_where_transformers_sample(tiny_model_dir):
    engine = rollout.HfEngine(str(tiny_model_dir), {}, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        engine.model.lm_head.weight.fill_(math.nan)
    sampling = rollout.Sampling(temperature=1.0, max_tokens=2, stop_token_ids=[0], seeds=[3])
    with pytest.raises(RunStopped, match="logits are not finite"):
        engine.generate([[5, 6, 7]], 2, sampling)


@pytest.mark.parametrize("ends_turn", [True, False])
def test_a_text_ends_before_the_end_of_the_turn_and_keeps_other_stop_tokens(ends_turn):
    """Not all fine-tunes mark <|im_end|> as special: rewards would read it as part of the answer.
    But one that stops at </answer> may be asked for it."""
    tokenizer = sft.tiny_tokenizer()
    if ends_turn:
        tokenizer.chat_template = sft.TEMPLATE.replace("<|end|>", "!")
    stop = tokenizer.convert_tokens_to_ids("!")
    ids = [*tokenizer("hi!")["input_ids"], stop]  # stops at a second "!"
    cut = tokenizer("hi!?")["input_ids"]  # as long as it may be
    answers = [
        {"completion_ids": given, "logprobs": [-1.0] * len(given), "finish_reason": reason}
        for given, reason in ((ids, "stop"), (cut, "length"))
    ]

    def generate(prompts, n, sampling, group_done):
        group_done(0, answers)
        return answers

    engine = SimpleNamespace(generate=generate)
    sampling = rollout.Sampling(temperature=1.0, max_tokens=4, stop_token_ids=[0, stop], seeds=[3])
    rollouts = rollout.generate(engine, tokenizer, [[5]], 2, sampling)
    assert [r["text"] for r in rollouts] == ["hi!" if ends_turn else "hi!!", "hi!?"]
    assert rollouts[0]["completion_ids"] == ids  # what is learnt from keeps it


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_log_probs_that_are_not_finite_stop_a_run(bad):
    answer = {"completion_ids": [5, 0], "logprobs": [-1.0, bad], "finish_reason": "stop"}
    engine = SimpleNamespace(generate=lambda prompts, n, sampling, group_done: [dict(answer)])
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids), chat_template=None)
    sampling = rollout.Sampling(temperature=1.0, max_tokens=2, stop_token_ids=[0], seeds=[3])
    with pytest.raises(RunStopped, match="log-probs that are not finite"):
        rollout.generate(engine, tokenizer, [[5]], 1, sampling)


def test_transformers_sample_from_all_tokens(tiny_model_dir):
    """By default they would leave out all but 50. At this temperature 101 are equally likely: among
    900 drawn at least 99 differ in each of 20,000 seeds."""
    engine = rollout.HfEngine(str(tiny_model_dir), {}, torch.float32, torch.device("cpu"))
    sampling = rollout.Sampling(temperature=100.0, max_tokens=8, stop_token_ids=[0], seeds=[3])
    group = engine.generate([[5, 6, 7]], 128, sampling)
    assert len({token for r in group for token in r["completion_ids"]}) > 90


def test_transformers_completions_end_with_their_first_stop_token(tiny_model_dir):
    engine = rollout.HfEngine(str(tiny_model_dir), {}, torch.float32, torch.device("cpu"))
    stops = list(range(0, 101, 6))  # a sixth of all tokens
    sampling = rollout.Sampling(temperature=1.0, max_tokens=6, stop_token_ids=stops, seeds=[3])
    group = engine.generate([[5, 6, 7]], 32, sampling)
    for r in group:
        *before, last = r["completion_ids"]
        assert not set(before) & set(stops) and len(r["logprobs"]) == len(before) + 1
        assert r["finish_reason"] == ("stop" if last in stops else "length")
        assert last in stops or len(before) == 5
    assert {r["finish_reason"] for r in group} == {"stop", "length"}


@pytest.mark.parametrize("limits", [(10, 1000), (64, 9 * 16)])
def test_transformers_sample_many_prompts_as_one_alone(tiny_model_dir, monkeypatch, limits):
    """Lengths differ, so the shorter ones are padded, and not all are sampled at once. Log-probs
    differ by rounding."""
    # three prompts of three completions each, first for the rows, then for their tokens
    most_rows, most_tokens = limits
    monkeypatch.setattr(rollout, "HF_ROWS", most_rows)
    monkeypatch.setattr(rollout, "HF_TOKENS", most_tokens)
    engine = rollout.HfEngine(str(tiny_model_dir), {}, torch.float32, torch.device("cpu"))
    rows = []
    sample = engine.model.generate

    def generate(ids, **given):
        if "logits_processor" in given:  # else it fills the cache of the prompts
            rows.append(len(ids))
        return sample(ids, **given)

    monkeypatch.setattr(engine.model, "generate", generate)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [5], [6, 7], [12, 13, 14, 15], [8, 9, 10]]
    seeds = [3, 5, 7, 11, 13]
    sampling = rollout.Sampling(temperature=0.8, max_tokens=9, stop_token_ids=[0, 7], seeds=seeds)
    told = {}
    together = engine.generate(prompts, 3, sampling, told.__setitem__)
    assert rows == [9, 6]
    assert [r["prompt_ids"] for r in together] == [p for p in prompts for _ in range(3)]
    assert [told[i] for i in range(5)] == rollout.groups_of(together, 5)
    assert list(told) == [1, 2, 4, 3, 0]  # the shortest first, beside others of about its length
    for prompt, seed, group in zip(prompts, seeds, rollout.groups_of(together, 5)):
        alone = engine.generate([prompt], 3, sampling._replace(seeds=[seed]))
        assert len({tuple(r["completion_ids"]) for r in alone}) > 1  # a seed is not one completion
        for r, expected in zip(group, alone):
            assert r["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-5)
            assert r | {"logprobs": 0} == expected | {"logprobs": 0}


def test_transformers_sample_nothing_for_a_rank_without_prompts(tiny_model_dir):
    """As in an evaluation of fewer problems than ranks."""
    engine = rollout.HfEngine(str(tiny_model_dir), {}, torch.float32, torch.device("cpu"))
    sampling = rollout.Sampling(temperature=1.0, max_tokens=2, stop_token_ids=[0], seeds=[])
    assert rollout.generate(engine, sft.tiny_tokenizer(), [], 2, sampling) == []


def hf_engine(tmp_path, model_config) -> rollout.HfEngine:
    """An HfEngine with a model of random weights, large enough that its tokens matter."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(model_config)
    for parameter in lm.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    lm.save_pretrained(tmp_path)
    return rollout.HfEngine(str(tmp_path), {}, torch.float32, torch.device("cpu"))


SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RECURRENT = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "head_dim": 16,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CACHES = [
    (Qwen2Config(**SMALL), True),
    (MistralConfig(**SMALL, sliding_window=4), True),
    (FalconH1Config(**SMALL, **RECURRENT), False),
    (OpenAIGPTConfig(vocab_size=101, n_positions=64, n_embd=64, n_layer=2, n_head=4), False),
    (MiniMaxConfig(**SMALL, **EXPERTS), False),
]


KINDS = ["full", "window", "recurrent", "no_cache", "own_class"]


@pytest.mark.parametrize("model_config, shares", CACHES, ids=KINDS)
def test_transformers_compute_the_prompt_of_a_group_once(tmp_path, model_config, shares):
    """Where the cache allows it. Log-probs are those of plain forwards, prompts padded or not."""
    engine = hf_engine(tmp_path, model_config)
    computed = []  # tokens of each forward
    count = engine.model.register_forward_pre_hook(
        lambda lm, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [13], [14, 15, 16]]
    sampling = rollout.Sampling(temperature=0.8, max_tokens=6, stop_token_ids=[0], seeds=[3, 5, 7])
    rollouts = engine.generate(prompts, 4, sampling)
    first = len(computed)
    for n in (1, 2):
        engine.generate(prompts[:1], n, sampling._replace(max_tokens=1, seeds=[3]))
    count.remove()
    assert engine.shares_prompts == shares
    # alone in its group it is computed at once; what can't be shared is tried only once
    assert computed[first:] == ([8, 7, 2] if shares else [8, 16])
    # all but the last token of each prompt, padded to 7, and then that one in every row
    assert computed[:2] == [3 * 7, 12 if shares else 12 * 8]
    for r in rollouts:
        begin = len(r["prompt_ids"])
        tokens = torch.tensor(r["completion_ids"])
        with torch.no_grad():
            logits = engine.model(torch.tensor([r["prompt_ids"] + r["completion_ids"]])).logits[0]
        logps = (logits / 0.8).log_softmax(1)[begin - 1 : -1].gather(1, tokens[:, None])[:, 0]
        assert r["logprobs"] == pytest.approx(logps.tolist(), abs=5e-5)


def test_a_state_that_the_model_keeps_beside_its_cache_is_not_taken_for_shared(tmp_path):
    """The recurrent layer of RecurrentGemma has an entry in the cache, which stays empty."""
    blocks = {"block_types": ["attention", "recurrent"], "attention_window_size": 16}
    engine = hf_engine(tmp_path, RecurrentGemmaConfig(**SMALL, **blocks))
    sampling = rollout.Sampling(temperature=1.0, max_tokens=3, stop_token_ids=[0], seeds=[3])
    engine.generate([[5, 6, 7]], 2, sampling)
    assert not engine.shares_prompts


def test_tokens_are_drawn_with_their_probabilities():
    """20,000 draws: a share is off by more than .015, four standard deviations, for about one seed
    in 5,000. Tokens without probability, at the ends too, never come."""
    probs = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    draws = rollout.Draws(n=20_000, seeds=[1], temperature=1.0)
    chosen = draws(None, probs.log().repeat(20_000, 1)).argmax(1)
    assert draws.logps[0][:, 0].tolist() == pytest.approx(probs[chosen].log().tolist(), abs=1e-6)
    shares = chosen.bincount(minlength=6) / 20_000
    assert shares.tolist() == pytest.approx(probs.tolist(), abs=0.015)
    assert not shares[probs == 0].any()
