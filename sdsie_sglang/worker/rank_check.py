"""--sdsie-check-ranks: tensor-parallel ranks show each other what they are about to run.

They need not: the logits are gathered, so that every rank holds the same bits, the entropies are computed from
those, and a decision uses what cycles up to a fixed lag showed. Ranks that differ all the same would wait for
each other for ever inside the next collective; this stops them before it, with one line that says who differs.
"""

import logging
import zlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from sdsie_sglang.worker.request_state import RequestState

logger = logging.getLogger(__name__)

PREFILL = -1  # in place of a gear
PATIENCE_S = 60.0


class RanksDisagree(RuntimeError):
    """Ranks are about to run different things. One line."""


class RankCheck:
    """Args:
    group: a process group of the ranks on the host (gloo), so that no device stream is touched.
    """

    def __init__(self, group: dist.ProcessGroup, patience_s: float = PATIENCE_S) -> None:
        self._group = group
        self._patience_s = patience_s
        self._batches = 0

    def compare(self, gear: int, rids: Sequence[str], states: Sequence[RequestState]) -> None:
        """Called by every rank before every batch. Raises RanksDisagree, on all ranks or on those that heard nothing.

        Args:
            gear: K, or PREFILL.
            rids, states: of the batch's requests, in order.
        """
        missed = [state.missed for state in states]
        digest = zlib.crc32(repr((list(rids), missed)).encode())
        own = torch.tensor([self._batches, gear, len(rids), digest], dtype=torch.int64)
        views = [torch.empty_like(own) for _ in range(self._group.size())]
        try:
            dist.all_gather(views, own, group=self._group, async_op=True).wait(timedelta(seconds=self._patience_s))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise self._stopped(f"batch {self._batches}: the other ranks did not answer: {reason}") from None
        if any(not torch.equal(view, own) for view in views):
            said = "; ".join(f"rank {rank} {_in_words(view.tolist())}" for rank, view in enumerate(views))
            raise self._stopped(f"they are about to run different things: {said}")
        self._batches += 1

    def _stopped(self, why: str) -> RanksDisagree:
        line = f"sdsie: tensor-parallel ranks disagree, the server stops. {why[0].upper()}{why[1:]}"
        logger.error(line)
        return RanksDisagree(line)


def _in_words(view: list[int]) -> str:
    batch, gear, requests, digest = view
    what = "prefill" if gear == PREFILL else f"gear {gear}"
    return f"batch {batch} {what}, {requests} request{'s' * (requests != 1)} {digest:08x}"
