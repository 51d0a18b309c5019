"""Which gear produced which words of an answer, and how unsure the target was: from a record with a trace."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sdsie_sglang.eval.record import Record, Request


@dataclass(frozen=True)
class Cycle:
    """One decode cycle of one answer: tokens `first` to `last` (exclusive), and the entropy in bits at its last one
    (NaN if it was no usable number)."""

    first: int
    last: int
    gear: int
    entropy_bits: float


def cycles_of(request: Request, trace: Sequence[dict[str, Any]]) -> list[Cycle]:
    """The answer's cycles in order. Token 0 comes from prefill and belongs to none."""
    found, at = [], 1
    for line in sorted((c for c in trace if request.rid in c["rids"]), key=lambda c: c["cycle"]):
        place = line["rids"].index(request.rid)
        last = min(at + line["committed"][place], request.tokens)
        if last > at:
            bits = line["entropy_bits"][place]
            found.append(Cycle(at, last, line["k"], math.nan if bits is None else bits))
        at = last
    return found


def pieces(
    ids: Sequence[int], cycles: Sequence[Cycle], decode: Callable[[list[int]], str]
) -> list[tuple[str, Cycle | None]]:
    """The answer's text cut at its cycles. Decoded from the start each time: a token alone may be half a character."""
    cuts = [0, *(cycle.first for cycle in cycles), *([cycles[-1].last] if cycles else [len(ids)])]
    texts = [decode(list(ids[:cut])) if cut else "" for cut in cuts]
    owners: list[Cycle | None] = [None, *cycles]
    return [(texts[i + 1][len(texts[i]) :], owner) for i, owner in enumerate(owners)]


def example(records: Sequence[Record]) -> tuple[Record, Request, list[Cycle]] | None:
    """An answer to show: the traced one whose gears change most often; None without a trace."""
    best: tuple[int, Record, Request, list[Cycle]] | None = None
    for record in records:
        for request in record.requests if record.trace else ():
            cycles = cycles_of(request, record.trace or ())
            switches = sum(a.gear != b.gear for a, b in itertools.pairwise(cycles))
            if cycles and (best is None or switches > best[0]):
                best = (switches, record, request, cycles)
    return best[1:] if best is not None else None
