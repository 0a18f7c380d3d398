"""Supervised warm start: trains a causal LM on demonstrations, any of a row's "solutions" each time, until it answers well enough for RL.

    torchrun --standalone --nproc_per_node 2 sft.py config/countdown_tiny.py --model=tiny --output_dir=runs/countdown_sft
    python sft.py config/countdown_0.5b.py --output_dir=runs/warm --steps=200

model="tiny" first builds, without any download, a character-level tokenizer with a chat template and a Qwen2 of about 1M
parameters with random weights. Otherwise any Hugging Face model. The result is a Hugging Face folder.
"""

from checks import FLAGS
from common import load_with_flags, script

# A wrong config is told here, at once: the imports that follow take ten seconds.
if __name__ == "__main__":
    own, config = script(lambda argv: load_with_flags(argv, FLAGS["sft"]))

import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

import data
import packing
import rollout
from common import UserError, progress
from journal import hold_folder, is_empty
from policy import CHUNK, Policy
from preflight import load_model_files
from prompts import seed_prompts
from ranks import across_ranks, start_distributed

SEEDED = 0.6
CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + ('<|end|>' if m['role'] == 'assistant' else '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer() -> Qwen2Tokenizer:
    """One token per printable ASCII character, four for the turns of a chat; other characters are left out.
    A Qwen2Tokenizer without merges, because AutoTokenizer loads that class beside a Qwen2 model whatever was saved there:
    another class would come back as one that loses every space."""
    special = ["<|end|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>"]
    byte_level = [
        {" ": "\u0120", "\n": "\u010a"}.get(character, character) for character in CHARACTERS
    ]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(special + byte_level)},
        merges=[],
        eos_token="<|end|>",
        pad_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=special[2:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(
    vocab_size: int,
    seed: int,
    layers: int = 4,
    width: int = 128,
    tied: bool = True,
    positions: int = 1024,
) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights, 0.8M parameters by default."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            tie_word_embeddings=tied,
            rope_theta=10000.0,
            eos_token_id=0,
            pad_token_id=0,
            bos_token_id=None,
        )
    )


def demonstrations(rows: list[dict], tokenizer, c: dict) -> list[tuple[list, list]]:
    """Per row with "solutions" its ([{"prompt_ids", "completion_ids"}, ...], [prompt ids with seed 0, 1, ... if InfoSeed is on]), EOS included;
    solutions over max_completion_length are left out, with a printed count."""
    given = [row.get("solutions") or [] for row in rows]
    texts = [text for solutions in given for text in solutions]
    if not texts:
        raise UserError('dataset: none of its rows has "solutions", a list of texts to learn from')
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    groups = [
        [
            {
                "prompt_ids": row["prompt_ids"],
                "completion_ids": [*next(encoded), tokenizer.eos_token_id],
                "logprobs": [],
            }
            for _ in solutions
        ]
        for row, solutions in zip(rows, given)
    ]
    short = [
        [pair for pair in group if len(pair["completion_ids"]) <= c["max_completion_length"]]
        for group in groups
    ]
    if left_out := len(texts) - sum(map(len, short)):
        sentence = f"max_completion_length={c['max_completion_length']}: {left_out} of {len(texts)} solutions are longer"
        if left_out == len(texts):
            raise UserError(f"{sentence}: nothing is left to learn from")
        print(f"{sentence} and are left out")
    return [
        (group, seed_prompts(row, tokenizer, c) if c["info_seed_num_seeds"] else [])
        for row, group in zip(rows, short)
        if group
    ]


def sft_batch(groups: list, step: int, size: int, seed: int, rank: int, world: int, device) -> dict:
    """This rank's share of the step's demonstrations: rows drawn with replacement, then one of the solutions of each."""
    rng = random.Random(f"sft/{seed}/{step}")
    chosen = [demonstration(*rng.choice(groups), rng) for _ in range(size)]
    return rollout.to_batch(chosen[rank::world], device)


def demonstration(group: list[dict], seed_prompts: list, rng) -> dict:
    """One of a row's demonstrations. Half of those of a row with seeds are asked with a seed, which SEEDED of the time picks its share of the
    sorted solutions: the model then reads the seed and reacts to it a little, without which InfoSeed has nothing to amplify."""
    if not seed_prompts or rng.random() < 0.5:
        return rng.choice(group)
    z = rng.randrange(len(seed_prompts))
    own = sorted(group, key=lambda pair: pair["completion_ids"])[
        int((z + rng.random()) / len(seed_prompts) * len(group))
    ]
    return (own if rng.random() < SEEDED else rng.choice(group)) | {"prompt_ids": seed_prompts[z]}


def save(folder: Path, lm, tokenizer, config: dict, loss: float, seconds: float) -> None:
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "sft.json").write_text(
        json.dumps({"config": config, "loss": loss, "seconds": seconds}, indent=1)
    )
    print(f"saved {folder}, loss {loss:.3f} nats a token, {seconds:.0f} s")


def main(c: dict, own: dict = FLAGS["sft"]) -> None:
    with hold_folder(c["output_dir"], rank=int(os.environ.get("RANK", 0))):
        train(c, **own)


def train(c: dict, steps: int, batch_size: int, learning_rate: float) -> None:
    """The warm start, into a folder that nobody else writes to."""
    folder = Path(c["output_dir"])
    if not is_empty(folder):
        raise UserError(
            f"output_dir={c['output_dir']!r} is not empty: choose another --output_dir or remove it"
        )
    if steps < 1 or not 0 < learning_rate <= 1e30:
        raise UserError(f"--steps={steps} and --learning_rate={learning_rate} must be above 0")
    if batch_size < (world := int(os.environ.get("WORLD_SIZE", 1))):
        raise UserError(f"--batch_size={batch_size} must be at least the number of ranks, {world}")
    if c["model"] == "tiny":
        tokenizer = tiny_tokenizer()
        lm = tiny_model(len(tokenizer), c["seed"])
    else:
        tokenizer = load_model_files(c["model"], c["chat_template"]).tokenizer
        lm = AutoModelForCausalLM.from_pretrained(c["model"], dtype=torch.float32)
    if c["pack_sequences"]:
        packing.check_window(lm.config, c["max_prompt_length"] + c["max_completion_length"])
    groups = demonstrations(
        [row for source in data.training_sources(c, tokenizer)[0] for row in source], tokenizer, c
    )
    rank, world, device = start_distributed()
    policy = DistributedDataParallel(Policy(lm.to(device), 1.0, CHUNK, pack=c["pack_sequences"]))
    if rank == 0:
        print(
            f"{len(groups)} problems, {sum(p.numel() for p in lm.parameters()) / 1e6:.2f}M parameters; the first: "
            f"{tokenizer.decode(groups[0][0][0]['prompt_ids'] + groups[0][0][0]['completion_ids'])!r}"
        )
    if device.type == "cuda":  # a warm start need not be exact, and float32 is 5 to 8 times slower
        torch.set_float32_matmul_precision("high")
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        fused=device.type == "cuda",
    )
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, (steps - s) / (steps - warmup + 1))
    )
    bar, started = (
        progress(total=steps, disable=rank > 0, unit="step"),
        time.perf_counter(),
    )
    for step in range(steps):
        batch = sft_batch(groups, step, batch_size, c["seed"], rank, world, device)
        logps, _ = policy(
            batch["ids"], batch["prompt_lengths"], batch["lengths"], want_entropy=False
        )  # (n, T)
        tokens = across_ranks(batch["lengths"].sum().cpu()).item()
        loss = (
            -logps.sum() / tokens * world
        )  # DistributedDataParallel averages over ranks what is meant to be a sum
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        bar.update()
    bar.close()
    if rank == 0:
        save(folder, lm, tokenizer, c, loss.item(), time.perf_counter() - started)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    script(main, config, own)
