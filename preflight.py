"""Reads everything that a run needs before it loads weights, and checks it.

files = load_model_files(model)           # every command: config, tokenizer, stop tokens
inputs = load_inputs(config, ranks)       # the same, and rows and rewards
dry_run(config, ranks, deepspeed_config)  # the same, then prints what would run
"""

import json
import math
import os
import re
import string
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import huggingface_hub.constants
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import cached_file, logging

import checkpoint
import data
import learner
import packing
import rewards
import rollout
import scoring
import tasks
from checks import (
    OBJECTIVES,
    USED,
    completions_per_prompt,
    entries,
    eval_source,
    holds_out_rows,
    is_policy_gradient,
    max_sequence_length,
    scale_of,
    state_bytes,
    warn_config,
)
from common import (
    UserError,
    check_ranks,
    check_tensor_parallel,
    check_writable,
    default_config,
    error_text,
    from_launcher,
    in_one_line,
    memory_text,
    quoted,
    rank_memory,
    refuse_missing_folder,
    say_on_rank_0,
    scheduled,
    with_tau,
)
from loss import ADVANTAGES, CPU_CHUNK, KEPT_BYTES
from policy import (
    CHUNK,
    ODD_HEAD,
    add_adapters,
    check_body,
    count_parameters,
    dtype_of,
    has_plain_head,
    try_optimizer,
)
from prompts import (
    answers_hash,
    check_chat_template,
    check_known,
    encode_prompts,
    end_of_turn,
    leakage_warning,
    prompt_keys,
    prompts_hash,
    render_prompt,
    set_chat_template,
    tokenise,
    warn_of_seeds,
    with_prompt,
    with_trained,
)

GIB = 2**30
# bounds for max_tokens_per_micro_batch=0. A step gets no faster above MOST_TOKENS on a GPU,
# MOST_VALUES_ON_CPU = tokens x hidden_size on a CPU (LOG.md, 2026-11-26)
MOST_TOKENS = 16384
MOST_VALUES_ON_CPU = 2**19
FEWEST_TOKENS = 256  # below this the activations are small beside the weights anyway
# main memory of Python, torch, vLLM and DeepSpeed (LOG.md, 2026-11-22)
LIBRARIES = int(0.85 * GIB)
# GPU memory of CUDA's context, NCCL and a sleeping vLLM (an assumption)
CUDA_LIBRARIES = 2 * GIB
IN_CPU_MEMORY = " (in CPU memory)"
BUCKET = 500_000_000  # DeepSpeed's default reduce_bucket_size, in values
# Most values of gathered weights that ZeRO 3 leaves on a rank: DeepSpeed's defaults of
# stage3_max_live_parameters and stage3_max_reuse_distance. A smaller model stays there whole from
# the forward to the backward.
LIVE = 1_000_000_000
# largest share of a rank's memory that an estimate may fill, because estimates leave things out
MEMORY_SHARE = 0.8
SAMPLE = 4096  # values read from every tensor: enough to notice weights that are all NaN
# ways to take less memory, the cheapest first
LESS_MEMORY = (
    "lower max_tokens_per_micro_batch, set gradient_checkpointing=True, or a higher zero_stage on "
    "several ranks"
)

# --- a model's files


class ModelFiles(NamedTuple):
    config: object
    tokenizer: object
    stop_ids: list[int]  # the tokens that end a completion


def load_model_files(model: str, chat_template: str = "", dry_run: bool = False) -> ModelFiles:
    """Loads what a model's folder or hub id holds besides weights. UserError if that can't be used,
    or if the weights can't.

    chat_template: replaces the tokenizer's own; a file, or the template itself.
    dry_run: don't download weights, and don't insist that a folder has any."""
    if not model:
        raise UserError(
            "model is empty: name a Hugging Face id or a folder, such as "
            "--model=Qwen/Qwen2.5-0.5B-Instruct"
        )
    refuse_missing_folder(model)  # a path with a typo should not be looked up on the hub
    if not os.path.isdir(model):  # a hub id
        data.use_cache_without_hub(huggingface_hub.constants.ENDPOINT)
    with quiet():
        # in order of cost: config, tokenizer, weights
        refuse_adapters(model)
        config = load_part(model, "config.json", AutoConfig)
        refuse_other_kinds(model, config)
        vocab_size = vocabulary_of(model, config)
        tokenizer = load_tokenizer(model)
        check_tokenizer(model, tokenizer, vocab_size)
        choose_template(model, tokenizer, chat_template, vocab_size)
        stop_ids = stop_token_ids(model, tokenizer, config)
        refuse_closed_prompts(model, tokenizer, stop_ids)
        if not dry_run or has_weights(model):
            check_weights(model, config)
        else:
            empty_model(model, config)  # at least config.json must describe one
            if os.path.isdir(model):
                say_on_rank_0(f"warning: model={model!r} holds no weights: a run would end here")
    return ModelFiles(config, tokenizer, stop_ids)


def load_checked_files(c: dict) -> ModelFiles:
    """The files of the config's model, with enough positions for its rows."""
    files = load_model_files(c["model"], c["chat_template"])
    check_context(files.config, c)
    return files


@contextmanager
def quiet():
    """Silences transformers' reports and progress bars: this file reports what matters in them."""
    verbosity = logging.get_verbosity()  # global, so it must be restored
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # not restored: when weights load, one shard's bar is noise
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_part(model: str, part: str, auto_class, **options):
    try:
        # False: otherwise transformers asks whether to run the code that a model may bring
        return auto_class.from_pretrained(model, trust_remote_code=False, **options)
    except Exception as error:  # on a stranger's file parsers raise dozens of kinds
        raise unusable(model, part, error) from None


def load_tokenizer(model: str):
    """The model's tokenizer. If the class that tokenizer_config.json names does not fit
    tokenizer.json (as in DeepSeek's R1 distillations), transformers 5 builds one that drops all
    white space; then tokenizer.json is used as it is."""
    # False: if there is a tekken.json, transformers would load Mistral's own tokenizer, which has
    # no chat template and a different interface
    tokenizer = load_part(model, "the tokenizer", AutoTokenizer, mistral_format=False)
    if keeps_spaces(tokenizer):
        return tokenizer
    plain = load_part(model, "the tokenizer", PreTrainedTokenizerFast)
    if not keeps_spaces(plain):
        raise unusable(model, "the tokenizer", "it drops the white space between words")
    say_on_rank_0(
        f"model={model!r}: its tokenizer would drop all white space if loaded as the "
        f"{type(tokenizer).__name__} that tokenizer_config.json names, so tokenizer.json is used "
        f"as it is"
    )
    return plain


def keeps_spaces(tokenizer) -> bool:
    """Whether the token ids depend on white space."""
    try:
        ids, glued = tokenizer(["a b\nc", "abc"], add_special_tokens=False)["input_ids"]
    except Exception:  # check_tokenizer() says what is wrong
        return True
    return not ids or ids != glued


def unusable(model: str, part: str, error: Exception | str) -> UserError:
    what = "is not a folder, and can't be loaded from the hub"
    if os.path.isdir(model):
        what = "is a folder without a usable model"
        error = checkpoint.taken_for_checkpoint(Path(model)) or error
    if isinstance(error, str):
        reason = error
    elif "trust_remote_code" in str(error):  # transformers' own advice
        reason = (
            "it needs Python code that comes with the model (auto_map), and such code is never run "
            "here: take a model whose code is part of transformers"
        )
    else:
        reason = error_text(error)
    return UserError(f"model={model!r} {what}: {part}: {reason}")


def check_savable(model: str, files: ModelFiles) -> None:
    """UserError if weights are quantised, or if transformers can't write what it has read: a run
    would find that out only when it first saves, perhaps at its end."""
    if kind := quantised(files.config):
        raise unusable(model, "config.json", kind)
    parts = {"config.json": files.config, "the tokenizer": files.tokenizer}
    for name, part in parts.items():
        try:
            with tempfile.TemporaryDirectory() as folder:
                part.save_pretrained(folder)
        except Exception as error:  # a stranger's file may cause any
            raise UserError(
                f"model={model!r}: {name} was read but can't be saved, so there would be no "
                f"checkpoints: {error_text(error)} (tried in the temporary folder, TMPDIR)"
            ) from None


def refuse_adapters(model: str) -> None:
    """UserError if there are adapters in the model's folder, alone or beside weights: transformers
    would load them on top, vLLM would not, and a run would train another model than it samples
    from."""
    name = "adapter_config.json"
    try:
        has_adapters = is_there(model, name)
    except OSError:  # such as a name that no model can have: loading config.json will report it
        return
    if has_adapters:
        raise unusable(
            model,
            name,
            "it has adapters: merge them into their model with peft's merge_and_unload(), save "
            "that and name it, or, if the weights beside them are merged already, remove them",
        )


def refuse_other_kinds(model: str, config) -> None:
    """UserError for a model that reads more than text, or has no attention."""
    if config.get_text_config() is not config:  # multimodal: the text model's config is nested
        raise unusable(
            model,
            "config.json",
            f"a {config.model_type} reads more than text, and only models that read nothing else "
            "can be trained here",
        )
    if not getattr(config, "num_attention_heads", None):  # such as Mamba
        raise unusable(
            model,
            "config.json",
            f"a {config.model_type} has no attention heads (num_attention_heads), and models "
            "without attention are not supported here",
        )


# --- vocabulary, template, what ends a completion


def vocabulary_of(model: str, config) -> int:
    vocab_size = getattr(config, "vocab_size", None)
    if type(vocab_size) is not int or vocab_size < 1:  # bool is an int
        raise unusable(model, "config.json", f"vocab_size={vocab_size!r} must be at least 1")
    return vocab_size


def check_tokenizer(model: str, tokenizer, vocab_size: int) -> None:
    """UserError if a tokenizer's vocabulary is empty (as when its files are missing) or larger than
    the model's. Special tokens may lie beyond it: Gemma has one for images."""
    try:
        # all letters, digits and signs of ASCII: any vocabulary has some of them
        ids = tokenizer(string.printable, add_special_tokens=False)["input_ids"]
    except Exception as error:  # the tokenizers library, written in Rust, raises kinds of its own
        raise unusable(model, "the tokenizer", error) from None
    if not ids:
        sentence = "it has no token for any letter or digit: is tokenizer.json missing?"
        raise unusable(model, "the tokenizer", sentence)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ordinary = {i: token for token, i in tokenizer.get_vocab().items() if i not in special}
    last = max(ordinary, default=0)
    if last >= vocab_size:
        raise UserError(
            f"model={model!r}: its tokenizer has more tokens than its model: {ordinary[last]!r} is "
            f"number {last}, but config.json has vocab_size={vocab_size}: one of the two files "
            f"belongs to another model"
        )


def choose_template(model: str, tokenizer, chat_template: str, vocab_size: int) -> None:
    """Sets the chat template and tries it. Prints a sentence if the model has none."""
    if chat_template:
        set_chat_template(tokenizer, chat_template)
    elif tokenizer.chat_template:
        check_chat_template(tokenizer, f"model={model!r}: its chat template")
    else:
        say_on_rank_0(
            f"model={model!r} has no chat template: its prompts are plain text "
            f"(a base model; --chat_template gives it one)"
        )
    if "strftime_now" in str(tokenizer.chat_template):
        say_on_rank_0(
            f"warning: model={model!r}: its chat template writes the date into prompts, so a run "
            f"that is resumed on another day gets other prompts; if the template reads a date "
            f"from a variable, set it, as in --chat_template_kwargs.date_string='26 Jul 2024'"
        )
    # tokens that the template or the tokenizer adds to every prompt
    plain = {"system_prompt": "", "chat_template_kwargs": {}}
    text = render_prompt(with_prompt({"id": ""}, "1"), tokenizer, plain)
    ids = tokenizer(text)["input_ids"]
    check_known(ids, tokenizer, vocab_size, f"model={model!r}: every prompt")


def refuse_closed_prompts(model: str, tokenizer, stop_ids: list[int]) -> None:
    """UserError if the tokenizer of a base model appends a token that ends a text to every prompt.
    With a chat template it appends none, see tokenise()."""
    last = tokenise(["1"], tokenizer)[0][-1:]
    if last and last[0] in stop_ids:
        raise UserError(
            f"model={model!r}: its tokenizer ends every prompt with {tokenizer.decode(last)!r}, "
            f"after which there is nothing to complete: remove that from the post_processor in "
            f"tokenizer.json, or give the model a --chat_template"
        )


def stop_token_ids(model: str, tokenizer, config) -> list[int]:
    """The ids of tokens that end a completion: the tokenizer's EOS and those of
    generation_config.json or, without such a file, of a list in config.json. A single number there
    may be no more than the default of its class. config: Hugging Face's."""
    vocab_size = config.vocab_size
    eos = generation_eos(model)
    of_config = getattr(config, "eos_token_id", None)
    if isinstance(of_config, list) and not is_there(model, "generation_config.json"):
        eos = of_config
    ids = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    stop_ids = []
    for i in ids:
        if i is None or i in stop_ids:  # None: one of the two names no token
            continue
        if type(i) is not int or not 0 <= i < vocab_size:
            raise UserError(
                f"model={model!r}: the end-of-sequence token {i!r} of its tokenizer, "
                f"generation_config.json or config.json must be a number from 0 to "
                f"{vocab_size - 1}: the model has no other token, so no completion would ever end"
            )
        stop_ids.append(i)
    if not stop_ids:
        raise UserError(
            f"model={model!r} names no end-of-sequence token, neither in its tokenizer nor in "
            f"generation_config.json: completions would never end"
        )
    return stop_ids


def generation_eos(model: str):
    """eos_token_id of generation_config.json, None without such a file."""
    try:
        return GenerationConfig.from_pretrained(model).eos_token_id
    except OSError as error:
        if not is_there(model, "generation_config.json"):
            return None  # a model need not have one
        raise unusable(model, "generation_config.json", error) from None
    except Exception as error:  # such as a field of another type
        raise unusable(model, "generation_config.json", error) from None


def is_there(model: str, name: str) -> bool:
    """Whether a model's folder, or the local copy of one from the hub, has a file of that name."""
    path = cached_file(
        model,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path is not None


# --- weights


def empty_model(model: str, config):
    """The model that config.json describes, without any memory for its weights."""
    try:
        with torch.device("meta"):  # shapes without storage
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # as in load_part
        raise unusable(model, "config.json", unknown_rope(config) or error) from None


def unknown_rope(config) -> str:
    """A sentence if transformers does not know the type of the model's rotary positions, else "":
    it would say no more than KeyError."""
    rope = getattr(config, "rope_parameters", None) or {}
    known = ["default", *ROPE_INIT_FUNCTIONS]
    for part in (rope, *rope.values()):  # some models have one for each type of layer
        kind = part.get("rope_type", "default") if isinstance(part, dict) else "default"
        if kind not in known:
            return (
                f"config.json has rope_type={quoted(kind)}, which this version of transformers "
                f"does not know; it knows {', '.join(known)}"
            )
    return ""


def has_weights(model: str) -> bool:
    folder = Path(model)
    return any(folder.glob("*.safetensors")) or has_pickles(folder)


def has_pickles(folder: Path) -> bool:
    return any(folder.glob("pytorch_model*.bin")) or any(folder.glob("consolidated*.pth"))


def quantised(config) -> str:
    """A sentence if the model's weights are quantised, else ""."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return ""
    method = settings.get("quant_method", "") if isinstance(settings, dict) else ""
    return (
        f"its weights are quantised ({method or 'quantization_config'}), and quantised weights "
        f"can't be trained: name the model that they were made from"
    )


def check_weights(model: str, config) -> None:
    """UserError if a model's weights can't be loaded, don't match config.json, or are NaN."""
    folder = Path(model)
    if not any(folder.glob("*.safetensors")) and has_pickles(folder):
        sentence = (
            "they are pickled, and a pickle can run code when it is loaded: if you trust it, "
            "convert it with transformers' save_pretrained, which writes model.safetensors"
        )
        raise unusable(model, "its weights", sentence)
    if not has_weights(model) and (folder / "engine").is_dir():
        sentence = (
            f'it is a "shallow" checkpoint, which holds none: make a model of it with '
            f"python checkpoint.py export {model} OUT"
        )
        raise unusable(model, "its weights", sentence)
    try:
        lm, report = AutoModelForCausalLM.from_pretrained(
            model,
            device_map="meta",  # no memory: only names and sizes are compared
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # don't raise: the report has them
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:  # as in load_part
        # for quantised weights transformers advises a package that would not help
        reason = damaged_file(folder) or quantised(config) or unknown_rope(config) or error
        raise unusable(model, "its weights", reason) from None
    refuse_other_weights(model, lm, report)
    # for a hub id: all its files are in one folder of the cache
    for path in weight_files(Path(cached_file(model, "config.json")).parent):
        refuse_nan(model, path)


def refuse_unsupported(model: str, config) -> None:
    """UserError if the model's vocabulary head is more than a matrix, if the rest of the model
    can't be told from it, or if its files hold buffers: tensors that are not parameters, such as
    the routing bias of DeepSeek-V3. Checkpoints and the rollout engine get parameters only."""
    lm = empty_model(model, config)
    check_body(lm)
    if not has_plain_head(lm):
        raise UserError(f"model={model!r} {ODD_HEAD}")
    buffers = dict(lm.named_buffers()).keys() & lm.state_dict().keys()
    if buffers:
        raise UserError(
            f"model={model!r}: {len(buffers)} of its tensors are buffers, not parameters, such as "
            f"{min(buffers)}: checkpoints would lack them, so it can't be trained here"
        )


def damaged_file(folder: Path) -> str:
    """A sentence about the first weight file of a folder that can't be opened; "" if all can."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):  # reads the header and compares it with the file's size
                pass
        except Exception as error:  # SafetensorError, OSError and others
            return (
                f"{path.name} is damaged or can't be read, copy it again: {in_one_line(error, 300)}"
            )
    return ""


def refuse_other_weights(model: str, lm, report: dict) -> None:
    """UserError if the files hold other weights than config.json describes. report: transformers'
    loading info, with the names and sizes that did not match."""
    # sizes differ: the file is another model's, or config.json was edited
    other_sizes = sorted(report["mismatched_keys"])
    if other_sizes:
        name, stored, wanted = other_sizes[0]
        raise UserError(
            f"model={model!r}: {len(other_sizes)} of its weights are of other sizes than "
            f"config.json says, such as {name}, {tuple(stored)} instead of {tuple(wanted)}"
        )
    # weights are missing: a shard is, or config.json has more layers than the files
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"model={model!r}: {len(missing)} weights that config.json asks for are in none of its "
            f"files, such as {missing[0]}: they would be random"
        )
    # unused weights whose names differ from the model's in their layer number only
    kinds = {re.sub(r"\d+", "N", name) for name, _ in lm.named_parameters()}
    unused = sorted(report["unexpected_keys"])
    layers = [name for name in unused if re.sub(r"\d+", "N", name) in kinds]
    if layers:
        raise UserError(
            f"model={model!r}: its files hold {len(layers)} weights of layers that config.json "
            f"does not have, such as {layers[0]}: they would be left out"
        )
    if unused:  # such as a value head
        say_on_rank_0(
            f"warning: model={model!r}: {len(unused)} weights of its files are not part of the "
            f"model and are left out, such as {unused[0]}"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that from_pretrained loads: model.safetensors, or those named in the
    index. A folder may hold others."""
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    names = json.loads(index.read_text())["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def refuse_nan(model: str, path: Path) -> None:
    """UserError if NaN or infinity is among the first SAMPLE values of a tensor. The file is
    mapped, not read as a whole."""
    with safe_open(path, "pt") as file:
        for name in file.keys():
            tensor = file.get_slice(name)[...].flatten()[:SAMPLE]
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                raise UserError(
                    f"model={model!r}: {name} in {path.name} holds values that are no numbers (NaN "
                    f"or infinite): take an earlier checkpoint"
                )


def check_context(model_config, c: dict) -> None:
    """UserError if the model has fewer positions than the longest row needs, or if its rotary
    angles depend on the longest row of a batch. Positions stretched by YaRN and the like are left
    to vLLM to check."""
    limit = getattr(model_config, "max_position_embeddings", None)
    rope = getattr(model_config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or limit
    by_longest = rope.get("rope_type") in ("longrope", "dynamic")
    if by_longest and original and max_sequence_length(c) > original:
        raise UserError(
            f"model={c['model']!r}: beyond {original} tokens its rotary positions "
            f"({rope['rope_type']!r}) depend on the longest row of a batch, so a row's log-probs "
            f"would depend on the others: keep max_prompt_length + max_completion_length within "
            f"that"
        )
    stretched = rope.get("rope_type", "default") != "default"
    # limit None: the model has no limit
    if limit and not stretched and max_sequence_length(c) > limit:
        raise UserError(
            f"max_prompt_length={c['max_prompt_length']} + "
            f"max_completion_length={c['max_completion_length']} is more than the {limit} "
            f"positions of model={c['model']!r}"
        )


# --- what a run reads


class Inputs(NamedTuple):
    """The result of load_inputs()."""

    model_config: object  # Hugging Face's
    tokenizer: object
    stop_ids: list[int]  # the tokens that end a completion
    pools: list[list[dict]]  # training rows of each source of the mixture
    pool_weights: list[float]
    easy: list[dict]  # rows of the easy pool
    reward_functions: list  # scoring.RewardFunction
    eval_rows: list[dict]
    prompts_hash: str  # of the training rows, for checkpoints
    answers_hash: str  # likewise
    # prompts.prompt_keys() of the training rows and of the model's own training; None: unknown
    trained: set[str] | None


def try_formula(c: dict) -> None:
    """UserError if the objective's formula of advantages is missing, or does not give every row a
    finite advantage, both in a group of equal rewards and in one of unequal rewards. Of a branch
    of learner.row_advantages only its absence is told."""
    name = OBJECTIVES[c["objective"]].advantage
    G = c["num_generations"]
    rewards = torch.zeros(2, G)
    rewards[1, 0] = 1.0
    k = round(scheduled(c["pkpo_k"], 0))
    if name == "own":
        try_branch(rewards, c | {"pkpo_k": k})
        return
    if name not in ADVANTAGES:
        raise UserError(
            f"checks.OBJECTIVES: {c['objective']!r} has advantage={name!r}, and loss.ADVANTAGES "
            f'has only {", ".join(ADVANTAGES)}: its formula is missing there ("own" is for a '
            f"branch in learner.row_advantages)"
        )
    tried = f"loss.ADVANTAGES[{name!r}], tried on groups of {G} rewards, all 0 and one of them 1,"
    try:
        advantages = ADVANTAGES[name](rewards, scale_of(c), k)
    except Exception as error:  # a user's formula may raise anything
        raise UserError(
            f"{tried} fails with {error_text(error)}; it gets (rewards, scale, k)"
        ) from None
    if not torch.is_tensor(advantages) or advantages.shape != rewards.shape:
        given = tuple(advantages.shape) if torch.is_tensor(advantages) else quoted(advantages)
        raise UserError(f"{tried} gives {given}, not a tensor of their shape (P, G)")
    if not advantages.isfinite().all():
        raise UserError(
            f"{tried} gives NaN or infinity: groups of equal rewards are usual, and have no spread "
            f"to divide by"
        )


def try_branch(rewards, c: dict) -> None:
    """UserError if learner.row_advantages has no branch for the objective."""
    measured = learner.GroupMeasures(rewards, rewards, lengths=torch.ones_like(rewards))
    try:
        learner.row_advantages(measured, c)
    except UserError:
        raise
    except Exception:  # there is a branch, and it may need what only a run measures
        pass


def try_loss(c: dict) -> None:
    """UserError if the loss of a policy gradient fails on two rows of 3 and 2 tokens: the branch of
    a user's own ratio or sum over tokens is missing, or gives a wrong shape. A branch that reads
    what only a run's batch has is not judged."""
    if not is_policy_gradient(c):
        return
    logps = torch.zeros(2, 3)
    rows = {
        "ids": torch.zeros(2, 4, dtype=torch.long),
        "prompt_lengths": torch.tensor([1, 1]),
        "old_logps": logps,
        "sampler_logps": logps,
        "lengths": torch.tensor([3, 2]),
        "advantages": torch.tensor([1.0, -1.0]),
        "row": torch.arange(2),
    }
    if c["beta"] > 0:
        rows["ref_logps"] = logps
    try:
        learner.token_loss(logps, logps, rows, 0.0, c, {"rows": 2, "tokens": 5})
    except KeyError:  # a tensor that the user adds to the batch
        pass
    except Exception as error:  # a user's formula may raise anything
        raise UserError(
            f"objective={c['objective']!r}: learner.token_loss, tried on two rows of 3 and 2 "
            f"tokens, fails with {error_text(error)}"
        ) from None


def load_inputs(c: dict, ranks: int, dry_run: bool = False) -> Inputs:
    """Loads model files, rows and rewards, and checks them as far as possible without loading
    weights. A dry run does not even download weights."""
    rewards.check_names(c["reward_funcs"])
    try_formula(c)
    try_loss(c)
    check_ranks(c, ranks)
    check_tensor_parallel(c, ranks)
    # "auto" stands for what a job's launcher sets, and a dry run on a login node has none
    if c["rollout_engine"] == "server" and c["rollout_server"] != "auto":
        from server.http import addresses  # here: only runs with servers import server/

        addresses(c["rollout_server"])
    # model and tokenizer
    files = load_model_files(c["model"], c["chat_template"], dry_run)
    end = end_of_turn(files.tokenizer, files.stop_ids)
    if end.startswith("warning") and not dry_run:  # a dry run prints it in show_data()
        say_on_rank_0(end)
    check_context(files.config, c)
    refuse_unsupported(c["model"], files.config)
    check_savable(c["model"], files)
    if c["pack_sequences"]:
        packing.check_window(files.config, max_sequence_length(c))
    try_optimizer(c)

    # rows and the rewards that judge them
    warn_of_seeds(files.tokenizer, c)
    pools, pool_weights = data.training_pools(c, files.tokenizer)
    easy = data.easy_rows(c, files.tokenizer)
    loaded_rows = data.all_rows([*pools, easy])  # evaluation prompts are still among them
    check_prompts(loaded_rows, files)
    functions = rewards.reward_functions(c["reward_funcs"], c["reward_weights"], loaded_rows)
    scoring.check_answers(functions, loaded_rows, data.source_names(c), c)
    warn_without_modes(loaded_rows, c)

    eval_rows = checked_eval_rows(c, files) if holds_out_rows(c) else []
    *pools, easy = data.leave_out_evaluated([*pools, easy], eval_rows, c)
    if warning := leakage_warning(eval_rows, c["model"]):
        say_on_rank_0(warning)
    warn_of_few_prompts([*pools, easy], c)
    train_rows = data.all_rows([*pools, easy])
    return Inputs(
        model_config=files.config,
        tokenizer=files.tokenizer,
        stop_ids=files.stop_ids,
        pools=pools,
        pool_weights=pool_weights,
        easy=easy,
        reward_functions=functions,
        eval_rows=eval_rows if c["eval_steps"] > 0 else [],
        prompts_hash=prompts_hash(train_rows),
        answers_hash=answers_hash(train_rows),
        trained=with_trained(prompt_keys(train_rows), c["model"]),
    )


def check_prompts(rows: list[dict], files: ModelFiles) -> None:
    """UserError if a row's prompt has a token that the model does not know."""
    for row in rows:
        what = f"row {row['id']!r}: its prompt"
        check_known(row["prompt_ids"], files.tokenizer, files.config.vocab_size, what)


def warn_without_modes(rows: list[dict], c: dict) -> None:
    if c["xdr_mode_adaptive_tau"] and not any(tasks.with_modes(row["task"]) for row in rows):
        say_on_rank_0(
            "warning: xdr_mode_adaptive_tau=True: no row is of a task with modes, so tau is the "
            "same for all groups"
        )


def warn_of_few_prompts(pools: list[list[dict]], c: dict) -> None:
    """Warns if a step must take the same prompt several times. pools: the easy one too."""
    count = sum(map(len, pools))
    if count < c["prompts_per_step"]:
        say_on_rank_0(
            f"warning: dataset has {count} prompt(s), fewer than prompts_per_step="
            f"{c['prompts_per_step']}, so a step repeats some: these will be learnt by heart, "
            f"and little for other prompts"
        )


def checked_eval_rows(c: dict, files: ModelFiles) -> list[dict]:
    """eval_rows_of(); UserError if the model does not know their tokens, or the rewards can't read
    their answers."""
    rows = eval_rows_of(c, files.tokenizer)
    check_prompts(rows, files)
    scoring.check_answers(deciding_functions(rows, c), rows, eval_source(c)["name"], c)
    return rows


def eval_rows_of(c: dict, tokenizer) -> list[dict]:
    """The first eval_max_prompts rows of the evaluation data, encoded."""
    source = eval_source(c)
    if source is None:
        raise UserError(
            "dataset is a mixture, which has no evaluation split of its own: name an "
            "eval_dataset, or set eval_steps=0"
        )
    # seed=0: the same rows whatever the run's seed, so that scores can be compared
    rows = data.load_rows(source, seed=0, also=data.more_columns(c))
    return encode_prompts(rows[: c["eval_max_prompts"]], tokenizer, c)


def deciding_functions(rows: list[dict], c: dict) -> list:
    """The reward functions that decide what is correct: those of the first of reward_funcs."""
    return rewards.reward_functions(c["reward_funcs"][:1], [1.0], rows)


# --- dry run


def dry_run(c: dict, ranks: int, deepspeed_config: dict) -> Inputs:
    """Prints what a run of this config would do, and returns what it would start from. What needs
    the model's files or the data comes last, because these may be out of reach."""
    print("config:")
    for key, value in c.items():
        print(f"  {key} = {value!r}")
    P = c["prompts_per_step"]
    per_prompt = completions_per_prompt(c)
    rows = P * per_prompt  # in a step, on all ranks
    print(
        f"\nbatch: {P} prompts x {per_prompt} completions = {rows} rows a step, "
        f"{rows // ranks} on each of {ranks} rank(s), {c['num_iterations']} update(s)"
    )
    # print and check what needs no file before looking for files
    print("deepspeed:", json.dumps(deepspeed_config), flush=True)
    check_writable("output_dir", c["output_dir"], folder=True)
    rollout.check_options(c)

    inputs = load_inputs(c, ranks, dry_run=True)
    show_data(inputs, c)
    lm = empty_model(c["model"], inputs.model_config)
    if c["lora_rank"]:
        print(add_adapters(lm, c["lora_rank"], base=c["model"]))
    show_memory(c, inputs.model_config, count_parameters(lm), ranks)
    vocabulary = inputs.model_config.vocab_size
    known = with_tau(c, vocabulary)
    if known != c and USED["maxent_tau"](OBJECTIVES[c["objective"]], c):
        print(f"maxent_tau = {known['maxent_tau']:.3g}, for {vocabulary} tokens")
    for warning in warn_config(known, vocabulary, default_config()):
        print(f"warning: {warning}")
    return inputs


def show_data(inputs: Inputs, c: dict) -> None:
    """Prints how much data there is, what a prompt looks like and what ends a completion."""
    tokenizer = inputs.tokenizer
    count = sum(map(len, inputs.pools))
    passes = c["max_steps"] * c["prompts_per_step"] / count
    print(f"data: {count} prompts, {passes:.2f} passes over them in {c['max_steps']} steps")
    ends = ", ".join(f"{i} {tokenizer.decode([i])!r}" for i in inputs.stop_ids)
    print(f"a completion ends with: {ends}; {end_of_turn(tokenizer, inputs.stop_ids)}")
    first = inputs.pools[0][0]
    ids = first["prompt_ids"]
    print(f"first prompt ({len(ids)} tokens): {tokenizer.decode(ids)!r}")
    print(f"its answer: {quoted(first['answer'])}")


# --- memory


def completions_per_rank(c: dict, ranks: int) -> int:
    """Completions that one rank learns from in a step."""
    return c["prompts_per_step"] // ranks * completions_per_prompt(c)


def tokens_at_once(c: dict, ranks: int) -> int:
    """Most tokens that a micro-batch can have: at least the longest row, because no row is cut, and
    at most all rows of the rank."""
    limit = max(c["max_tokens_per_micro_batch"], max_sequence_length(c))
    return min(limit, completions_per_rank(c, ranks) * max_sequence_length(c))


def fitting_tokens(c: dict, model_config, parameters, ranks: int) -> int:
    """What max_tokens_per_micro_batch=0 stands for: the largest power of two between FEWEST_TOKENS
    and the upper bounds for which the memory estimate is at most MEMORY_SHARE of a rank's memory.
    model_config: Hugging Face's; parameters: policy.ParameterCounts."""
    tokens = MOST_TOKENS
    if not torch.cuda.is_available():
        while tokens * model_config.hidden_size > MOST_VALUES_ON_CPU:
            tokens //= 2
    while tokens > FEWEST_TOKENS:
        trial = c | {"max_tokens_per_micro_batch": tokens}
        table = memory_estimate(trial, model_config, parameters, ranks)
        if on_device(table) <= MEMORY_SHARE * device_memory():
            break
        tokens //= 2
    return max(tokens, FEWEST_TOKENS)


def device_memory() -> int:
    """Bytes of a rank's GPU memory; without a GPU, of its share of the main memory."""
    if not torch.cuda.is_available():
        return rank_memory()
    return rollout.device_bytes(from_launcher("LOCAL_RANK", 0))


def on_device(table: dict) -> float:
    """Bytes of an estimate in the memory that device_memory() measures."""
    everything = not torch.cuda.is_available()
    return sum(size for what, size in table.items() if everything or IN_CPU_MEMORY not in what)


def show_memory(c: dict, model_config, parameters, ranks: int) -> None:
    """Prints the estimate of a rank's memory as a table. model_config: Hugging Face's;
    parameters: policy.ParameterCounts."""
    tokens = c["max_tokens_per_micro_batch"] or fitting_tokens(c, model_config, parameters, ranks)
    c = c | {"max_tokens_per_micro_batch": tokens}
    longest = max_sequence_length(c)
    # max: rows are not cut, so a micro-batch holds at least one row
    micro_batches = math.ceil(completions_per_rank(c, ranks) / max(1, tokens // longest))
    print(
        f"learning: at most {max(tokens, longest)} tokens in a micro-batch; {micro_batches} "
        f"micro-batches if every row had all {longest} tokens and no prompt was shared"
    )
    dtype = dtype_of(c)
    name = str(dtype).removeprefix("torch.")
    table = memory_estimate(c, model_config, parameters, ranks)
    together = on_device(table)
    print(f"memory per rank, estimated, {parameters.all / 1e6:.1f}M parameters in {name}:")
    table[f"together, of {memory_text(device_memory())}"] = together
    table["of weights on every rank while it loads"] = parameters.all * dtype.itemsize
    for what, size in table.items():
        print(f"  {memory_text(size):>12}  {what}")
    if together > device_memory():
        print(f"warning: that is more than there is: {LESS_MEMORY}")


def memory_estimate(c: dict, model_config, parameters, ranks: int) -> dict:
    """{what: bytes} of memory on each rank during the backward of a micro-batch. model_config:
    Hugging Face's; parameters: policy.ParameterCounts."""
    itemsize = dtype_of(c).itemsize
    weights = parameters.all * itemsize
    optimizer = parameters.trained * state_bytes(c, itemsize)
    place = IN_CPU_MEMORY if c["offload_optimizer"] else ""
    # with adapters the reference is the policy with adapters off
    reference = 0 if c["beta"] == 0 or c["lora_rank"] else weights
    if c["reference_placement"] == "sharded":  # ZeRO-3; "cpu" is on the device while it scores
        reference /= ranks
    # GPT-2's config does not give the width of its feed-forward layers
    inner = getattr(model_config, "intermediate_size", None) or 4 * model_config.hidden_size
    hidden = model_config.hidden_size
    layers = model_config.num_hidden_layers
    # kept for the backward, per token (LOG.md, 2026-11-22)
    kept = layers * (18 * hidden + 4 * inner)
    if c["gradient_checkpointing"]:  # what went into each layer; layers are recomputed one by one
        kept = layers * hidden + (18 * hidden + 4 * inner)
    tokens = tokens_at_once(c, ranks)

    def share(stage: int) -> int:
        """The number of ranks that share what ZeRO shards from this stage on."""
        return ranks if c["zero_stage"] >= stage else 1

    table = {
        "libraries": CUDA_LIBRARIES if torch.cuda.is_available() else LIBRARIES,
        "weights": weights / share(3),
        "weights gathered from other ranks": gathered_bytes(c, parameters, itemsize, ranks),
        "gradients": parameters.trained * itemsize / share(2),
        "gradients under way between ranks": bucket_bytes(c, parameters, itemsize, ranks),
        "optimizer" + place: optimizer / share(1),
        "reference": reference,
        "activations of a micro-batch": tokens * kept * itemsize,
        "vocabulary logits": head_bytes(model_config, tokens, c["lora_rank"] == 0),
    }
    return table | engine_bytes(c, model_config, weights, ranks)


def bucket_bytes(c: dict, parameters, itemsize: int, ranks: int) -> int:
    """Bytes of the buffer into which DeepSpeed copies gradients before it reduces them over ranks,
    reduce_bucket_size at a time."""
    if c["zero_stage"] > 0 and torch.cuda.is_available():
        return BUCKET * itemsize  # allocated whole, even for a smaller model
    if c["zero_stage"] > 0 or ranks > 1:
        return min(parameters.trained, BUCKET) * itemsize
    return 0


def gathered_bytes(c: dict, parameters, itemsize: int, ranks: int) -> int:
    """Bytes of whole weights that ZeRO 3 holds on a rank besides its own part of all weights."""
    if c["zero_stage"] < 3 or ranks == 1:
        return 0
    return min(parameters.all, LIVE) * itemsize


def head_bytes(model_config, tokens: int, trains: bool) -> int:
    """Bytes that loss.token_logps takes: float32 tensors (chunk, vocabulary), the gradient of the
    head if the head trains, and on a CPU the softmaxes that are kept for the backward. On a GPU as
    many are kept as there is room for, so they are not counted."""
    V = model_config.vocab_size
    gradient = 4 * V * model_config.hidden_size if trains else 0
    if torch.cuda.is_available():
        # compiled: fewer tensors; 2 gradients: a chunk's is added to the sum
        return 2 * 4 * CHUNK * V + 2 * gradient
    return 4 * 4 * CPU_CHUNK * V + gradient + min(KEPT_BYTES, 4 * tokens * V)


def engine_bytes(c: dict, model_config, weights: int, ranks: int) -> dict:
    """{what: bytes} that the rollout engine holds while the policy learns."""
    if c["rollout_engine"] == "server":
        return {}
    if c["rollout_engine"] == "hf":  # see HfEngine.sync
        shares = c["zero_stage"] < 3 and not c["lora_rank"]
        return {"rollout engine's weights": 0 if shares else weights}
    share = entries(c, "vllm_options")["tensor_parallel_size"]
    if torch.cuda.is_available():  # a sleeping engine has freed its cache
        size = weights / share
        sleeps = entries(c, "vllm_options")["enable_sleep_mode"]
        goes = sleeps and not rollout.stays_on_gpu(size, device_memory())
        return {"rollout engine's weights": 0 if goes else size}
    rows = rollout.rows_at_once(c, max(1, ranks // share), rollout.VLLM_ROWS)
    # on a CPU vLLM keeps a second, packed copy of all matrices except the embedding
    embedding = model_config.vocab_size * model_config.hidden_size * dtype_of(c).itemsize
    return {
        "rollout engine's weights": max(weights, 2 * weights - embedding) / share,
        "rollout engine's cache": rollout.plan_cache(c, model_config, rows).size,
    }
