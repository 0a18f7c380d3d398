"""Rows of tokens side by side without padding, and a prompt that neighbouring rows begin with
only once.

    prepare(lm)                                               # once
    packed = pack(ids, prompt_lengths, lengths, uses_varlen(lm))    # on the host
    hidden = states(lm, to_device(packed, device))            # (M, H), for M tokens

All layers but attention treat every token alike, so the M tokens may stand in one long row.
Attention gets them back in segments: a prompt that several rows share, what follows it in each of
them, or a whole row. What follows a shared prompt sees that prompt's keys before its own. G
completions of a prompt save the forward and the backward of G - 1 prompts.

On a GPU in 16 bits one varlen_attn per layer takes all segments (Varlen); elsewhere segments of
about one length are padded to a block (Block). The plan of either is made on the host and sent to
the device once: no layer and no block makes the host wait for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from common import UserError

# cuDNN makes a plan for every new shape, 23-37 ms each; here every micro-batch has its own shapes
torch.backends.cuda.enable_cudnn_sdp(False)

NAME = "packed"  # of this attention among those of transformers

# What models hand to attention besides; anything else is more than causal order.
HARMLESS = {
    "is_causal",
    "use_cache",
    "position_ids",
    "output_attentions",
    "output_hidden_states",
    "cache_position",
}


class Block(NamedTuple):
    """b segments of at most Q tokens, which see at most K."""

    tokens: slice  # theirs, among all M
    count: int  # b
    queries: Tensor | None  # (b, Q) places in the slice, padded; None if all have one length
    real: Tensor | None  # (m,) which of the b * Q are not padding; None if all are
    keys: Tensor | None  # (b, K) places among all M, the prompt's and their own; None: no prompt
    before: Tensor | None  # (b or 1,) tokens of the prompt, with keys; else plain causal order
    seen: Tensor | None = None  # (b or 1, 1, Q, K) bool, with keys: made from them on the device


class Varlen(NamedTuple):
    """All s segments for one varlen_attn: queries as they stand, each one's keys in a row."""

    keys: Tensor | None  # (sum of K,) places among all M, a prompt's before its follower's own
    ends_q: Tensor  # (s + 1,) int32, where a segment's queries begin, and the last ones end
    ends_k: Tensor  # (s + 1,) int32, and its keys
    longest_q: int
    longest_k: int


class Packed(NamedTuple):
    ids: Tensor  # (1, M)
    positions: Tensor  # (1, M)
    last: Tensor  # (n,) the place of each row's last prompt token
    first: Tensor  # (n,) and of its first completion token
    longest: int  # tokens of the longest row
    blocks: list[Block]
    varlen: Varlen | None  # instead of blocks


def uses_varlen(lm) -> bool:
    """Whether this model's attention is varlen_attn, which wants 16 bits and an Ampere or later."""
    if lm.device.type != "cuda" or lm.dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(lm.device) >= (8, 0)


# --- between host and device


def on_host(*tensors: Tensor) -> list[Tensor]:
    """The integers of these tensors in CPU memory: one wait for the device, or none on a CPU."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    flat = torch.cat([x.flatten() for x in tensors]).cpu()
    pieces = flat.split([x.numel() for x in tensors])
    return [piece.view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]


def map_tensors(change, plan):
    """The plan (tuples, lists, tensors in them) with change(x) for every tensor x, in order."""
    if isinstance(plan, Tensor):
        return change(plan)
    if not isinstance(plan, (list, tuple)):
        return plan
    parts = [map_tensors(change, part) for part in plan]
    # a NamedTuple takes its fields one by one
    return type(plan)(*parts) if hasattr(plan, "_fields") else type(plan)(parts)


def to_device(plan, device: torch.device):
    """The plan, made of integers on the host, on the device: one copy, and nobody waits for it."""
    if device.type == "cpu":
        return plan
    tensors = []
    map_tensors(tensors.append, plan)
    flat = torch.cat([x.flatten().long() for x in tensors])
    if device.type == "cuda":
        flat = flat.pin_memory()  # else the copy makes the host wait
    flat = flat.to(device, non_blocking=True)
    pieces = iter(flat.split([x.numel() for x in tensors]))
    return map_tensors(lambda x: next(pieces).view(x.shape).to(x.dtype), plan)


# --- the plan, on the host


def continues(ids: Tensor, prompt_lengths: Tensor) -> Tensor:
    """(n,) bool: whether a row's prompt is that of the row before it. ids (n, S), prompt_lengths
    (n,)."""
    longest = int(prompt_lengths.max())
    steps = torch.arange(longest, device=ids.device)
    outside = steps >= prompt_lengths[1:, None]  # (n - 1, longest)
    same_tokens = ((ids[1:, :longest] == ids[:-1, :longest]) | outside).all(1)
    same = same_tokens & (prompt_lengths[1:] == prompt_lengths[:-1])  # (n - 1,)
    return torch.cat([same.new_zeros(1), same])  # the first row has none before it


def segments(ids: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> tuple:
    """(lead (n,), row, begin, size (s,)): the row that brings each row's prompt; and of every
    segment its row, the index of its first token in it (above 0: a shared prompt stands before)
    and its number of tokens. Neighbours are of one kind."""
    rows = torch.arange(len(ids))
    repeats = continues(ids, prompt_lengths)
    lead = rows.masked_fill(repeats, 0).cummax(0).values  # (n,) the last row that did not repeat
    shared = lead.bincount(minlength=len(ids))[lead] > 1  # (n,)
    leads = rows[shared & (lead == rows)]  # their prompts are segments of their own,
    follow = rows[shared]  # and so are the completions of all that share them
    alone = rows[~shared]  # whole rows
    row = torch.cat([leads, alone, follow])
    begin = torch.cat([torch.zeros(len(leads) + len(alone)).long(), prompt_lengths[follow]])
    whole = prompt_lengths + lengths
    size = torch.cat([prompt_lengths[leads], whole[alone], lengths[follow]])
    kind = kind_of(begin, size)
    order = kind.argsort(stable=True)  # blocks are slices
    return lead, row[order], begin[order], size[order]


def kind_of(begin: Tensor, size: Tensor) -> Tensor:
    """Segments of one kind are padded to one block: the longest is less than twice as long as the
    shortest, and all have a prompt before them or none has."""
    return size.log2().ceil().long() + 64 * (begin > 0)  # no segment has 2^64 tokens


def each(counts: Tensor) -> tuple[Tensor, Tensor]:
    """(i, t) of every t in 0 .. counts[i] - 1, for every i, in order."""
    return (torch.arange(int(counts.max())) < counts[:, None]).nonzero(as_tuple=True)


def pack(ids: Tensor, prompt_lengths: Tensor, lengths: Tensor, varlen: bool = False) -> Packed:
    """ids (n, S): prompt and completion, right-padded; prompt_lengths, lengths (n,). On the host.
    varlen: for one varlen_attn a layer, else for blocks."""
    lead, row, begin, size = segments(ids, prompt_lengths, lengths)
    place = size.cumsum(0) - size  # (s,) of a segment's first token, among all M
    segment, t = each(size)  # (M,) each token's segment, and its index there
    at = begin[segment] + t  # (M,) its index in its row
    starts = begin == 0  # (s,) segments that bring a prompt
    last = torch.zeros_like(lengths)
    last[row[starts]] = (place + prompt_lengths[row] - 1)[starts]
    last = last[lead]  # (n,) also for rows whose prompt another row brings
    first = last + 1  # right behind the prompt, or
    first[row[~starts]] = place[~starts]  # at the beginning of a segment of its own
    made = (place, size, begin, last[row])
    return Packed(
        ids=ids[row[segment], at][None],
        positions=at[None],
        last=last,
        first=first,
        longest=int((prompt_lengths + lengths).max()),
        blocks=[] if varlen else blocks_of(*made),
        varlen=varlen_of(*made) if varlen else None,
    )


def varlen_of(place: Tensor, size: Tensor, before: Tensor, last: Tensor) -> Varlen:
    """place, size (s,) of the segments; before (s,): tokens of the prompt that stands before each,
    0 for none; last (s,): where it ends."""
    width = before + size  # (s,) keys of each
    i, s = each(width)  # of every key its segment, and its index there
    of_prompt = (last - before + 1)[i] + s
    own = place[i] + s - before[i]
    keys = torch.where(s < before[i], of_prompt, own)

    def ends(counts: Tensor) -> Tensor:
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()

    shares_prompts = bool(before.any())  # if none does, the keys stand where the queries do
    return Varlen(
        keys=keys if shares_prompts else None,
        ends_q=ends(size),
        ends_k=ends(width),
        longest_q=int(size.max()),
        longest_k=int(width.max()),
    )


def blocks_of(place: Tensor, size: Tensor, before: Tensor, last: Tensor) -> list[Block]:
    """The segments of varlen_of, those of one kind together."""
    blocks = []
    i = 0
    counts = kind_of(before, size).unique_consecutive(return_counts=True)[1]
    for count in counts.tolist():
        part = slice(i, i + count)
        blocks.append(block(place[part], size[part], before[part], last[part]))
        i += count
    return blocks


def block(place: Tensor, size: Tensor, before: Tensor, last: Tensor) -> Block:
    """One block of neighbouring segments of one kind."""
    longest = int(size.max())  # Q
    start = int(place[0])
    m = int(size.sum())  # tokens of the block without padding
    steps = torch.arange(longest)
    real = steps < size[:, None]  # (b, Q)
    queries = keys = None
    even = m == real.numel()  # all segments are as long: nothing to pad
    if not even:  # padding is the segment's first token again
        queries = (place - start)[:, None] + steps * real
    if before.any():
        s = torch.arange(int(before.max()) + longest)  # (K,)
        own = (s - before[:, None]).clamp(min=0)  # (b, K)
        own = place[:, None] + own * (own < size[:, None])  # padding: its first token again
        of_prompt = (last - before + 1)[:, None] + s  # (b, K)
        keys = torch.where(s < before[:, None], of_prompt, own)
        if (before == before[0]).all():  # one mask serves all
            before = before[:1]
    return Block(
        tokens=slice(start, start + m),
        count=len(size),
        queries=queries,
        real=None if even else real.flatten().nonzero()[:, 0],
        keys=keys,
        before=None if keys is None else before,
    )


# --- attention, on the device


def with_masks(packed: Packed) -> Packed:
    """Its blocks with what their queries see: once, not in every layer."""
    return packed._replace(blocks=[b._replace(seen=seen_keys(b)) for b in packed.blocks])


def seen_keys(b: Block) -> Tensor | None:
    """(b or 1, 1, Q, K) bool: which keys the queries of a block see; None: causal order."""
    if b.keys is None:
        return None
    longest = (b.tokens.stop - b.tokens.start) // b.count  # Q
    if b.queries is not None:
        longest = b.queries.shape[1]
    steps = torch.arange(longest, device=b.keys.device)
    s = torch.arange(b.keys.shape[1], device=b.keys.device)
    return s <= b.before[:, None, None, None] + steps[:, None]


def attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    packed: Packed | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' AttentionInterface: query (1, heads, M, d), key and value (1, kv heads, M, d);
    (1, M, heads, d) out. A model whose attention wants more than causal order is a UserError."""
    if packed is None:
        raise ValueError(
            f"the attention of this model is set to {NAME!r}: call it through policy.Policy, or "
            f"lm.set_attn_implementation('sdpa') first"
        )
    scaling = kwargs.pop("scaling", None)
    wants = beyond_causal(attention_mask, packed.longest, kwargs)
    if wants:
        raise UserError(
            f"{type(module).__name__} uses {', '.join(wants)} in its attention, which packing does "
            f"not support: set pack_sequences=False"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (M, heads, d)
    if packed.varlen is not None:
        return attend_at_once(q, k, v, packed.varlen, scaling)[None], None
    parts = [attend_block(q, k, v, b, scaling) for b in packed.blocks]
    return torch.cat(parts)[None], None


def beyond_causal(attention_mask, longest: int, kwargs: dict) -> list[str]:
    """What a model's attention asks for that packing does not do, in words. longest: tokens of
    the longest row, which a sliding window may hold."""
    kwargs = dict(kwargs)
    dropout = kwargs.pop("dropout", 0.0)
    window = kwargs.pop("sliding_window", None)
    wants = []
    for name, value in kwargs.items():
        if value is not None and name not in HARMLESS:
            wants.append(name)
    if attention_mask is not None:
        wants.append("a mask")
    if dropout > 0:
        wants.append("dropout")
    if window is not None and window < longest:
        wants.append("a sliding window")
    return wants


def attend_at_once(q: Tensor, k: Tensor, v: Tensor, plan: Varlen, scaling) -> Tensor:
    """(M, heads, d). The causal order of varlen_attn is aligned at the ends of queries and keys
    (bottom right), which is "the prompt, then its own": bench/gpu.py proves it on a GPU."""
    if plan.keys is not None:
        k = k.index_select(0, plan.keys)
        v = v.index_select(0, plan.keys)
    return varlen_attn(
        q,
        k,
        v,
        plan.ends_q,
        plan.ends_k,
        plan.longest_q,
        plan.longest_k,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=True,
    )


def attend_block(q: Tensor, k: Tensor, v: Tensor, b: Block, scaling) -> Tensor:
    """(m, heads, d), of the tokens of one block."""
    queries = fold(q, b)  # (b, heads, Q, d)
    if b.keys is None:
        keys = fold(k, b)
        values = fold(v, b)
    else:
        keys = spread(k, b.keys)  # (b, kv heads, K, d)
        values = spread(v, b.keys)
    groups = queries.shape[1] // keys.shape[1]
    if b.seen is not None and groups > 1:  # no fast kernel takes a mask and fewer heads of keys
        keys = keys.repeat_interleave(groups, 1)
        values = values.repeat_interleave(groups, 1)
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
    return out if b.real is None else out.index_select(0, b.real)


def spread(x: Tensor, places: Tensor) -> Tensor:
    """What of x (m, heads, d) is at places (b, K), as (b, heads, K, d)."""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def fold(x: Tensor, b: Block) -> Tensor:
    """The segments of a block, from all tokens (M, heads, d), as (b, heads, Q, d)."""
    own = x[b.tokens]
    if b.queries is None:
        return own.unflatten(0, (b.count, -1)).transpose(1, 2)
    return spread(own, b.queries)


AttentionInterface.register(NAME, attention)


def states(lm, packed: Packed) -> Tensor:
    """Final hidden states (M, H) of the packed tokens; `packed` is on the model's device."""
    out = lm.base_model(
        input_ids=packed.ids,
        position_ids=packed.positions,
        packed=with_masks(packed),
        use_cache=False,
    )
    return out.last_hidden_state[0]


def completion_places(packed: Packed, row: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Of completion tokens t of `row` (k,): places of what predicts each, and its own."""
    own = packed.first[row] + t
    return torch.where(t == 0, packed.last[row], own - 1), own


# --- which models can do it


def check_window(config, longest: int) -> None:
    """Rows of `longest` tokens must fit into whatever window the model's attention has: some
    models have it in their masks only, which nobody asks for here."""
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and window < longest:
            raise UserError(
                f"model {config.model_type!r} has {name}={window} and rows may have {longest} "
                f"tokens, which packed sequences do not do: set "
                f"pack_sequences=False, or shorten max_prompt_length + max_completion_length"
            )


def small_rows(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Four rows (ids, prompt lengths, lengths), two of them with one prompt, to try a model on."""
    ids = torch.arange(28).view(4, 7) * 5 % vocabulary
    ids[1, :3] = ids[0, :3]
    return ids, torch.tensor([3, 3, 3, 2]), torch.tensor([3, 3, 2, 4])


@torch.no_grad()
def prepare(lm) -> None:
    """Sets the model's attention, and tries it on a few tokens: a model whose layers hand on more
    than attention does (convolutions, recurrent states), or whose attention is not plain causal, is
    a UserError. Its files do not tell."""
    usual = lm.config._attn_implementation
    if usual == NAME:
        return
    was_training = lm.training
    lm.eval()
    try:
        leak, gap = try_packing(lm)
        # rounding of the model's type: padded rows add up in another order, one text's do not
        exact = lm.dtype == torch.float32
        if leak > (2e-5 if exact else 0.02) or gap > (1e-3 if exact else 0.1):
            raise UserError(
                f"model {lm.config.model_type!r} can't have its sequences packed: a token's hidden "
                f"state depends on more than the tokens before it in its row; set "
                f"pack_sequences=False"
            )
    except UserError:
        lm.set_attn_implementation(usual)
        raise
    # its layers do not hand `packed` on to attention
    except (TypeError, ValueError, AttributeError) as error:
        lm.set_attn_implementation(usual)
        raise UserError(
            f"model {lm.config.model_type!r} can't have its sequences packed ({error}): set "
            f"pack_sequences=False"
        ) from None
    finally:
        lm.train(was_training)


def try_packing(lm) -> tuple[float, float]:
    """(leak, gap), relative to the largest hidden state: how much a row's states change with the
    text of another row, and how far they are from those of padded rows. Sets the attention."""
    ids, prompt_lengths, lengths = small_rows(lm.config.vocab_size)  # on the host
    changed_ids = ids.clone()
    changed_ids[2, :5] += 1  # a row in the middle says something else
    changed_ids %= lm.config.vocab_size
    row, t = each(lengths)
    others = (row != 2).nonzero()[:, 0].to(lm.device)
    padded = lm.base_model(input_ids=ids.to(lm.device), use_cache=False).last_hidden_state
    plain = padded[row.to(lm.device), (prompt_lengths[row] + t).to(lm.device)].float()
    lm.set_attn_implementation(NAME)

    def packed_states(ids: Tensor) -> Tensor:
        packed = pack(ids, prompt_lengths, lengths, uses_varlen(lm))
        _, own = completion_places(packed, row, t)
        packed, own = to_device((packed, own), lm.device)
        return states(lm, packed)[own].float()

    packed = packed_states(ids)  # (k, H), as plain
    changed = packed_states(changed_ids)
    size = plain.abs().max()
    # experts round differently with other tokens beside them: not always 0
    leak = (packed - changed)[others].abs().max() / size
    gap = (packed - plain).abs().max() / size
    return leak.item(), gap.item()
