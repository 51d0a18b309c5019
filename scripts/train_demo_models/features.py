"""Keeps the corpus and the target's hidden states of it on the device, and cuts batches out of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from corpus import Corpus
from torch import Tensor

from sdsie_sglang.demo.llama import HIDDEN, Llama


@dataclass(frozen=True)
class Batch:
    """Rows of similar length, padded at the end by repeating the last token."""

    tokens: Tensor  # (B, T)
    places: Tensor  # (B, T) index of each token in the flat arrays
    lengths: np.ndarray  # (B,)
    answer_starts: np.ndarray  # (B,)
    rows: np.ndarray  # (B,) row in the corpus


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy without making the host wait for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Features:
    """final: (N, H) normed last hidden states; taps: per tapped layer (N, H), for N tokens in the corpus."""

    def __init__(self, corpus: Corpus, target: Llama, taps: Sequence[int], batch_tokens: int) -> None:
        device, dtype = target.embedding.device, target.embedding.dtype
        self.corpus, self.offsets = corpus, corpus.offsets
        self.tokens = torch.from_numpy(corpus.tokens.astype(np.int32)).to(device)
        self.final = torch.empty(len(self.tokens), HIDDEN, device=device, dtype=dtype)
        self.taps = [torch.empty_like(self.final) for _ in taps]
        with torch.inference_mode():
            for batch in self.batches(np.arange(len(corpus.lengths)), batch_tokens, np.random.default_rng(0)):
                final, tapped = target(batch.tokens, taps)
                inside = torch.arange(batch.tokens.shape[1]) < torch.from_numpy(batch.lengths)[:, None]
                inside = inside.to(device)
                places = batch.places[inside]
                for kept, new in zip([self.final, *self.taps], [final, *tapped], strict=True):
                    kept[places] = new[inside]

    def batches(self, rows: np.ndarray, batch_tokens: int, rng: np.random.Generator) -> Iterator[Batch]:
        """All of `rows` once, in random batches of about `batch_tokens` tokens, padding included."""
        lengths = self.corpus.lengths[rows]
        ordered = rows[np.argsort(lengths + rng.uniform(0, 8, len(rows)))]
        groups, group = [], [ordered[0]]
        for row in ordered[1:]:
            if (len(group) + 1) * self.corpus.lengths[row] > batch_tokens:
                groups.append(np.array(group))
                group = []
            group.append(row)
        groups.append(np.array(group))
        rng.shuffle(groups)
        for group in groups:
            yield self._batch(group)

    def _batch(self, rows: np.ndarray) -> Batch:
        lengths = self.corpus.lengths[rows]
        within = np.minimum(np.arange(lengths.max())[None], lengths[:, None] - 1)
        places = to_device(self.offsets[rows][:, None] + within, self.tokens.device)
        tokens = self.tokens[places].long()
        return Batch(tokens, places, lengths, self.corpus.answer_starts[rows], rows)
