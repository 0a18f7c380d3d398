"""Rows of tokens side by side without padding, and a prompt that neighbouring rows begin with only once.

    prepare(lm)         # once
    hidden, before, own = states(lm, ids, prompt_lengths, lengths, row, t)      # (M, H), (k,), (k,)

All layers but attention treat every token alike, so the M tokens may stand in one long row. Attention gets them back in segments: a prompt that several rows
share, what follows it in each of them, or a whole row. Segments of about one length are padded to a block; those that follow a shared prompt see its keys
before their own. G completions of a prompt save the forward and the backward of G - 1 prompts.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from common import UserError

NAME = "packed"
HARMLESS = {
    "is_causal",
    "use_cache",
    "position_ids",
    "output_attentions",
    "output_hidden_states",
    "cache_position",
}  # what models hand to attention besides


class Block(NamedTuple):
    """b segments of at most Q tokens, which see at most K."""

    tokens: slice  # theirs, among all M
    count: int  # b
    queries: Tensor | None  # (b, Q) places within the slice, padded; None if all are of one length
    real: Tensor | None  # (b * Q,) bool, what of it is not padding
    keys: (
        Tensor | None
    )  # (b, K) places among all M, the prompt's and their own; None if there is no prompt before
    seen: Tensor | None  # (b or 1, 1, Q, K) bool, with keys; else causal


class Packed(NamedTuple):
    ids: Tensor  # (1, M)
    positions: Tensor  # (1, M)
    last: Tensor  # (n,) the place of each row's last prompt token
    first: Tensor  # (n,) and of its first completion token
    blocks: list[Block]


def continues(ids: Tensor, prompt_lengths: Tensor) -> Tensor:
    """(n,) bool: whether a row's prompt is that of the row before it. ids (n, S), prompt_lengths (n,)."""
    longest = int(prompt_lengths.max())
    outside = torch.arange(longest, device=ids.device) >= prompt_lengths[1:, None]
    same = ((ids[1:, :longest] == ids[:-1, :longest]) | outside).all(1) & (
        prompt_lengths[1:] == prompt_lengths[:-1]
    )
    return torch.cat([same.new_zeros(1), same])


def pack(ids: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> Packed:
    """ids (n, S): prompt and completion, right-padded; prompt_lengths, lengths (n,)."""
    everyone = torch.arange(len(ids), device=ids.device)
    lead = (
        everyone.masked_fill(continues(ids, prompt_lengths), 0).cummax(0).values
    )  # (n,) the row that brings each row's prompt
    shared = lead.bincount(minlength=len(ids))[lead] > 1
    total = prompt_lengths + lengths
    leads, follow = everyone[shared & (lead == everyone)], everyone[shared]
    # segments: (row, index of the first token in it, number of tokens); a first index above 0 means that a shared prompt stands before
    row = torch.cat([leads, everyone[~shared], follow])
    begin = torch.cat([torch.zeros_like(row[: len(row) - len(follow)]), prompt_lengths[follow]])
    size = torch.cat([prompt_lengths[leads], total[~shared], lengths[follow]])
    kind = size.log2().ceil().long() + 64 * (
        begin > 0
    )  # of one kind, the longest is less than twice as long as the shortest
    order = kind.argsort(stable=True)
    row, begin, size, kind = row[order], begin[order], size[order], kind[order]
    place = size.cumsum(0) - size  # of a segment's first token
    segment, t = (torch.arange(int(size.max()), device=ids.device) < size[:, None]).nonzero(
        as_tuple=True
    )  # (M,)
    at = begin[segment] + t
    last = torch.zeros_like(total)
    last[row[begin == 0]] = (place + prompt_lengths[row] - 1)[begin == 0]
    last = last[lead]
    first = last + 1
    first[row[begin > 0]] = place[begin > 0]
    blocks, i = [], 0
    for count in kind.unique_consecutive(return_counts=True)[1].tolist():
        part = slice(i, i + count)
        blocks.append(block(place[part], size[part], begin[part], last[row[part]]))
        i += count
    return Packed(ids[row[segment], at][None], at[None], last, first, blocks)


def block(place: Tensor, size: Tensor, before: Tensor, last: Tensor) -> Block:
    """place, size (b,) of neighbouring segments; before (b,): tokens of the prompt that stands before each, 0 for none; last (b,): where it ends."""
    Q, start, m = int(size.max()), int(place[0]), int(size.sum())
    steps = torch.arange(Q, device=place.device)
    real, even = steps < size[:, None], m == len(size) * Q  # (b, Q)
    queries = (
        None if even else (place - start)[:, None] + steps * real
    )  # padding is the segment's first token again
    keys = seen = None
    if int(before[0]):
        s = torch.arange(int(before.max()) + Q, device=place.device)  # (K,)
        own = (s - before[:, None]).clamp(min=0)  # (b, K)
        keys = torch.where(
            s < before[:, None],
            (last - before + 1)[:, None] + s,
            place[:, None] + own * (own < size[:, None]),
        )
        offset = before[:1] if bool((before == before[0]).all()) else before
        seen = s <= offset[:, None, None, None] + steps[:, None]
    return Block(
        slice(start, start + m), len(size), queries, None if even else real.flatten(), keys, seen
    )


def attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    packed: Packed | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **more,
) -> tuple[Tensor, None]:
    """transformers' AttentionInterface: query (1, heads, M, d), key and value (1, kv heads, M, d); (1, M, heads, d) out. A model whose attention wants more than
    causal order is a UserError."""
    if packed is None:
        raise ValueError(
            f"the attention of this model is set to {NAME!r}: call it through policy.Policy, or lm.set_attn_implementation('sdpa') first"
        )
    wants = [name for name, value in more.items() if value is not None and name not in HARMLESS]
    wants += ["a mask"] * (attention_mask is not None) + ["dropout"] * (dropout > 0)
    wants += ["a sliding window"] * (
        sliding_window is not None and sliding_window <= int(packed.positions.max())
    )
    if wants:
        raise UserError(
            f"{type(module).__name__} uses {', '.join(wants)} in its attention, which packing does not support: set pack_sequences=False"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (M, heads, d)
    parts = []
    for b in packed.blocks:
        queries = fold(q, b)  # (b, heads, Q, d)
        keys, values = (
            fold(x, b) if b.keys is None else spread(x, b.keys) for x in (k, v)
        )  # (b, kv heads, K, d)
        groups = queries.shape[1] // keys.shape[1]
        if (
            b.seen is not None and groups > 1
        ):  # no fast kernel takes both a mask and fewer heads of keys
            keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        out = scaled_dot_product_attention(
            queries,
            keys,
            values,
            b.seen,
            is_causal=b.seen is None,
            scale=scaling,
            enable_gqa=queries.shape[1] > keys.shape[1],
        )
        out = out.transpose(1, 2).flatten(0, 1)  # (b * Q, heads, d)
        parts.append(out if b.real is None else out[b.real])
    return torch.cat(parts)[None], None


def spread(x: Tensor, places: Tensor) -> Tensor:
    """What of x (m, heads, d) is at places (b, K), as (b, heads, K, d)."""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def fold(x: Tensor, b: Block) -> Tensor:
    """The segments of a block, from all tokens (M, heads, d), as (b, heads, Q, d)."""
    own = x[b.tokens]
    return (
        own.unflatten(0, (b.count, -1)).transpose(1, 2)
        if b.queries is None
        else spread(own, b.queries)
    )


AttentionInterface.register(NAME, attention)


def states(
    lm, ids: Tensor, prompt_lengths: Tensor, lengths: Tensor, row: Tensor, t: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Final hidden states (M, H) of the rows' tokens, and the places in it of completion tokens t of `row`, (k,): of what predicts each, and its own."""
    packed = pack(ids, prompt_lengths, lengths)
    hidden = lm.base_model(
        input_ids=packed.ids, position_ids=packed.positions, packed=packed, use_cache=False
    ).last_hidden_state[0]
    own = packed.first[row] + t
    return hidden, torch.where(t == 0, packed.last[row], own - 1), own


# --- which models can do it


def check_window(config, longest: int) -> None:
    """Rows of `longest` tokens must fit into whatever window the model's attention has: some models have it in their masks only, which nobody asks for here."""
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and window < longest:
            raise UserError(
                f"model {config.model_type!r} has {name}={window} and rows may have {longest} tokens, which packed sequences do not do: set "
                f"pack_sequences=False, or shorten max_prompt_length + max_completion_length"
            )


@torch.no_grad()
def prepare(lm) -> None:
    """Sets the model's attention, and tries it on a few tokens: a model whose layers hand on more than attention does (convolutions, recurrent states), or
    whose attention is not plain causal, is a UserError. Its files do not tell."""
    trains, usual = lm.training, lm.config._attn_implementation
    if usual == NAME:
        return
    lengths, ids = (
        torch.tensor([3, 3, 2, 4]),
        torch.arange(28, device=lm.device).view(4, 7) * 5 % lm.config.vocab_size,
    )
    prompts, lengths = torch.tensor([3, 3, 3, 2], device=lm.device), lengths.to(lm.device)
    ids[1, :3] = ids[0, :3]
    other = ids.clone()
    other[2, :5] += 1  # a row in the middle says something else
    other %= lm.config.vocab_size
    row, t = (torch.arange(4, device=lm.device) < lengths[:, None]).nonzero(as_tuple=True)
    lm.eval()
    try:
        plain = (
            lm.base_model(input_ids=ids, use_cache=False)
            .last_hidden_state[row, prompts[row] + t]
            .float()
        )
        lm.set_attn_implementation(NAME)
        found, changed = (
            hidden[own].float()
            for hidden, _, own in (
                states(lm, one, prompts, lengths, row, t) for one in (ids, other)
            )
        )
        exact, size = lm.dtype == torch.float32, plain.abs().max()
        leak, gap = (
            (found - changed)[row != 2].abs().max() / size,
            (found - plain).abs().max() / size,
        )  # experts may round differently: not exactly 0
        if leak > (2e-5 if exact else 0.02) or gap > (1e-3 if exact else 0.1):
            raise UserError(
                f"model {lm.config.model_type!r} can't have its sequences packed: a token's hidden state depends on more than the tokens before it in "
                f"its row; set pack_sequences=False"
            )
    except (
        TypeError,
        ValueError,
        AttributeError,
    ) as error:  # a UserError, or its layers do not hand the packing on
        lm.set_attn_implementation(usual)
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"model {lm.config.model_type!r} can't have its sequences packed ({error}): set pack_sequences=False"
        ) from None
    finally:
        lm.train(trains)
