"""Model folders that can't be used, or would train something else than meant."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deadlines import PATIENCE
from row_files import check_words, jsonl, refusal
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
)

import checks
import evaluate
import generate
import policy
import preflight
import rollout
import sft
import train
from checks import FLAGS
from common import UserError, load_config
from preflight import load_model_files, stop_token_ids
from server import __main__ as serve

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "config" / "countdown_tiny.py")
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tiny_model_dir, tmp_path) -> Path:
    """A model that works, to be broken: two layers, 101 tokens."""
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def change(file: str, **fields):
    """A function that sets fields of a folder's JSON file."""

    def work(folder: Path) -> None:
        old = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(old | fields))

    return work


def write(file: str, content: bytes):
    return lambda folder: (folder / file).write_bytes(content)


def cut(file: str):
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size // 2)


def replace_by_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def dangling(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / "elsewhere.safetensors")


def pickled(name: str):
    def work(folder: Path) -> None:
        torch.save(load_file(folder / WEIGHTS), folder / name)
        (folder / WEIGHTS).unlink()

    return work


def index(names: list[str]):
    def work(folder: Path) -> None:
        tensors = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        weight_map = {name: names[i % len(names)] for i, name in enumerate(tensors)}
        content = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(content)

    return work


def with_weights(edit):
    def work(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return work


def all_nan(tensors: dict) -> None:
    for tensor in tensors.values():
        tensor.fill_(torch.nan)


def one_inf(tensors: dict) -> None:
    tensors["model.norm.weight"][3] = torch.inf


def no_tokenizer(folder: Path) -> None:
    for path in folder.iterdir():
        if "token" in path.name or "template" in path.name:
            path.unlink()


def template(text: str):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


BAD_WEIGHTS = {
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), [WEIGHTS]),
    "cut": (cut(WEIGHTS), [f"{WEIGHTS} is damaged"]),
    "empty": (write(WEIGHTS, b""), [f"{WEIGHTS} is damaged"]),
    "random bytes": (write(WEIGHTS, bytes(range(256)) * 9), [f"{WEIGHTS} is damaged"]),
    "a folder": (replace_by_folder, [WEIGHTS]),
    "a dangling link": (dangling, [WEIGHTS]),
    "pickles only": (pickled("pytorch_model.bin"), ["pickle", "save_pretrained"]),
    "a part of a pickle": (pickled("pytorch_model-00001-of-00002.bin"), ["pickle can run code"]),
    "Llama's own": (pickled("consolidated.00.pth"), ["pickle can run code"]),
    "a missing shard": (index(["model-00001-of-00002.safetensors", "gone.safetensors"]), ["gone"]),
    "a broken index": (
        lambda folder: [
            index(["model-00001-of-00002.safetensors"])(folder),
            cut("model.safetensors.index.json")(folder),
        ],
        ["its weights"],
    ),
    "wider": (change("config.json", intermediate_size=99), ["(128, 384) instead of (128, 99)"]),
    "a smaller vocabulary": (
        with_weights(lambda t: t.update({"model.embed_tokens.weight": torch.zeros(90, 128)})),
        ["model.embed_tokens.weight", "(90, 128) instead of (101, 128)"],
    ),
    "missing layers": (
        change("config.json", num_hidden_layers=4, layer_types=["full_attention"] * 4),
        ["24 weights", "model.layers.2.input_layernorm.weight", "random"],
    ),
    "layers too many": (
        change("config.json", num_hidden_layers=1, layer_types=["full_attention"]),
        ["12 weights of layers", "model.layers.1.input_layernorm.weight", "left out"],
    ),
    "no head": (change("config.json", tie_word_embeddings=False), ["1 weights", "lm_head.weight"]),
    "one tensor less": (
        with_weights(lambda t: t.pop("model.norm.weight")),
        ["1 weights", "model.norm.weight", "random"],
    ),
    "all NaN": (with_weights(all_nan), ["no numbers", WEIGHTS]),
    "an infinite norm": (with_weights(one_inf), ["model.norm.weight", "no numbers"]),
}

BAD_FILES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "a config cut": (cut("config.json"), ["config.json"]),
    "a config of random bytes": (write("config.json", bytes(range(256))), ["config.json"]),
    "a config that is a list": (write("config.json", b"[1]"), ["config.json"]),
    "an unknown kind": (change("config.json", model_type="nothing"), ["config.json", "nothing"]),
    "no language model": (change("config.json", model_type="vit"), ["ViTConfig"]),
    "more than text": (change("config.json", model_type="gemma3"), ["a gemma3 reads more than"]),
    "no vocabulary": (change("config.json", vocab_size=0), ["vocab_size=0"]),
    "a negative vocabulary": (change("config.json", vocab_size=-5), ["vocab_size=-5"]),
    "text for a number": (
        change("config.json", num_hidden_layers="2"),
        ["config.json", "num_hidden_layers"],
    ),
    "EOS as text": (change("config.json", eos_token_id="0"), ["config.json", "eos_token_id"]),
    "EOS as a nested list": (change("config.json", eos_token_id=[[0]]), ["eos_token_id"]),
    "a generation config cut": (cut("generation_config.json"), ["generation_config.json"]),
    "a stop token as text": (
        change("generation_config.json", eos_token_id="0"),
        ["'0'", "generation_config.json"],
    ),
    "nested stop tokens": (change("generation_config.json", eos_token_id=[[0]]), ["[0]"]),
    "a stop token beyond": (
        change("generation_config.json", eos_token_id=[0, 101]),
        ["101", "from 0 to 100"],
    ),
    "a negative stop token": (change("generation_config.json", eos_token_id=-1), ["-1"]),
    "no tokenizer files": (no_tokenizer, ["is tokenizer.json missing?"]),
    "no tokenizer.json": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        ["is tokenizer.json missing?"],
    ),
    "a tokenizer cut": (cut("tokenizer.json"), ["the tokenizer"]),
    "a tokenizer of random bytes": (write("tokenizer.json", bytes(range(256))), ["the tokenizer"]),
    "a template that divides by 0": (template("{{ 1/0 }}"), ["ZeroDivisionError"]),
    "a template that is none": (template("{% for %}"), ["TemplateSyntaxError"]),
    "a template without the user": (template("{{ 'Hi' }}"), ["leaves the user's message out"]),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_that_can_not_be_loaded_as_they_are_meant_are_one_sentence(folder, case):
    spoil, words = BAD_WEIGHTS[case]
    spoil(folder)
    message = refusal(load_model_files, str(folder))
    check_words(message, f"model={str(folder)!r}", *words)


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("weights", [True, False])
def test_a_model_folder_that_can_not_be_used_is_one_sentence_also_in_a_dry_run(
    folder, case, weights
):
    if not weights:
        (folder / WEIGHTS).unlink()
    spoil, words = BAD_FILES[case]
    spoil(folder)
    message = refusal(load_model_files, str(folder), dry_run=True)
    check_words(message, f"model={str(folder)!r}", *words)


# --- every script, before anything starts


def start(script, folder: Path, output: Path, lines: Path) -> None:
    """Runs a command with its model in `folder`, as from the command line."""
    flags = [TINY, f"--model={folder}", f"--output_dir={output}"]
    if script is serve:
        return serve.main(flags)
    c = load_config(flags)
    if script is generate:
        return generate.main(c, FLAGS["generate"] | {"output": str(lines)})
    script.main(c)


@pytest.mark.parametrize("script", [train, sft, evaluate, generate, serve])
@pytest.mark.parametrize("case", ["missing layers", "cut", "pickles only"])
def test_every_script_refuses_a_bad_model_before_anything_starts(
    script, case, folder, tmp_path, monkeypatch
):
    spoil, _ = BAD_WEIGHTS[case]
    spoil(folder)
    for module, name in ((script, "start_distributed"), (rollout, "start_engine")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it started"), raising=False)
    monkeypatch.setattr(serve.os, "execve", lambda *_: pytest.fail("it started"))
    output = tmp_path / "out"
    lines = tmp_path / "out.jsonl"
    assert "model=" in refusal(start, script, folder, output, lines)
    assert not lines.exists()
    assert not output.exists()


def test_the_script_says_so_in_one_line_with_status_2_before_vllm_is_imported(folder):
    change("config.json", num_hidden_layers=4, layer_types=["full_attention"] * 4)(folder)
    done = subprocess.run(
        [sys.executable, "evaluate.py", TINY, f"--model={folder}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert "LOAD REPORT" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "24 weights" in errors[0]


def test_a_shallow_checkpoint_says_how_to_make_a_model_of_it(folder):
    (folder / WEIGHTS).unlink()
    (folder / "engine").mkdir()
    (folder / "rng_0.pt").write_bytes(b"")
    assert "checkpoint.py export" in refusal(load_model_files, str(folder))


# --- what is no error


def test_a_good_model_is_taken_and_nothing_is_said(folder, capfd):
    files = load_model_files(str(folder))
    assert files.config.num_hidden_layers == 2
    assert files.stop_ids == [0]
    assert files.tokenizer("1+1")["input_ids"]
    assert capfd.readouterr() == ("", "")


def test_shards_are_taken_too(folder):
    lm = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    lm.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    load_model_files(str(folder))
    next(folder.glob("model-00002*")).write_bytes(b"")
    check_words(refusal(load_model_files, str(folder)), "model-00002-of", "is damaged")


def test_weights_of_no_part_of_the_model_are_named(folder, capsys):
    with_weights(lambda t: t.update(v_head=torch.zeros(3)))(folder)
    load_model_files(str(folder))
    out = capsys.readouterr().out
    check_words(out, "1 weights of its files are not part of the model", "v_head")


@pytest.mark.parametrize("script, own", [(evaluate, {}), (generate, {"output": "out.jsonl"})])
def test_every_command_refuses_rows_longer_than_the_model_has_positions(
    script, own, tiny_model_dir, tmp_path
):
    flags = [f"--model={tiny_model_dir}", "--max_completion_length=1000"]
    own = {key: str(tmp_path / value) for key, value in own.items()}
    config = load_config(["config/countdown_tiny.py", *flags])
    message = refusal(script.main, config, FLAGS[script.__name__] | own)
    check_words(message, "max_prompt_length=32", "max_completion_length=1000", "1024 positions")


def test_a_model_without_a_chat_template_is_said_to_be_one(folder, capsys):
    (folder / "chat_template.jinja").unlink()
    assert load_model_files(str(folder)).tokenizer.chat_template is None
    assert "has no chat template" in capsys.readouterr().out
    load_model_files(str(folder), sft.TEMPLATE)
    assert capsys.readouterr().out == ""


def test_a_template_that_writes_the_date_is_told(folder, capsys):
    load_model_files(str(folder), "{{ strftime_now('%d') }}" + sft.TEMPLATE)
    check_words(capsys.readouterr().out, "writes the date into prompts", "chat_template_kwargs")


def test_a_base_model_whose_tokenizer_ends_every_prompt_is_refused(folder):
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    end = [("<|end|>", tokenizer.token_to_id("<|end|>"))]
    tokenizer.post_processor = TemplateProcessing("$A <|end|>", special_tokens=end)
    tokenizer.save(str(file))
    assert load_model_files(str(folder)).tokenizer.chat_template  # which adds none
    (folder / "chat_template.jinja").unlink()
    words = refusal(load_model_files, str(folder))
    check_words(words, "its tokenizer ends every prompt with '<|end|>'", "post_processor")


def test_a_dry_run_does_without_weights_and_says_so(folder, capsys):
    (folder / WEIGHTS).unlink()
    load_model_files(str(folder), dry_run=True)
    assert "holds no weights" in capsys.readouterr().out


def test_a_dry_run_looks_at_the_weights_that_are_there(folder):
    cut(WEIGHTS)(folder)
    assert f"{WEIGHTS} is damaged" in refusal(load_model_files, str(folder), dry_run=True)


# --- kinds of models that have something else in their folders


def test_a_tokenizer_of_mistrals_own_kind_beside_it_is_not_taken(folder):
    config = MistralConfig(**SMALL, num_key_value_heads=2, intermediate_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tekken.json").write_text("{}")
    tokenizer = load_model_files(str(folder)).tokenizer
    assert tokenizer.chat_template and tokenizer.convert_tokens_to_ids("7") < 101


def test_a_model_that_keeps_weights_beside_its_parameters_is_not_trained(folder):
    config = DeepseekV3Config(
        **SMALL,
        num_key_value_heads=2,
        intermediate_size=32,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_model_files(str(folder))  # to score it, or to sample from it, it will do
    said = refusal(preflight.load_inputs, load_config([f"--model={folder}"]), 1)
    check_words(said, "1 of its tensors", "layers.1.mlp.gate.e_score_correction_bias")


CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
CODE = {
    "config": {CONFIG: {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}},
    "model": {CONFIG: {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "own.M"}}},
    "tokenizer": {
        CONFIG: {"model_type": "llama"},
        TOKENIZER: {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.T", None]}},
    },
}


@pytest.mark.parametrize("files", CODE.values(), ids=CODE)
def test_a_model_with_code_of_its_own_is_refused_and_nobody_is_asked(folder, files, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    for file, fields in files.items():
        change(file, **fields)(folder)
    message = refusal(load_model_files, str(folder))
    check_words(message, "(auto_map), and such code is never run here")
    assert not asked and not (folder / "ran").exists()


def test_a_model_without_attention_heads_is_refused(folder):
    config = MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    check_words(refusal(load_model_files, str(folder)), "a mamba has no attention heads")


# --- a tokenizer and a model that do not belong together


def smaller_model(folder: Path, vocab_size: int) -> None:
    sft.tiny_model(vocab_size, seed=0, layers=2).save_pretrained(folder)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_tokenizer_larger_than_the_model_is_refused(folder, dry_run):
    smaller_model(folder, 100)
    message = refusal(load_model_files, str(folder), dry_run=dry_run)
    check_words(message, "number 100", "vocab_size=100")


def test_special_tokens_beyond_the_model_matter_only_where_prompts_hold_them(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    load_model_files(str(folder))
    (folder / "chat_template.jinja").write_text("<image>" + sft.TEMPLATE)
    message = refusal(load_model_files, str(folder))
    check_words(message, "'<image>'", "vocab_size=101")


# --- what ends a completion


def test_the_tokens_that_end_a_completion_are_the_tokenizers_and_the_models(folder, tmp_path):
    tokenizer = sft.tiny_tokenizer()
    config = SimpleNamespace(vocab_size=101, eos_token_id=[0, 7])  # read if no other file has them
    assert stop_token_ids(str(folder), tokenizer, config) == [0]
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [4, 0]}')
    assert stop_token_ids(str(tmp_path), tokenizer, config) == [0, 4]
    tokenizer.eos_token = None
    assert stop_token_ids(str(tmp_path), tokenizer, config) == [4, 0]
    generation.write_text("{}")
    assert "end-of-sequence" in refusal(stop_token_ids, str(tmp_path), tokenizer, config)
    generation.unlink()
    assert stop_token_ids(str(tmp_path), tokenizer, config) == [0, 7]
    config.eos_token_id = 7
    assert "end-of-sequence" in refusal(stop_token_ids, str(tmp_path), tokenizer, config)


def test_a_run_warns_of_a_turn_that_does_not_end_a_completion(folder, tmp_path, capsys):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<|user|>"
    rows = jsonl(tmp_path, {"prompt": "1+1?", "answer": "2"})
    flags = [f"--model={folder}", f"--dataset.name={rows}", "--reward_funcs=['math']"]
    flags += ["--reward_workers=0", "--prompts_per_step=1"]
    preflight.load_inputs(load_config(flags), 1)
    spaced = template.replace("<|user|>", "\n<|end|>\n")  # as some end it
    preflight.load_inputs(load_config([*flags, f"--chat_template={spaced}"]), 1)
    assert "warning" not in capsys.readouterr().out
    preflight.load_inputs(load_config([*flags, f"--chat_template={template}"]), 1)
    words = (
        "warning: the chat template ends a turn with '<|user|>', which does not end a completion"
    )
    assert words in capsys.readouterr().out


# --- dropout, and weights that are no numbers further in

SMALL = {"vocab_size": 101, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
WITH_DROPOUT = {
    "gpt2": GPT2Config(**SMALL),  # .1 in three places by default
    "opt": OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, dropout=0.2, layerdrop=0.3),
    "qwen2": Qwen2Config(
        **SMALL, num_key_value_heads=2, intermediate_size=64, attention_dropout=0.2
    ),
}


def logps(learner) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) * 7 % 101
    with torch.no_grad():
        return learner(ids, torch.tensor([4, 4]), torch.tensor([8, 6]))[0]


@pytest.mark.parametrize("name, pack", [("gpt2", False), ("opt", False), ("qwen2", True)])
def test_a_model_with_dropout_learns_without_it(name, pack, tmp_path, capsys):
    AutoModelForCausalLM.from_config(WITH_DROPOUT[name]).save_pretrained(tmp_path)
    c = load_config([TINY, f"--model={tmp_path}", f"--pack_sequences={pack}"])
    learner = train.load_lm(
        c | {"model": str(tmp_path), "dtype": "float32"}, True, torch.device("cpu")
    )
    largest = {"gpt2": "0.1", "opt": "0.3", "qwen2": "0.2"}[name]
    assert f"dropout of up to {largest} is off" in capsys.readouterr().out
    assert learner.lm.training and torch.equal(logps(learner), logps(learner))
    frozen = train.load_lm(
        c | {"model": str(tmp_path), "dtype": "float32"}, False, torch.device("cpu")
    )
    assert torch.equal(logps(learner), logps(frozen)) and capsys.readouterr().out == ""
    learner.lm.save_pretrained(tmp_path / "saved")  # its config keeps its values
    fields = [key for key in WITH_DROPOUT[name].to_dict() if "drop" in key]
    saved = AutoConfig.from_pretrained(tmp_path / "saved")
    assert all(getattr(saved, key) == getattr(WITH_DROPOUT[name], key) for key in fields)


def test_a_model_that_computes_something_else_while_it_trains_is_refused(folder):
    lm = AutoModelForCausalLM.from_pretrained(folder)
    lm.model.layers[0].mlp.register_forward_hook(
        lambda module, _, out: out + torch.randn_like(out) if module.training else out
    )
    policy.Policy(lm.eval(), 1.0, 64, pack=False)
    with pytest.raises(UserError, match="something else while it trains"):
        policy.Policy(lm.train(), 1.0, 64, pack=False)
    # noise that these tokens do not show
    quiet = AutoModelForCausalLM.from_pretrained(folder).train()
    policy.Policy(quiet, 1.0, 64, pack=False)
    quiet.config.router_jitter_noise = 1e-9
    with pytest.raises(UserError, match="something else while it trains"):
        policy.Policy(quiet, 1.0, 64, pack=False)


def test_a_nan_deep_in_the_weights_is_refused_before_it_trains(folder):
    def late(tensors: dict) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][-1] = torch.nan

    with_weights(late)(folder)
    load_model_files(str(folder))  # the beginning of every tensor is fine
    c = load_config([TINY, f"--model={folder}"])
    with pytest.raises(UserError, match="no numbers"):
        train.load_lm(c | {"model": str(folder), "dtype": "float32"}, True, torch.device("cpu"))


def test_positions_that_follow_the_longest_row_of_a_batch_are_refused():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    model = SimpleNamespace(max_position_embeddings=4096, rope_parameters=rope)
    c = load_config(["--max_prompt_length=32", "--max_completion_length=32"])
    preflight.check_context(model, c)
    words = refusal(preflight.check_context, model, c | {"max_completion_length": 33})
    check_words(words, "'longrope'", "beyond 64 tokens")
    endless = SimpleNamespace(
        max_position_embeddings=None, rope_parameters={"rope_type": "dynamic"}
    )
    preflight.check_context(endless, c)
    # YaRN's factor adds positions to those of config.json; vLLM knows how many
    model = SimpleNamespace(max_position_embeddings=63, rope_parameters={"rope_type": "yarn"})
    preflight.check_context(model, c)
    model.rope_parameters["rope_type"] = "default"
    check_words(refusal(preflight.check_context, model, c), "more than the 63 positions")


def test_a_servers_address_is_checked_before_anything_loads():
    def told(*flags: str) -> str:
        c = load_config(["--rollout_engine=server", *flags])
        return refusal(preflight.load_inputs, c, 1)

    assert "needs rollout_server" in told()
    assert "must begin with http://" in told("--rollout_server=localhost:8000")


def test_an_objective_without_its_formula_is_one_sentence(monkeypatch):
    monkeypatch.setitem(checks.OBJECTIVES, "mine", checks.Objective(advantage="mine"))
    c = load_config([]) | {"objective": "mine"}
    words = refusal(preflight.load_inputs, c, 1)
    check_words(words, "advantage='mine'", "loss.ADVANTAGES has only centred, pass_at_k")
    for field in checks.FIELDS:
        wrong = checks.Objective(**{field: "token_men"})
        monkeypatch.setitem(checks.OBJECTIVES, "dr_grpo", wrong)
        assert f"has {field}='token_men'" in refusal(load_config, ["--objective=dr_grpo"])


def test_a_model_with_more_on_its_logits_than_a_head_is_refused_without_weights():
    small = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "intermediate_size": 64}
    for config in (PhiConfig(**small), Gemma2Config(**small, num_key_value_heads=2, head_dim=16)):
        words = refusal(preflight.refuse_unsupported, "mine", config)
        check_words(words, "model='mine'", "a bias, a cap or a scale on the logits")


def test_a_model_whose_body_transformers_does_not_name_is_refused():
    """Llama 4's text model: its base_model is itself, and gives no hidden states."""
    small = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
    config = Llama4TextConfig(**small, intermediate_size_mlp=64, num_local_experts=2)
    words = refusal(preflight.refuse_unsupported, "mine", config)
    check_words(words, "'llama4_text' is not supported", "gives hidden states")


def test_a_run_warns_that_no_row_has_modes_to_adapt_tau_to(folder, tmp_path, capsys):
    rows = jsonl(tmp_path, {"prompt": "1+1?", "answer": "2"})
    flags = [f"--model={folder}", "--reward_workers=0", "--objective=xdr"]
    flags += ["--xdr_mode_adaptive_tau=True"]
    preflight.load_inputs(load_config([*flags, "--dataset.name=countdown"]), 1)
    assert "xdr_mode_adaptive_tau" not in capsys.readouterr().out
    named = [f"--dataset.name={rows}", "--reward_funcs=['math']"]
    preflight.load_inputs(load_config([*flags, *named, "--eval_steps=0"]), 1)
    assert "xdr_mode_adaptive_tau=True: no row is of a task with modes" in capsys.readouterr().out
