"""--dry_run: what would run, what it would need, and what would be refused, without loading."""

import json
import re
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from row_files import jsonl, refusal
from test_bad_input import script
from transformers import Qwen2Config

import checkpoint
import controllers
import preflight
import rollout
import sft
import train
from common import UserError, load_config
from policy import ParameterCounts
from preflight import dry_run, memory_estimate

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "config" / "countdown_tiny.py")
SMALL = {"vocab_size": 101, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
OWN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[me]{% endif %}"
)


@pytest.fixture
def shown(tiny_model_dir, tmp_path, capsys):
    """shown(*flags): what a dry run prints."""
    path = jsonl(tmp_path, {"prompt": "1+1?", "answer": "2"})
    flags = [f"--model={tiny_model_dir}", f"--dataset.name={path}", "--reward_funcs=['math']"]
    flags += ["--reward_workers=0", "--system_prompt=S", "--max_completion_length=99"]
    flags += [f"--output_dir={tmp_path / 'run'}"]

    def show(*more: str, world: int = 1) -> str:
        dry_run(load_config([*flags, *more]), world, {"zero": 3})
        return capsys.readouterr().out

    return show


def test_a_dry_run_shows_the_prompt_and_what_ends_a_completion(shown):
    out = shown()
    assert "a completion ends with: 0 '<|end|>'; " in out
    assert "the chat template ends a turn with '<|end|>'" in out
    assert "'<|system|>S<|user|>1+1?<|assistant|>'" in out
    out = shown(f"--chat_template={OWN}")
    assert "the chat template ends a turn with nothing" in out
    assert "'[system]S[user]1+1?[me]'" in out


def test_a_dry_run_shows_the_config_the_batch_and_the_data(shown):
    out = shown("--prompts_per_step=6", "--num_generations=4", "--max_steps=5", world=2)
    assert "  system_prompt = 'S'\n" in out
    assert "batch: 6 prompts x 4 completions = 24 rows a step, 12 on each of 2 rank(s)" in out
    assert 'deepspeed: {"zero": 3}' in out
    assert "data: 1 prompts, 30.00 passes over them in 5 steps" in out


def memory(out: str) -> dict[str, float]:
    """{what: GiB} of the table."""
    lines = re.findall(r"^ +([0-9.]+) (GiB|MiB)  (.+)$", out, re.MULTILINE)
    return {what: float(size) / (1 if unit == "GiB" else 1024) for size, unit, what in lines}


@pytest.fixture
def given(monkeypatch):
    """given(size): memory of a rank in bytes, whatever this machine has."""

    def give(size: float) -> None:
        monkeypatch.setattr(preflight, "device_memory", lambda: size)

    monkeypatch.setattr(rollout, "rank_memory", lambda: 2**34)
    give(2**34)
    return give


def test_a_dry_run_estimates_memory_and_its_lines_add_up(shown, given):
    out = shown("--max_tokens_per_micro_batch=20000", "--prompts_per_step=100")
    table = memory(out)
    together = table.pop("together, of 16.00 GiB")
    while_loading = table.pop("of weights on every rank while it loads")
    assert together == pytest.approx(sum(table.values()), abs=0.005 * len(table) + 0.005)
    assert while_loading == table["weights"] == table["gradients"]
    # 2 layers of 18 numbers per hidden unit (128) and 4 per inner unit (384), 4 bytes each
    activations = 20_000 * 2 * (18 * 128 + 4 * 384) * 4 / 2**30
    assert table["activations of a micro-batch"] == pytest.approx(activations, abs=0.005)
    # 800 rows of 512 + 99 tokens, of which 32 fit into 20,000
    assert "learning: at most 20000 tokens in a micro-batch; 25 micro-batches" in out
    assert "warning: that is more" not in out
    given(2**28)
    assert "warning: that is more" in shown("--max_tokens_per_micro_batch=20000")


def test_a_dry_run_cuts_no_row_into_micro_batches(shown, given):
    out = shown("--max_tokens_per_micro_batch=600", "--prompts_per_step=100")
    assert "learning: at most 611 tokens in a micro-batch; 800 micro-batches" in out


def test_a_dry_run_says_what_the_default_micro_batch_is(shown, given):
    assert "learning: at most 4096 tokens" in shown()
    given(1.32 * 2**30)
    assert "learning: at most 1024 tokens" in shown()


SIZES = ["--beta=0.1", "--dtype=float32", "--offload_optimizer=False"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_splits_a_part_more_with_every_stage(stage, given):
    c = load_config([*SIZES, f"--zero_stage={stage}"])
    sizes = memory_estimate(c, Qwen2Config(**SMALL), ParameterCounts(1000, 1000), 8)
    # from stage 1 on the optimizer has its own copy of the weights
    split = {"optimizer": 12_000 if stage else 8000, "gradients": 4000, "weights": 4000}
    for needed, (what, size) in enumerate(split.items(), 1):
        assert sizes[what] == (size / 8 if stage >= needed else size)
    assert sizes["reference"] == 4000


@pytest.mark.parametrize("count", [1000, 7 * 10**9])
def test_zero_3_still_holds_up_to_a_billion_weights_whole(count, given):
    """Those of DeepSpeed's stage3_max_reuse_distance: what is gathered for the forward stays for
    the backward."""

    def gathered(stage: int, ranks: int) -> int:
        c = load_config([*SIZES, f"--zero_stage={stage}"])
        table = memory_estimate(c, Qwen2Config(**SMALL), ParameterCounts(count, count), ranks)
        return table["weights gathered from other ranks"]

    assert gathered(3, 8) == 4 * min(count, 10**9)
    assert gathered(3, 1) == gathered(2, 8) == 0
    live = DeepSpeedZeroConfig()
    assert live.max_live_parameters == live.max_reuse_distance == preflight.LIVE


def test_gradients_are_copied_where_there_is_somebody_to_send_them_to(given):
    def under_way(stage: int, world: int) -> int:
        c = load_config([*SIZES, f"--zero_stage={stage}"])
        table = memory_estimate(c, Qwen2Config(**SMALL), ParameterCounts(1000, 1000), world)
        return table["gradients under way between ranks"]

    assert under_way(0, 1) == 0
    assert under_way(0, 2) == under_way(2, 1) == 4000


def test_checkpointing_keeps_what_went_into_each_layer_and_the_inside_of_one(given):
    model = Qwen2Config(**SMALL)

    def activations(*flags: str) -> float:
        c = load_config([*SIZES, "--max_tokens_per_micro_batch=2000", *flags])
        table = memory_estimate(c, model, ParameterCounts(1000, 1000), 1)
        return table["activations of a micro-batch"] / 4  # numbers

    whole = activations()
    inside = whole / model.num_hidden_layers  # of one layer
    inputs = 2000 * model.num_hidden_layers * model.hidden_size
    assert activations("--gradient_checkpointing=True") == inside + inputs


def test_an_engine_elsewhere_takes_no_memory_here(given):
    def of_engine(*flags: str) -> dict:
        c = load_config(["--dtype=float32", *flags])
        table = memory_estimate(c, Qwen2Config(**SMALL), ParameterCounts(10_000, 10_000), 1)
        return {what: size for what, size in table.items() if what.startswith("rollout")}

    assert of_engine("--rollout_engine=server") == {}
    for flags, size in [((), 0), (("--zero_stage=3",), 40_000), (("--lora_rank=4",), 40_000)]:
        assert of_engine("--rollout_engine=hf", *flags) == {"rollout engine's weights": size}
    # all but the vocabulary's 101 x 32 twice
    assert of_engine()["rollout engine's weights"] == 4 * (20_000 - 101 * 32)
    assert of_engine()["rollout engine's cache"] > 0


def test_on_a_gpu_a_large_engine_holds_no_weights_while_the_policy_learns(given, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a fake
    model = Qwen2Config(**SMALL)

    def total(*flags: str) -> float:
        c = load_config(["--dtype=float32", *flags])
        table = memory_estimate(c, model, ParameterCounts(10_000, 10_000), 1)
        return preflight.on_device(table)

    elsewhere = total("--rollout_engine=server")
    awake = "--vllm_options.enable_sleep_mode=False"
    given(40_000 * 10)  # the engine's weights are a tenth of it
    assert total() == elsewhere
    assert total(awake) == elsewhere + 40_000
    given(40_000 * 11)
    assert total() == elsewhere + 40_000


def test_a_frozen_head_has_no_gradient(given):
    def of_head(*flags: str) -> float:
        c = load_config([*SIZES, *flags])
        return memory_estimate(c, model, ParameterCounts(1000, 1000), 1)["vocabulary logits"]

    model = Qwen2Config(**SMALL)
    assert of_head() - of_head("--lora_rank=4") == 4 * model.vocab_size * model.hidden_size


# --- whole, through train.py


@pytest.fixture
def no_weights(tmp_path):
    """A model folder from which the weights were deleted."""
    folder, tokenizer = tmp_path / "model", sft.tiny_tokenizer()
    sft.tiny_model(len(tokenizer), seed=0, layers=2, positions=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return folder


def deepspeed_of(text: str) -> dict:
    return json.loads(
        next(line for line in text.splitlines() if line.startswith("deepspeed: ")).removeprefix(
            "deepspeed: "
        )
    )


def test_a_dry_run_shows_what_would_run_and_loads_no_weights(no_weights, tmp_path, capsys):
    train.dry_run_main(
        load_config(
            [
                TINY,
                f"--model={no_weights}",
                f"--output_dir={tmp_path / 'run'}",
                "--maxent_tau=0.5",
            ]
        ),
    )
    said = capsys.readouterr().out
    assert "'<|user|>" in said and "<|assistant|>'" in said and "GiB" in said and "512 rows" in said
    assert (
        "maxent_tau = 0.5" in said
        and "warning: maxent_q_temperature * maxent_tau = 0.5 is above" in said
    )
    assert deepspeed_of(said)["zero_optimization"]["stage"] == 0
    assert not (tmp_path / "run").exists()


def test_a_dry_run_knows_what_options_vllm_has(no_weights, tmp_path):
    flags = [TINY, f"--model={no_weights}", f"--output_dir={tmp_path / 'run'}"]
    option = "--vllm_options.max_num_sequences=8"
    message = refusal(train.dry_run_main, load_config([*flags, option]))
    assert "no option 'max_num_sequences'" in message and "'max_num_seqs'" in message
    train.dry_run_main(load_config([*flags, "--vllm_options.max_num_seqs=8"]))


@pytest.mark.parametrize(
    "flags, words",
    [
        ((), "is not a run of this program"),
        (("--resume_from_checkpoint=latest",), "holds no whole checkpoint"),
    ],
)
def test_a_dry_run_says_in_the_end_that_its_run_folder_would_be_refused(
    no_weights, tmp_path, capsys, flags, words
):
    argv = [TINY, f"--model={no_weights}", f"--output_dir={no_weights}", *flags]
    with pytest.raises(UserError, match=words):
        train.dry_run_main(load_config(argv))
    assert "512 rows" in capsys.readouterr().out


def test_a_dry_run_refuses_to_go_on_from_a_checkpoint_that_does_not_fit(no_weights, tmp_path):
    """As the run itself would: a checkpoint whose files are all there, of another optimizer, with
    a damaged memory, of another model."""
    path = tmp_path / "run" / "step_000001"
    argv = [TINY, f"--model={no_weights}", f"--output_dir={path.parent}", "--reward_workers=0"]
    argv += ["--resume_from_checkpoint=latest", "--max_steps=2"]
    saved = load_config(argv)
    state = checkpoint.TrainerState(1, controllers.init_state(saved), {})._asdict()
    model = json.loads((no_weights / "config.json").read_text())

    files = {"train_config.json": saved, "controller_state.json": state, "config.json": model}
    save_files(path, files)
    train.dry_run_main(load_config(argv))  # one that fits is let through
    for flags, changes, words in [
        ("--optimizer=sgd", {}, "optimizer='adamw'"),
        ("--lora_rank=4", {}, "lora_rank=0"),
        ("", {"controller_state.json": {"step": 1, "controllers": []}}, "is damaged"),
        ("", {"config.json": []}, "config.json is damaged"),
        ("", {"config.json": model | {"num_hidden_layers": 9}}, "num_hidden_layers=9"),
        # the last: the second rank's file stays
        (
            "--optimizer=sgd --zero_stage=2",
            {"train_config.json": saved | {"optimizer": "sgd", "zero_stage": 2}, "rng_1.pt": ""},
            "saved by 2 ranks and this run has 1: .*only 2 can resume it",
        ),
    ]:
        save_files(path, files | changes)
        with pytest.raises(UserError, match=words):
            train.dry_run_main(load_config([*argv, *flags.split()]))


def save_files(path: Path, files: dict) -> None:
    """Makes `path` a checkpoint that is whole by its manifest."""
    (path / "engine").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    for name in ("rng_0.pt", "engine/a.pt"):
        (path / name).write_bytes(b"tensors")
    (path / "manifest.json").write_text(json.dumps(checkpoint.manifest_of(path)))


def test_a_dry_run_of_the_math_config_reads_its_columns_and_drops_long_prompts(
    no_weights, tmp_path, capsys
):
    problem = {"problem": "What is 1+1?", "answer": "2"}
    path = jsonl(tmp_path, problem, {**problem, "problem": "1" * 600}, {"problem": "And?"})
    train.dry_run_main(
        load_config(
            [
                str(ROOT / "config" / "math_maxent.py"),
                f"--model={no_weights}",
                f"--dataset.name={path}",
                f"--eval_dataset.name={path}",
                "--allow_leakage=True",
            ]
        ),
    )
    said = capsys.readouterr().out
    assert "What is 1+1?" in said and "boxed{}" in said and "data: 1 prompts" in said
    assert "1 of 3 rows have no prompt or no answer" in said
    assert "max_prompt_length=512: 1 of 2 prompts are longer" in said and "1 are left out" in said
    assert deepspeed_of(said)["zero_optimization"]["stage"] == 1


@pytest.mark.slow
def test_a_dry_run_counts_the_parameters_of_a_model_of_the_hub(no_weights, tmp_path):
    """The Hub's cache stands in for the Hub: Qwen2.5-1.5B-Instruct's own shape, no weights."""
    cached = tmp_path / "hf" / "hub" / "models--Qwen--Qwen2.5-1.5B-Instruct"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    no_weights.rename(cached / "snapshots" / ("0" * 40))
    config = cached / "snapshots" / ("0" * 40) / "config.json"
    shape = dict(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
        tie_word_embeddings=True,
        layer_types=["full_attention"] * 28,
        max_window_layers=28,
    )
    config.write_text(json.dumps(json.loads(config.read_text()) | shape))
    path = jsonl(tmp_path, {"problem": "What is 1+1?", "answer": "2"})
    done = script(
        "config/math_maxent.py",
        f"--dataset.name={path}",
        f"--eval_dataset.name={path}",
        "--dry_run",
        "--allow_leakage=True",
        HF_HOME=str(tmp_path / "hf"),
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1543.7M parameters" in done.stdout
