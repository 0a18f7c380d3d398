"""Packing: the rows of a micro-batch as one long row, without padding, in which a prompt that
neighbouring rows share stands only once.

    prepare(lm)                                               # once
    packed = pack(ids, prompt_lengths, lengths, uses_varlen(lm))    # on the host
    hidden = hidden_states(lm, to_device(packed, device))     # (M, H), for M tokens

All layers but attention work on each token by itself, so the M tokens may stand in one long row.
Attention works on segments of it: a prompt that several rows share; the completion that follows
it in one of these rows; or a whole row that shares nothing. A completion that follows a shared
prompt sees the keys of that prompt before its own. So G completions of one prompt save the forward
and backward of G - 1 prompts.

On a GPU in 16 bits, one varlen_attn per layer takes all segments (Varlen). Elsewhere, segments of
about the same length are padded to a block (Block). Either plan is made on the host and sent to
the device once, so that no layer and no block makes the host wait for the device.

n rows, s segments, M tokens. A place is an index into the M tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from common import UserError

# cuDNN makes a plan for every new shape, 23-37 ms each, and here every micro-batch has new shapes
torch.backends.cuda.enable_cudnn_sdp(False)

NAME = "packed"  # how transformers knows this attention

# Arguments that models pass to attention and that change nothing here. Any other argument asks for
# more than causal order.
HARMLESS = {
    "is_causal",
    "use_cache",
    "position_ids",
    "output_attentions",
    "output_hidden_states",
    "cache_position",
}


class Block(NamedTuple):
    """b segments with at most Q tokens each, which see at most K tokens; m tokens in all. Without
    padding `queries` and `real` are None; with no prompt before the segments `keys` and `before`
    are, and attention is plain causal."""

    tokens: slice  # the places of these m tokens
    count: int  # b
    queries: Tensor | None  # (b, Q) indices into the slice, padded
    real: Tensor | None  # (m,) which of the b * Q are not padding
    keys: Tensor | None  # (b, K) places of the prompt's tokens, then of the segment's own, padded
    before: Tensor | None  # (b or 1,) tokens of the prompt
    seen: Tensor | None = None  # (b or 1, 1, Q, K) bool: seen_keys(), set on the device


class Varlen(NamedTuple):
    """All s segments for one varlen_attn. Queries are the M tokens in order; the keys of all
    segments stand one after the other."""

    keys: Tensor | None  # places of each segment's keys, its prompt's first; None: those of queries
    cu_seq_q: Tensor  # (s + 1,) int32: cumulative numbers of queries, as varlen_attn wants them
    cu_seq_k: Tensor  # (s + 1,) int32: the same of keys
    max_q: int  # most queries of a segment
    max_k: int  # most keys of a segment


class Packed(NamedTuple):
    ids: Tensor  # (1, M)
    positions: Tensor  # (1, M)
    prompt_end: Tensor  # (n,) place of each row's last prompt token
    completion_start: Tensor  # (n,) place of each row's first completion token
    longest: int  # tokens of the longest row
    blocks: list[Block]
    varlen: Varlen | None  # used instead of blocks


def uses_varlen(lm) -> bool:
    """Whether this model can use varlen_attn, which needs 16 bits and a GPU from Ampere on."""
    if lm.device.type != "cuda" or lm.dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(lm.device) >= (8, 0)


# --- between host and device


def on_host(*tensors: Tensor) -> list[Tensor]:
    """These integer tensors in CPU memory, with a single wait for the device."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    flat = torch.cat([x.flatten() for x in tensors]).cpu()
    pieces = flat.split([x.numel() for x in tensors])
    return [piece.view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]


def map_tensors(change, plan):
    """The plan (nested tuples and lists of tensors) with every tensor x replaced by change(x)."""
    if isinstance(plan, Tensor):
        return change(plan)
    if not isinstance(plan, (list, tuple)):
        return plan
    parts = [map_tensors(change, part) for part in plan]
    # a NamedTuple takes its fields as separate arguments
    return type(plan)(*parts) if hasattr(plan, "_fields") else type(plan)(parts)


def to_device(plan, device: torch.device):
    """A plan of integers on the host, moved to the device in one copy that nobody waits for."""
    if device.type == "cpu":
        return plan
    tensors = []
    map_tensors(tensors.append, plan)
    flat = torch.cat([x.flatten().long() for x in tensors])
    if device.type == "cuda":
        flat = flat.pin_memory()  # without this the host waits for the copy
    flat = flat.to(device, non_blocking=True)
    pieces = iter(flat.split([x.numel() for x in tensors]))
    return map_tensors(lambda x: next(pieces).view(x.shape).to(x.dtype), plan)


# --- the plan, on the host


def repeats_prompt(ids: Tensor, prompt_lengths: Tensor) -> Tensor:
    """(n,) bool: whether each row has the same prompt as the row before it. ids (n, S),
    prompt_lengths (n,)."""
    longest = int(prompt_lengths.max())
    steps = torch.arange(longest, device=ids.device)
    outside = steps >= prompt_lengths[1:, None]  # (n - 1, longest)
    same_tokens = ((ids[1:, :longest] == ids[:-1, :longest]) | outside).all(1)
    same = same_tokens & (prompt_lengths[1:] == prompt_lengths[:-1])  # (n - 1,)
    return torch.cat([same.new_zeros(1), same])  # no row stands before the first


def segments(ids: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> tuple:
    """Cuts the rows into segments: (lead (n,), row (s,), before (s,), size (s,)).

    lead: for each row, the row that brings its prompt. row, before, size: for each segment, its
    row, the tokens of a shared prompt before it (0 for none), and its own tokens. Segments of one
    kind are neighbours.

    The rows "p p a", "p p b b" and "q c", of which two begin with the prompt "p p", are cut into
    "p p", "q c", "a" and "b b": lead = 0 0 2, row = 0 2 0 1, before = 0 0 2 2, size = 2 2 1 2."""
    rows = torch.arange(len(ids))
    repeats = repeats_prompt(ids, prompt_lengths)
    lead = rows.masked_fill(repeats, 0).cummax(0).values  # (n,) the last row with a new prompt
    shared = lead.bincount(minlength=len(ids))[lead] > 1  # (n,)
    leads = rows[shared & (lead == rows)]  # rows whose prompt becomes a segment
    follow = rows[shared]  # rows whose completion becomes a segment
    alone = rows[~shared]  # rows that are a segment as a whole
    row = torch.cat([leads, alone, follow])
    before = torch.cat([torch.zeros(len(leads) + len(alone)).long(), prompt_lengths[follow]])
    whole = prompt_lengths + lengths
    size = torch.cat([prompt_lengths[leads], whole[alone], lengths[follow]])
    kind = kind_of(before, size)
    order = kind.argsort(stable=True)  # a block has to be a slice
    return lead, row[order], before[order], size[order]


def kind_of(before: Tensor, size: Tensor) -> Tensor:
    """(s,) a number for each segment's kind. Segments of one kind are padded to one block: the
    longest is less than twice as long as the shortest, and either all of them follow a shared
    prompt or none does."""
    return size.log2().ceil().long() + 64 * (before > 0)  # no segment has 2^64 tokens


def ragged_indices(counts: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs (i, t) with 0 <= t < counts[i], in order, as two tensors."""
    return (torch.arange(int(counts.max())) < counts[:, None]).nonzero(as_tuple=True)


def pack(ids: Tensor, prompt_lengths: Tensor, lengths: Tensor, varlen: bool = False) -> Packed:
    """The plan for these rows; all tensors on the host. ids (n, S): prompt and completion,
    right-padded; prompt_lengths, lengths (n,). varlen: plan for varlen_attn instead of blocks.

    The example of segments() becomes the M = 7 tokens "p p q c a b b" at the positions
    0 1 0 1 2 2 3; prompt_end = 1 1 2 and completion_start = 4 5 3."""
    lead, row, before, size = segments(ids, prompt_lengths, lengths)
    place = size.cumsum(0) - size  # (s,) place of each segment's first token
    segment, t = ragged_indices(size)  # (M,) each token's segment, and its index in it
    at = before[segment] + t  # (M,) its index in its row
    brings = before == 0  # (s,) segments with a prompt; the others are a completion alone
    prompt_end = torch.zeros_like(lengths)  # (n,) so far of the rows whose segment has the prompt
    prompt_end[row[brings]] = place[brings] + prompt_lengths[row[brings]] - 1
    prompt_end = prompt_end[lead]  # (n,) the others have that of their lead
    completion_start = prompt_end + 1  # in a whole row the completion follows its prompt;
    completion_start[row[~brings]] = place[~brings]  # otherwise it is a segment of its own
    prompt_start = (prompt_end + 1 - prompt_lengths)[row]  # (s,)
    return Packed(
        ids=ids[row[segment], at][None],
        positions=at[None],
        prompt_end=prompt_end,
        completion_start=completion_start,
        longest=int((prompt_lengths + lengths).max()),
        blocks=[] if varlen else blocks_of(place, size, before, prompt_start),
        varlen=varlen_of(place, size, before, prompt_start) if varlen else None,
    )


def varlen_of(place: Tensor, size: Tensor, before: Tensor, prompt_start: Tensor) -> Varlen:
    """place, size (s,): each segment's first place and number of tokens; before (s,): tokens of the
    shared prompt before it, 0 for none; prompt_start (s,): the place of its first token."""
    width = before + size  # (s,) number of keys
    i, j = ragged_indices(width)  # each key's segment, and its index in it
    of_prompt = prompt_start[i] + j  # its place, if it is one of the prompt's
    own = place[i] + j - before[i]  # its place, if it is one of the segment's own
    keys = torch.where(j < before[i], of_prompt, own)

    def ends(counts: Tensor) -> Tensor:
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()

    shares_prompts = bool(before.any())  # otherwise keys have the same places as queries
    return Varlen(
        keys=keys if shares_prompts else None,
        cu_seq_q=ends(size),
        cu_seq_k=ends(width),
        max_q=int(size.max()),
        max_k=int(width.max()),
    )


def blocks_of(place: Tensor, size: Tensor, before: Tensor, prompt_start: Tensor) -> list[Block]:
    """A block for each kind of segment. Arguments: see varlen_of."""
    blocks = []
    i = 0
    counts = kind_of(before, size).unique_consecutive(return_counts=True)[1]
    for count in counts.tolist():
        part = slice(i, i + count)
        blocks.append(block(place[part], size[part], before[part], prompt_start[part]))
        i += count
    return blocks


def block(place: Tensor, size: Tensor, before: Tensor, prompt_start: Tensor) -> Block:
    """The block of these segments, neighbours of one kind. Arguments: see varlen_of."""
    longest = int(size.max())  # Q
    start = int(place[0])
    m = int(size.sum())  # tokens of the block without padding
    steps = torch.arange(longest)
    real = steps < size[:, None]  # (b, Q)
    queries = keys = None
    even = m == real.numel()  # all segments have the same length: nothing to pad
    if not even:  # pads with the segment's first token
        queries = (place - start)[:, None] + steps * real
    if before.any():
        j = torch.arange(int(before.max()) + longest)  # (K,) index among a segment's keys
        own = (j - before[:, None]).clamp(min=0)  # (b, K)
        own = place[:, None] + own * (own < size[:, None])  # pads with the first token, as above
        of_prompt = prompt_start[:, None] + j  # (b, K)
        keys = torch.where(j < before[:, None], of_prompt, own)
        if (before == before[0]).all():  # then one mask serves all segments
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
    """The same with `seen` set in all blocks: computed once, not in every layer."""
    return packed._replace(blocks=[b._replace(seen=seen_keys(b)) for b in packed.blocks])


def seen_keys(b: Block) -> Tensor | None:
    """(b or 1, 1, Q, K) bool: which keys the queries of a block see; None: plain causal order."""
    if b.keys is None:
        return None
    longest = (b.tokens.stop - b.tokens.start) // b.count  # Q
    if b.queries is not None:
        longest = b.queries.shape[1]
    steps = torch.arange(longest, device=b.keys.device)
    j = torch.arange(b.keys.shape[1], device=b.keys.device)
    return j <= b.before[:, None, None, None] + steps[:, None]


def attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    packed: Packed | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """An attention function as transformers' AttentionInterface wants it: query (1, heads, M, d),
    key and value (1, kv heads, M, d), result (1, M, heads, d). UserError if the model's attention
    asks for more than causal order."""
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
    """What a model's attention asks for that packing does not do, in words. longest: tokens of the
    longest row; a sliding window at least as long does no harm."""
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
    """Attention of all segments, (M, heads, d). varlen_attn aligns its causal mask at the ends of
    queries and keys (bottom right), so a query sees the whole prompt, then its own segment up to
    itself. bench/gpu.py proves it on a GPU."""
    if plan.keys is not None:
        k = k.index_select(0, plan.keys)
        v = v.index_select(0, plan.keys)
    return varlen_attn(
        q,
        k,
        v,
        plan.cu_seq_q,
        plan.cu_seq_k,
        plan.max_q,
        plan.max_k,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=True,
    )


def attend_block(q: Tensor, k: Tensor, v: Tensor, b: Block, scaling) -> Tensor:
    """Attention of one block, (m, heads, d)."""
    queries = fold(q, b)  # (b, heads, Q, d)
    if b.keys is None:
        keys = fold(k, b)
        values = fold(v, b)
    else:
        keys = gather_entries(k, b.keys)  # (b, kv heads, K, d)
        values = gather_entries(v, b.keys)
    groups = queries.shape[1] // keys.shape[1]
    if b.seen is not None and groups > 1:  # no fast kernel takes both a mask and fewer key heads
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


def gather_entries(x: Tensor, places: Tensor) -> Tensor:
    """The entries of x (tokens, heads, d) at places (b, K), as (b, heads, K, d)."""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def fold(x: Tensor, b: Block) -> Tensor:
    """The segments of a block, taken from all tokens x (M, heads, d), as (b, heads, Q, d)."""
    part = x[b.tokens]  # (m, heads, d)
    if b.queries is None:
        return part.unflatten(0, (b.count, -1)).transpose(1, 2)
    return gather_entries(part, b.queries)


AttentionInterface.register(NAME, attention)


def hidden_states(lm, packed: Packed) -> Tensor:
    """Final hidden states (M, H) of the packed tokens. `packed` must be on the model's device."""
    out = lm.base_model(
        input_ids=packed.ids,
        position_ids=packed.positions,
        packed=with_masks(packed),
        use_cache=False,
    )
    return out.last_hidden_state[0]


def completion_places(packed: Packed, row: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(k,) each: the place of the token that predicts completion token t of row `row`, and the
    place of that completion token itself. row, t (k,)."""
    own = packed.completion_start[row] + t
    return torch.where(t == 0, packed.prompt_end[row], own - 1), own


# --- which models can do it


def check_window(config, longest: int) -> None:
    """UserError if rows of `longest` tokens exceed a window of the model's attention. Some models
    apply their window in the mask only, which packing does not use."""
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and window < longest:
            raise UserError(
                f"model {config.model_type!r} has {name}={window} and rows may have {longest} "
                f"tokens, which packed sequences do not do: set "
                f"pack_sequences=False, or shorten max_prompt_length + max_completion_length"
            )


def small_rows(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Four rows (ids, prompt lengths, lengths) to try a model on; the first two share a prompt."""
    ids = torch.arange(28).view(4, 7) * 5 % vocabulary
    ids[1, :3] = ids[0, :3]
    return ids, torch.tensor([3, 3, 3, 2]), torch.tensor([3, 3, 2, 4])


@torch.no_grad()
def prepare(lm) -> None:
    """Sets the model's attention to this one and tries it on a few tokens, because a model's files
    do not tell whether it can be packed. UserError if tokens meet outside attention too
    (convolutions, recurrent states), or if its attention is not plain causal."""
    usual = lm.config._attn_implementation
    if usual == NAME:
        return
    was_training = lm.training
    lm.eval()
    try:
        leak, gap = try_packing(lm)
        # The limits allow for rounding in the model's type. gap's is larger: packed and padded rows
        # add up in different orders.
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
    # the model's layers do not pass `packed` on to attention
    except (TypeError, ValueError, AttributeError) as error:
        lm.set_attn_implementation(usual)
        raise UserError(
            f"model {lm.config.model_type!r} can't have its sequences packed ({error}): set "
            f"pack_sequences=False"
        ) from None
    finally:
        lm.train(was_training)


def try_packing(lm) -> tuple[float, float]:
    """(leak, gap), both relative to the largest hidden state. leak: how much a row's states change
    when another row's text changes; gap: how far they are from those of padded rows. Sets the
    attention."""
    ids, prompt_lengths, lengths = small_rows(lm.config.vocab_size)  # on the host
    changed_ids = ids.clone()
    changed_ids[2, :5] += 1  # changes a row in the middle
    changed_ids %= lm.config.vocab_size
    row, t = ragged_indices(lengths)
    others = (row != 2).nonzero()[:, 0].to(lm.device)
    padded = lm.base_model(input_ids=ids.to(lm.device), use_cache=False).last_hidden_state
    plain = padded[row.to(lm.device), (prompt_lengths[row] + t).to(lm.device)].float()
    lm.set_attn_implementation(NAME)

    def packed_states(ids: Tensor) -> Tensor:
        packed = pack(ids, prompt_lengths, lengths, uses_varlen(lm))
        _, own = completion_places(packed, row, t)
        packed, own = to_device((packed, own), lm.device)
        return hidden_states(lm, packed)[own].float()

    packed = packed_states(ids)  # (k, H), as plain
    changed = packed_states(changed_ids)
    size = plain.abs().max()
    # not always exactly 0: experts round differently with other tokens beside them
    leak = (packed - changed)[others].abs().max() / size
    gap = (packed - plain).abs().max() / size
    return leak.item(), gap.item()
