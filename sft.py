"""Supervised warm start: trains a causal LM on demonstrations, so that RL begins with some right
answers. Demonstrations are drawn from the "solutions" of the dataset's rows.

    torchrun --standalone --nproc_per_node 2 sft.py config/countdown_tiny.py --model=tiny \\
        --output_dir=runs/countdown_sft --steps=800 --batch_size=128 --learning_rate=2e-3
    python sft.py config/countdown_0.5b.py --output_dir=runs/warm --steps=200

model="tiny" builds, without any download, a character-level tokenizer with a chat template and a
Qwen2 of 0.8M parameters with random weights. Any Hugging Face model works as well. The result
is a Hugging Face folder. The weights of a mixture are ignored: all of its problems are drawn with
the same probability. Keys that say how RL trains (dtype, optimizer, zero_stage, ...) are ignored
too: sft.py uses AdamW in float32 and a single forward pass for a rank's share of --batch_size.
"""

from checks import FLAGS, INSTEAD, holds_out_rows, max_sequence_length
from common import launched_rank, launched_ranks, load_with_flags, script

# Read the config before the other imports: they take ten seconds, and a wrong config is reported
# at once.
if __name__ == "__main__":
    own, config = script(lambda argv: load_with_flags(argv, FLAGS["sft"], INSTEAD["sft"]))

import json
import random
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

import data
import packing
import rollout
from checkpoint import stops_if_unwritten
from common import RunStopped, UserError, progress, quoted, say_on_rank_0
from journal import hold_folder, is_empty
from policy import Policy, make_trainable, set_stop_tokens
from preflight import check_context, check_savable, eval_rows_of, load_checked_files
from prompts import (
    check_known,
    hash_of,
    prompt_keys,
    seed_prompts,
    token_ids,
    warn_of_unknown,
    with_trained,
    write_trained,
)
from ranks import World, across_ranks, check_alike, leave_together, start_distributed

# Share of the demonstrations with a seed in the prompt whose solution depends on that seed.
# With 0.3 or 0 InfoSeed found nothing to amplify: LOG.md, 2026-11-21, "InfoSeed on Countdown"
SEEDED = 0.6
# printable ASCII, space to tilde, and the newline
CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
# only the assistant's turn ends with <|end|>, because that is the token that ends a completion
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + ('<|end|>' if m['role'] "
    "== 'assistant' else '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer with one token for each printable ASCII character and the newline, and special
    tokens for the turns of a chat. Other characters are dropped.

    It is a Qwen2Tokenizer without merges, because AutoTokenizer loads that class for a Qwen2 model,
    whatever was saved: a tokenizer of another class would lose every space when loaded."""
    special = ["<|end|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>"]
    # Qwen2's byte-level BPE writes a space as U+0120 and a newline as U+010A
    byte_level = [
        {" ": "\u0120", "\n": "\u010a"}.get(character, character) for character in CHARACTERS
    ]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(special + byte_level)},
        merges=[],  # so every character stays a token
        eos_token="<|end|>",
        # may equal the EOS: masks come from lengths, never from this id
        pad_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=special[2:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE  # saved with the tokenizer
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
            num_key_value_heads=2,  # grouped-query attention, as Qwen2 has it
            max_position_embeddings=positions,
            tie_word_embeddings=tied,
            rope_theta=10000.0,
            eos_token_id=0,  # <|end|>, the first of tiny_tokenizer()'s special tokens
            pad_token_id=0,
            bos_token_id=None,
        )
    )


def demonstrations(rows: list[dict], tokenizer, c: dict) -> list[tuple[list, list]]:
    """A pair (demonstrations, seeded prompts) for each row with "solutions".

    A demonstration is {"prompt_ids", "completion_ids", "logprobs"}, EOS included. The seeded
    prompts are the token ids of the row's prompt with each InfoSeed seed; [] if InfoSeed is off.
    Solutions without a token or longer than max_completion_length are left out, and their number is
    printed."""
    check_solutions(rows)
    texts = [text for row in rows for text in row.get("solutions") or []]
    if not texts:
        raise UserError(
            'dataset: none of its rows has "solutions", a list of texts to learn from: in a .jsonl '
            'file a line would be {"prompt": "1 + 1?", "answer": 2, "solutions": ["It is 2."]}'
        )
    warn_of_unknown(texts, tokenizer, "solutions")
    limit = c["max_completion_length"]
    # many texts at once are faster; next(encoded) below takes them in the same order
    encoded = iter(token_ids(texts, tokenizer, special=False))
    groups, taken = [], 0
    for row in rows:
        group = []
        for _ in row.get("solutions") or []:
            ids = [*next(encoded), tokenizer.eos_token_id]
            if 1 < len(ids) <= limit:
                # logprobs: to_batch() needs the entry, which is empty: nothing was sampled
                demo = {"prompt_ids": row["prompt_ids"], "completion_ids": ids, "logprobs": []}
                group.append(demo)
        taken += len(group)
        if group:
            seeded = seed_prompts(row, tokenizer, c) if c["info_seed_num_seeds"] else []
            groups.append((group, seeded))
    if taken < len(texts):
        count = f"{len(texts) - taken} of {len(texts)}"
        sentence = f"max_completion_length={limit}: {count} solutions are empty or longer"
        if not taken:
            raise UserError(f"{sentence}: nothing is left to learn from")
        say_on_rank_0(f"{sentence}, and are left out")
    return groups


def check_solutions(rows: list[dict]) -> None:
    """UserError for a row whose "solutions" are not texts."""
    for row in rows:
        solutions = row.get("solutions")
        if solutions is None:
            continue
        if not isinstance(solutions, list) or not all(isinstance(text, str) for text in solutions):
            raise UserError(
                f"dataset: row {row['id']!r}: 'solutions' must be a list of texts, not "
                f"{quoted(solutions)}"
            )


def check_demonstrations(groups: list, tokenizer, vocab_size: int) -> None:
    """UserError if a demonstration has a token that the model does not know. groups: the result of
    demonstrations()."""
    for group, _ in groups:
        for demo in group:
            ids = demo["prompt_ids"] + demo["completion_ids"]
            check_known(ids, tokenizer, vocab_size, "a prompt or a solution")


def sft_batch(groups: list, step: int, size: int, seed: int, world: World) -> dict:
    """This rank's share of a step's demonstrations: `size` rows are drawn with replacement, and one
    solution from each."""
    # all ranks draw the same whole batch, and each keeps every world.size-th demonstration, so the
    # batch does not depend on the number of ranks
    rng = random.Random(f"sft/{seed}/{step}")
    chosen = [demonstration(*rng.choice(groups), rng) for _ in range(size)]
    return rollout.to_batch(chosen[world.rank :: world.size], world.device)


def demonstration(group: list[dict], seeded: list, rng) -> dict:
    """One of a row's demonstrations.

    If the row has seeded prompts, half of its demonstrations get one of them as their prompt. Then
    the solution is drawn, with probability SEEDED, from the seed's own share of the sorted
    solutions, else from all of them. So the model learns to react to the seed a little; otherwise
    InfoSeed would have nothing to amplify."""
    if not seeded or rng.random() < 0.5:
        return rng.choice(group)
    # seeds divide the sorted solutions into equal shares, which overlap if solutions are few
    z = rng.randrange(len(seeded))
    ordered = sorted(group, key=lambda demo: demo["completion_ids"])
    i = int((z + rng.random()) / len(seeded) * len(group))  # in z's share
    chosen = ordered[i] if rng.random() < SEEDED else rng.choice(group)
    return chosen | {"prompt_ids": seeded[z]}


def save(folder: Path, lm, tokenizer, trained: set[str] | None, record: dict) -> None:
    """Saves the model, prompts.prompt_keys() of what it was trained on, and sft.json: `record`."""
    with stops_if_unwritten(folder, "make room and remove that folder"):
        lm.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_trained(folder, trained)
        (folder / "sft.json").write_text(json.dumps(record, indent=1))
    print(f"saved {folder}, loss {record['loss']:.3f} nats a token, {record['seconds']:.0f} s")


def main(c: dict, own: dict = FLAGS["sft"]) -> None:
    # from torchrun's variables, because the process group does not exist yet
    with hold_folder(c["output_dir"], rank=launched_rank()):
        # only now that we hold the folder: before, another process could fill it after the check
        check(c, own, launched_ranks())
        lm, tokenizer = load_model(c)
        pools, _ = data.training_pools(c, tokenizer)
        if holds_out_rows(c):  # sft.py does not evaluate, but must not learn the answers either
            held_out = eval_rows_of(c, tokenizer)
            pools = data.leave_out_evaluated(pools, held_out, c)
        rows = data.all_rows(pools)
        groups = demonstrations(rows, tokenizer, c)
        check_demonstrations(groups, tokenizer, lm.config.vocab_size)
        trained = prompt_keys([row for row in rows if row.get("solutions")])
        if c["model"] != "tiny":  # "tiny" is not a folder
            trained = with_trained(trained, c["model"])
        train(c, own, lm, tokenizer, groups, trained)


def check(c: dict, own: dict, ranks: int) -> None:
    """UserError for what can be seen to be wrong before anything is loaded."""
    if not is_empty(Path(c["output_dir"])):
        raise UserError(
            f"output_dir={c['output_dir']!r} is not empty, and sft.py never replaces a folder: "
            f"choose another --output_dir or remove it"
        )
    if c["lora_rank"]:
        raise UserError(
            f"lora_rank={c['lora_rank']}: sft.py trains all weights, not adapters; set "
            f"--lora_rank=0 here"
        )
    if c["model"] == "tiny" and c["chat_template"]:
        raise UserError("model='tiny' brings its own chat template: leave out chat_template")
    steps = own["steps"]
    learning_rate = own["learning_rate"]
    # this refuses NaN and infinity too
    if steps < 1 or not 0 < learning_rate <= 1e30:
        raise UserError(
            f"--steps={steps} and --learning_rate={learning_rate} must be above 0, "
            "and the rate at most 1e30"
        )
    # every rank needs at least one row
    if own["batch_size"] < ranks:
        raise UserError(
            f"--batch_size={own['batch_size']} must be at least the number of ranks, {ranks}"
        )


def load_model(c: dict) -> tuple:
    """The language model in float32, random for "tiny", and its tokenizer."""
    if c["model"] == "tiny":
        tokenizer = tiny_tokenizer()
        lm = tiny_model(len(tokenizer), c["seed"])
        check_context(lm.config, c)  # train.py would refuse the result
    else:
        files = load_checked_files(c)
        check_savable(c["model"], files)
        tokenizer = files.tokenizer
        if tokenizer.eos_token_id is None:  # only generation_config.json names one
            tokenizer.eos_token_id = files.stop_ids[0]
        lm = AutoModelForCausalLM.from_pretrained(
            c["model"], dtype=torch.float32, trust_remote_code=False
        )
        if warning := make_trainable(lm, c["model"]):
            say_on_rank_0(warning)
        set_stop_tokens(lm, files.stop_ids)
    if c["pack_sequences"]:
        packing.check_window(lm.config, max_sequence_length(c))
    return lm, tokenizer


def make_optimizer(policy, steps: int, learning_rate: float) -> tuple:
    """AdamW and its schedule: a warm-up over a twentieth of the steps, then a linear fall to 0."""
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        fused=True,  # one kernel for all parameters
    )
    warmup = max(1, steps // 20)

    def share_of_peak(step: int) -> float:
        # step counts from 0; + 1 and steps - step keep the first and the last rate above 0
        return min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak)


def train(c: dict, own: dict, lm, tokenizer, groups: list, trained: set[str] | None) -> None:
    """Trains on all ranks together; rank 0 saves the model to output_dir. trained: see save()."""
    world = start_distributed()
    demonstrations_hash = hash_of(json.dumps(group).encode() for group in groups)
    check_alike(c | own | {"hash of the demonstrations": demonstrations_hash})
    device = world.device
    # temperature 1: the demonstrations were not sampled at the config's temperature
    policy = DistributedDataParallel(Policy(lm.to(device), 1.0, pack=c["pack_sequences"]))
    if world.rank == 0:
        millions = sum(p.numel() for p in lm.parameters()) / 1e6
        first = groups[0][0][0]
        text = tokenizer.decode(first["prompt_ids"] + first["completion_ids"])
        print(f"{len(groups)} problems, {millions:.2f}M parameters; the first: {text!r}")
    if device.type == "cuda":  # TF32, 5 to 8 times faster: a warm start need not be exact
        torch.set_float32_matmul_precision("high")
    optimizer, schedule = make_optimizer(policy, own["steps"], own["learning_rate"])
    bar = progress(total=own["steps"], disable=world.rank > 0, unit="step")
    started = time.perf_counter()
    for step in range(own["steps"]):
        batch = sft_batch(groups, step, own["batch_size"], c["seed"], world)
        # after a completion's end its log-probs are 0, so a plain sum is right
        logps, _ = policy(  # (n, T)
            batch["ids"], batch["prompt_lengths"], batch["lengths"], want_entropy=False
        )
        # the number of tokens on all ranks, so that every token of the batch has the same weight
        sums = torch.stack([logps.detach().sum(), batch["lengths"].sum()]).double()
        total_logp, tokens = across_ranks(sums).tolist()
        # * world.size: DistributedDataParallel averages gradients over ranks; we want their sum
        loss = -logps.sum() / tokens * world.size
        loss.backward()
        # all ranks have the same gradients now, and so the same norm
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        if not norm.isfinite():
            raise RunStopped(
                f"step {step + 1}: the gradient is not finite; lower "
                f"--learning_rate={own['learning_rate']}"
            )
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix_str(f"loss {-total_logp / tokens:.3f}", refresh=False)
        bar.update()
    bar.close()
    if world.rank == 0:
        seconds = time.perf_counter() - started
        record = {"config": c, "loss": -total_logp / tokens, "seconds": seconds}
        save(Path(c["output_dir"]), lm, tokenizer, trained, record)
    leave_together()  # the other ranks wait here until rank 0 has saved


if __name__ == "__main__":
    script(main, config, own)
