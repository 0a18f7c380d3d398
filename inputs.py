"""What a run reads before it loads any weights, and everything about it that can be wrong; --dry_run=True reads it, says what would run, and stops.

inputs = load_inputs(config, world)
dry_run(config, world, dtype, deepspeed_config)
"""

import json
import math
from typing import NamedTuple

import torch

import data
import evaluate
import packing
import rewards as R
from checks import rows_of_a_group, warn_config
from common import UserError, check_writable
from model_files import empty_model, load_model_files
from prompts import check_context, end_of_turn
from ranks import check_tensor_parallel


class Inputs(NamedTuple):
    """What a run reads before it loads any weights."""

    model: object  # the model's config
    tokenizer: object
    stop_ids: list[int]
    sources: list[list[dict]]  # training rows of every source of the mixture
    weights: list[float]
    easy: list[dict]  # rows of the easy pool
    columns: list  # rewards.Column
    eval_rows: list[dict]


def load_inputs(c: dict, world: int) -> Inputs:
    """All that can be wrong before weights are loaded."""
    R.check_names(c["reward_funcs"])
    if c["prompts_per_step"] % world:
        raise UserError(
            f"prompts_per_step={c['prompts_per_step']} must be a multiple of the number of ranks, {world}"
        )
    check_tensor_parallel(c, world)
    model_config, tokenizer, stop_ids = load_model_files(
        c["model"], c["chat_template"], c["dry_run"]
    )
    check_context(model_config, c["model"], c["max_prompt_length"], c["max_completion_length"])
    if c["pack_sequences"]:
        packing.check_window(model_config, c["max_prompt_length"] + c["max_completion_length"])
    sources, weights = data.training_sources(c, tokenizer)
    easy = data.easy_rows(c, tokenizer)
    rows = [row for source in (*sources, easy) for row in source]
    columns = R.columns_of(c["reward_funcs"], c["reward_weights"], rows)
    R.check_answers(columns, rows, c["dataset_name"] or "dataset_mixture", c)
    eval_rows = evaluate.load_eval_rows(c, tokenizer) if c["eval_steps"] > 0 else []
    data.refuse_leakage(rows, eval_rows, c["allow_leakage"])
    return Inputs(
        model_config,
        tokenizer,
        stop_ids,
        sources,
        weights,
        easy,
        columns,
        eval_rows,
    )


def dry_run(c: dict, world: int, dtype: torch.dtype, deepspeed_config: dict) -> None:
    """Prints what a run of this config would do. What needs the model's files or the data comes last, they may be out of reach."""
    N, longest = (
        c["prompts_per_step"] * rows_of_a_group(c),
        c["max_prompt_length"] + c["max_completion_length"],
    )
    tokens, size = c["max_tokens_per_micro_batch"], dtype.itemsize
    print("config:", *(f"  {key} = {value!r}" for key, value in c.items()), sep="\n")
    print(
        f"\nbatch: {c['prompts_per_step']} prompts x {rows_of_a_group(c)} completions = {N} rows a step, {N // world} on each of {world} rank(s), "
        f"{c['num_iterations']} update(s); if every row had all {longest} tokens: {math.ceil(N // world * longest / tokens)} micro-batches of {tokens}"
    )
    print("deepspeed:", json.dumps(deepspeed_config), flush=True)
    check_writable("output_dir", c["output_dir"], folder=True)

    inputs = load_inputs(c, world)
    model, tokenizer, rows = (
        inputs.model,
        inputs.tokenizer,
        [row for source in inputs.sources for row in source],
    )
    n = sum(p.numel() for p in empty_model(c["model"], model).parameters())
    share = [
        world if c["zero_stage"] >= stage else 1 for stage in range(4)
    ]  # ranks that split what a ZeRO stage splits
    layers = 1 if c["gradient_checkpointing"] else model.num_hidden_layers
    inner = (
        getattr(model, "intermediate_size", None) or 4 * model.hidden_size
    )  # GPT-2 has no name for it
    gib = {
        "weights": n * size / share[3],
        "gradients": n * size / share[2],
        "optimizer" + (" (in CPU memory)" if c["offload_optimizer"] else ""): n
        * (12 if size == 2 else 8)
        / share[1],
        "reference": 0
        if c["beta"] == 0
        else n * size / (world if c["reference_placement"] == "sharded" else 1),
        "rollout engine's weights": n * size / c["vllm_tensor_parallel_size"],
        "activations of a micro-batch": tokens
        * layers
        * (18 * model.hidden_size + 4 * inner)
        * size,
        "vocabulary logits of a chunk": 4 * 4 * c["logprob_chunk_size"] * model.vocab_size,
    }
    print(
        f"data: {len(rows)} prompts, {c['max_steps'] * c['prompts_per_step'] / len(rows):.2f} passes over them in {c['max_steps']} steps"
    )
    print(
        f"a completion ends with: {', '.join(f'{i} {tokenizer.decode([i])!r}' for i in inputs.stop_ids)}; {end_of_turn(tokenizer, inputs.stop_ids)}"
    )
    print(
        f"first prompt ({len(rows[0]['prompt_ids'])} tokens): {tokenizer.decode(rows[0]['prompt_ids'])!r}"
    )
    print(
        f"memory per rank, estimated, {n / 1e6:.1f}M parameters in {str(dtype).removeprefix('torch.')}:"
    )
    print(*(f"  {value / 2**30:8.2f} GiB  {what}" for what, value in gib.items()), sep="\n")
    print(
        f"  {sum(gib.values()) / 2**30:8.2f} GiB  together (vLLM's KV cache comes on top)",
        f"  {n * size / 2**30:8.2f} GiB  of weights on every rank while it loads",
        *(f"warning: {warning}" for warning in warn_config(c, model.vocab_size)),
        sep="\n",
    )
