"""Replays served text through a draft or a head and counts the verify passes that a server needs for it.

With greedy decoding a drafted token is accepted exactly when it equals the served one, and then everything
the draft saw before it is served text too. So one pass over the text gives, for each place and draft step,
whether the drafted token is accepted, and a walk over those flags gives the cycles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sdsie_sglang.demo.eagle3_head import AUX_HIDDEN_STATES, Eagle3Head
from sdsie_sglang.demo.llama import Llama


@dataclass(frozen=True)
class ServedText:
    """One answered request: all token ids, of which the first `prompt_length` are the prompt."""

    tokens: list[int]
    prompt_length: int


@dataclass(frozen=True)
class Walk:
    """The cycles of one answer at a fixed draft length.

    reached[k], accepted[k]: cycles in which the (k + 1)-th drafted token was compared, and in which it was
    right.
    """

    verify_count: int
    reached: list[int]
    accepted: list[int]


def draft_flags(draft: Llama, text: ServedText, shifted: bool = False) -> list[bool]:
    """flags[p]: the draft, having read tokens 0 … p, names token p + 1 (False for the last p).

    shifted: fed as SGLang's own STANDALONE feeds its draft: without the first token, positions one less.
    """
    skipped = int(shifted)
    tokens = torch.tensor([text.tokens], device=draft.embedding.device)
    with torch.inference_mode():
        hidden = draft(tokens[:, skipped:])[0]
        named = F.linear(hidden[0, :-1], draft.embedding).argmax(-1)
    return [False] * skipped + (named == tokens[0, skipped + 1 :]).tolist() + [False]


def head_flags(target: Llama, head: Eagle3Head, text: ServedText, steps: int) -> list[list[bool]]:
    """flags[k][p]: draft step k + 1 names token p + 1, having read tokens 0 … p, the last k drafted."""
    tokens = torch.tensor([text.tokens], device=target.embedding.device)
    with torch.inference_mode():
        _, features = target(tokens, taps=AUX_HIDDEN_STATES)
        outputs = head.unroll(tokens, features, steps)
        flags = []
        for output in outputs:
            named = F.linear(output[0, :-1], head.embedding).argmax(-1)  # entry i names token i + 2
            flags.append([False, *(named == tokens[0, 2:]).tolist(), False])
    return flags


def walk(flags: Sequence[Sequence[bool]], text: ServedText) -> Walk:
    """Cycles needed for the answer when `len(flags)` tokens are drafted a cycle.

    flags[k][p]: draft step k + 1 names token p + 1 when p is the last token it read. The prefill emits the
    answer's first token; each cycle then emits its accepted tokens and one more.
    """
    drafted = len(flags)
    reached, accepted = [0] * drafted, [0] * drafted
    last, end, verify_count = text.prompt_length, len(text.tokens) - 1, 0
    while last < end:
        run = 0
        while run < drafted and last + run < end:
            reached[run] += 1
            if not flags[run][last + run]:
                break
            accepted[run] += 1
            run += 1
        verify_count += 1
        last += run + 1
    return Walk(verify_count, reached, accepted)


def repeated_share(tokens: Sequence[int], size: int = 4) -> float:
    """Share of the n-grams of `size` tokens that occurred before in the same text: 0 for no repetition."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
