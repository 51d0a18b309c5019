"""What a draft would propose from every position of an answer: all chains of one text in a few passes.

A server drafts from one position at a time. Here the text is read once and the chains of all positions grow
together, one token a step; each attends to the text up to its own position and to itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sdsie_sglang.demo.llama import GROUP, HEAD_DIM, Llama, linear, rms_norm, rotary_table
from sdsie_sglang.kernels.entropy import entropy_bits


@dataclass(frozen=True)
class Chains:
    """Greedy proposals from N positions, `steps` tokens each.

    tokens: [N, steps] int64; entropy_bits, top_probability: [N, steps] float32, of the distribution that each
    token was taken from.
    """

    tokens: Tensor
    entropy_bits: Tensor
    top_probability: Tensor


def draft_chains(draft: Llama, text: Tensor, first: int, steps: int) -> Chains:
    """Proposals from positions `first` to the last, each made after reading the text up to and with it.

    Args:
        text: [T] int64 token ids.
    """
    positions = torch.arange(first, text.shape[0], device=text.device)
    with torch.inference_mode():
        hidden, cache = _read(draft, text)
        unread = torch.arange(text.shape[0], device=text.device) > positions[:, None]
        named = _name(draft, hidden[first:])
        return _chains([named, *_grow(draft, cache, unread, named[0], positions + 1, steps - 1)])


def self_chains(target: Llama, low: Llama, text: Tensor, first: int, steps: int) -> Chains:
    """Proposals of the target in low precision on the target's own keys and values, as the self-draft makes them.

    The text before a position was written in full precision; the token at it and the drafted ones in low.
    """
    positions = torch.arange(first, text.shape[0], device=text.device)
    with torch.inference_mode():
        _, cache = _read(target, text)
        unread = torch.arange(text.shape[0], device=text.device) >= positions[:, None]
        return _chains(_grow(low, cache, unread, text[first:], positions, steps))


Named = tuple[Tensor, Tensor, Tensor]


def _chains(found: list[Named]) -> Chains:
    return Chains(*(torch.stack(column, 1) for column in zip(*found, strict=True)))


def _grow(
    draft: Llama,
    cache: list[tuple[Tensor, Tensor]],  # of the text, each layer's [3, T, D]
    unread: Tensor,  # [N, T] bool
    tokens: Tensor,  # [N] int64, each chain's first
    positions: Tensor,  # [N], theirs
    steps: int,
) -> list[Named]:
    """What follows each chain's first token, one token a step, all chains at once."""
    cosines, sines = rotary_table(int(positions.max()) + steps, draft.embedding.device, draft.embedding.dtype)
    own: list[tuple[Tensor, Tensor] | None] = [None] * len(cache)
    found: list[Named] = []
    for step in range(steps):
        x = F.embedding(found[-1][0] if found else tokens, draft.embedding)[:, None]  # [N, 1, H]
        at = positions + step
        tables = (cosines[at][:, None, None], sines[at][:, None, None])  # [N, 1, 1, D]
        for layer, block in enumerate(draft.blocks):
            query, key, value = block.split_heads(rms_norm(x, block.input_norm), *tables)
            before = own[layer]
            if before is not None:
                key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
            own[layer] = (key, value)
            attended = _attend(query[:, :, 0], cache[layer], (key, value), unread)
            x = block.feed_forward(x + linear(attended.reshape(len(tokens), 1, -1), block.out))
        found.append(_name(draft, rms_norm(x[:, 0], draft.norm)))
    return found


def _read(draft: Llama, text: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Normed hidden states [T, H] of the text, and each layer's keys and values [3, T, D]."""
    x = F.embedding(text[None], draft.embedding)
    tables = rotary_table(text.shape[0], x.device, x.dtype)
    cache = []
    for block in draft.blocks:
        query, key, value = block.split_heads(rms_norm(x, block.input_norm), *tables)
        cache.append((key[0], value[0]))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = block.feed_forward(x + linear(attended.transpose(1, 2).flatten(2), block.out))
    return rms_norm(x, draft.norm)[0], cache


def _attend(query: Tensor, text: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], unread: Tensor) -> Tensor:
    """One query a chain over the text it has read and its own tokens; [N, 9, D].

    Args:
        query: [N, 9, D]; text: keys and values [3, T, D]; own: [N, 3, j, D]; unread: [N, T] bool.
    """
    grouped = query.unflatten(1, (-1, GROUP)) / HEAD_DIM**0.5  # [N, 3, GROUP, D]
    over_text = torch.einsum("nhgd,htd->nhgt", grouped, text[0]).masked_fill(unread[:, None, None], -torch.inf)
    over_own = torch.einsum("nhgd,nhjd->nhgj", grouped, own[0])
    weights = torch.cat([over_text, over_own], -1).softmax(-1)
    split = text[0].shape[1]
    mixed = torch.einsum("nhgt,htd->nhgd", weights[..., :split], text[1])
    return (mixed + torch.einsum("nhgj,nhjd->nhgd", weights[..., split:], own[1])).flatten(1, 2)


def _name(draft: Llama, rows: Tensor) -> Named:
    """Greedy token, entropy (bits) and the token's probability for each of [N, H] hidden states."""
    logits = F.linear(rows, draft.embedding)
    top, token = logits.max(-1)
    return token, entropy_bits(logits), (top - logits.logsumexp(-1)).exp()
