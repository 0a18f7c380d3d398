"""What a model's files may bring that shows only late: in a save, or in the step that draws
a row."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from row_files import check_words, refusal
from safetensors.torch import load_file, save_file
from test_prompts_length import BPE
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

import evaluate
import generate
import preflight
import rollout
import sft
import train
from common import load_config

CPU = torch.device("cpu")


# --- a generation_config.json that transformers loads and does not save


def with_generation(folder: Path, tmp_path: Path, **settings) -> dict:
    """The config of a run from a copy of a model with these settings in generation_config.json."""
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]} | settings))
    c = load_config(["config/countdown_tiny.py", f"--model={model}"])
    return c | {"dtype": "float32"}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6, "top_p": 0.9},
        {"do_sample": False, "temperature": 0.6},
        {"length_penalty": 0.5},
        {"pad_token_id": -1},
    ],
    ids=str,
)
def test_a_model_is_saved_whatever_its_generation_config_holds(
    settings, tiny_model_dir, tmp_path, capsys
):
    c = with_generation(tiny_model_dir, tmp_path, **settings)
    for load in (
        lambda: train.load_lm(c, trains=True, device=CPU).lm,
        lambda: sft.load_model(c)[0],
    ):
        lm = load()
        check_words(capsys.readouterr().out, "only its token ids", list(settings)[-1])
        lm.save_pretrained(tmp_path / "saved")
        assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == [0, 7]


def test_a_warm_start_stops_where_its_model_did_without_a_generation_config(
    tiny_model_dir, tmp_path
):
    """config.json may name other stop tokens than the tokenizer."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (model / "generation_config.json").unlink()
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"eos_token_id": [0, 16]}))
    lm, tokenizer = sft.load_model(load_config(["config/countdown_tiny.py", f"--model={model}"]))
    sft.save(tmp_path / "saved", lm, tokenizer, None, {"loss": 0.5, "seconds": 3.0})
    stops = [preflight.load_model_files(str(path)).stop_ids for path in (model, tmp_path / "saved")]
    assert stops[0] == stops[1] == [tokenizer.eos_token_id, 16]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dry_run", [False, True])
def test_rotary_positions_of_an_unknown_type_are_one_sentence(
    dry_run, nested, tiny_model_dir, tmp_path
):
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    if dry_run:
        (model / "model.safetensors").unlink()
    rope = {"rope_type": "spiral", "rope_theta": 10000.0}
    settings = json.loads((model / "config.json").read_text())
    if nested:
        settings |= {"model_type": "gemma3_text", "head_dim": 32}
        rope = {"sliding_attention": {"rope_type": "default"}, "full_attention": rope}
    (model / "config.json").write_text(json.dumps(settings | {"rope_parameters": rope}))
    said = refusal(preflight.load_model_files, str(model), dry_run=dry_run)
    check_words(said, "config.json has rope_type='spiral'", "it knows default, ", "llama3")


@pytest.mark.parametrize("asked", ["output_attentions", "return_dict"])
def test_a_config_that_asks_for_other_outputs_is_trained_and_saved(asked, tiny_model_dir, tmp_path):
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    settings[asked] = asked != "return_dict"
    (model / "config.json").write_text(json.dumps(settings))
    c = load_config(["config/countdown_tiny.py", f"--model={model}"]) | {"dtype": "float32"}
    for lm in (train.load_lm(c, True, CPU).lm, sft.load_model(c)[0]):
        lm.save_pretrained(tmp_path / "saved")


def test_a_generation_config_that_can_be_saved_stays(tiny_model_dir, tmp_path, capsys):
    c = with_generation(tiny_model_dir, tmp_path, do_sample=True, temperature=0.6)
    train.load_lm(c, trains=True, device=CPU).lm.save_pretrained(tmp_path / "saved")
    assert "token ids" not in capsys.readouterr().out
    assert GenerationConfig.from_pretrained(tmp_path / "saved").temperature == 0.6


@pytest.mark.parametrize("command", [sft.load_model, lambda c: preflight.load_inputs(c, 1)])
def test_a_tokenizer_that_can_not_be_saved_is_found_before_training(
    command, tiny_model_dir, monkeypatch
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.init_kwargs["odd"] = object()
    monkeypatch.setattr(preflight.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    c = load_config(["config/countdown_tiny.py", f"--model={tiny_model_dir}"])
    check_words(refusal(command, c), "the tokenizer was read but can't be saved", "checkpoints")


# --- a head beside tied embeddings


@pytest.mark.parametrize("command", [sft.load_model, lambda c: train.load_lm(c, True, CPU)])
def test_a_head_of_its_own_where_the_config_ties_it_is_refused(command, tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] / 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    c = load_config(["config/countdown_tiny.py", f"--model={folder}"]) | {"dtype": "float32"}
    preflight.load_model_files(str(folder))  # files are not read as a whole before weights load
    check_words(refusal(command, c), "vocabulary head", "tie_word_embeddings to false")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    command(c)


# --- adapters beside a model


@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_with_adapters_is_refused(whole, tiny_model_dir, tmp_path):
    """transformers would load them on top of the model, and vLLM would not."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    if not whole:
        (folder / "config.json").unlink()
    message = refusal(preflight.load_model_files, str(folder))
    check_words(message, "adapter_config.json", "merge_and_unload")


# --- quantised weights, code beside a known type, a class that vLLM changes


@pytest.mark.parametrize("method", ["gptq", "fp8"])
@pytest.mark.parametrize("command", [sft.load_model, lambda c: preflight.load_inputs(c, 1)])
def test_quantised_weights_are_not_trained(method, command, tiny_model_dir, tmp_path):
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (model / "config.json").write_text(json.dumps(settings))
    c = load_config(["config/countdown_tiny.py", f"--model={model}"])
    check_words(refusal(command, c), f"quantised ({method})", "name the model")


def test_no_checkpoint_asks_for_code_that_it_has_not(tiny_model_dir, tmp_path):
    """Phi-3 has auto_map beside a model_type that transformers knows."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    (model / "config.json").write_text(json.dumps(settings))
    c = load_config(["config/countdown_tiny.py", f"--model={model}"]) | {"dtype": "float32"}
    for lm in (train.load_lm(c, True, CPU).lm, sft.load_model(c)[0]):
        lm.save_pretrained(tmp_path / "saved")
        assert "auto_map" not in (tmp_path / "saved" / "config.json").read_text()


@pytest.mark.parametrize("changed", [True, False])
def test_a_model_that_vllm_runs_by_transformers_class_is_refused(changed):
    """vLLM decorates that class, of which the policy would be made."""
    engine = object.__new__(rollout.VllmEngine)
    settings = SimpleNamespace(using_transformers_backend=lambda: changed)
    engine.llm = SimpleNamespace(model_config=settings)
    if not changed:
        rollout.check_class_unchanged(engine, {"model": "some/model"})
        return
    message = refusal(rollout.check_class_unchanged, engine, {"model": "some/model"})
    check_words(message, "some/model", "rollout_engine='hf'")


# --- a tokenizer of another class than its files


def test_a_tokenizer_whose_class_would_drop_white_space_is_read_as_it_is(tmp_path, capsys):
    """As DeepSeek's R1 distillations: bytes in tokenizer.json, Llama's class beside it."""
    model = tmp_path / "model"
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(BPE), num_hidden_layers=1, **shape)
    LlamaForCausalLM(config).save_pretrained(model)
    BPE.save_pretrained(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "LlamaTokenizerFast"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert not preflight.keeps_spaces(AutoTokenizer.from_pretrained(model))
    tokenizer = preflight.load_model_files(str(model)).tokenizer
    assert "as the LlamaTokenizer" in capsys.readouterr().out
    tokenizer.save_pretrained(tmp_path / "saved")
    text = "What is one and one?\nBe brief."
    for kept in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert kept(text)["input_ids"] == BPE(text)["input_ids"]
        assert kept.chat_template == BPE.chat_template and kept.eos_token == BPE.eos_token


# --- a special token that the tokenizer has and the model has not

GOOD, BAD = "1,2,3=6:", "1,2,3=6: <image>"


@pytest.fixture
def beyond(tiny_model_dir, tmp_path) -> list[str]:
    """Flags of a run whose tokenizer knows a token, number 101, that its model does not."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(model)
    return ["config/countdown_tiny.py", f"--model={model}", "--reward_funcs=last_number"]


def file_of(tmp_path: Path, name: str, prompt: str, solution: str = "1+2+3") -> str:
    """A data set of one good row and one with this prompt and solution."""
    rows = [
        {"id": f"{name}, good", "prompt": "2,2,2=6:", "answer": "6", "solutions": ["2+2+2"]},
        {"id": name, "prompt": prompt, "answer": "6", "solutions": [solution]},
    ]
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("bad", ["dataset", "easy_dataset", "eval_dataset"])
def test_a_row_with_such_a_token_is_found_before_weights_load(bad, beyond, tmp_path):
    for name in ("dataset", "easy_dataset", "eval_dataset"):
        path = file_of(tmp_path, name, BAD if name == bad else GOOD)
        beyond = [*beyond, f"--{name}.name={path}"]
    c = load_config([*beyond, "--easy_dataset.share=0.5", "--eval_steps=1"])
    message = refusal(preflight.load_inputs, c, 1)
    check_words(message, f"row '{bad}'", "'<image>'", "number 101", "vocab_size=101")


def test_the_other_commands_find_it_too(beyond, tmp_path):
    path = file_of(tmp_path, "bad", BAD)
    good = file_of(tmp_path, "good", GOOD)
    c = load_config([*beyond, f"--dataset.name={path}", f"--eval_dataset.name={path}"])
    own = generate.FLAGS["generate"] | {"output": str(tmp_path / "lines.jsonl")}
    sft_run = load_config([*beyond, f"--dataset.name={path}", f"--eval_dataset.name={good}"])
    sft_run |= {"output_dir": str(tmp_path / "sft")}
    for message in (
        refusal(evaluate.main, c),
        refusal(generate.main, c, own),
        refusal(sft.main, sft_run),
    ):
        check_words(message, "'<image>'", "number 101", "vocab_size=101")


def test_a_solution_with_such_a_token_is_refused_too(beyond, tmp_path):
    path = file_of(tmp_path, "bad", GOOD, solution="1+2+3<image>")
    c = load_config([*beyond, f"--dataset.name={path}", "--allow_leakage=True"])
    message = refusal(sft.main, c | {"output_dir": str(tmp_path / "sft")})
    check_words(message, "a solution", "'<image>'", "number 101")
