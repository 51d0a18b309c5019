"""Turns sampled conversations into training and held-out rows: filtered, de-duplicated, split by prompt."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sampler import Conversations
from seeds import CATEGORIES, Seed

MIN_ANSWER = 24
MAX_REPEATED = 0.3
"""Answers whose share of repeated 4-grams is higher are loops and are dropped."""
HELD_OUT = 0.05
EVALUATION_OVERLAP = 7
"""A user turn that shares this many consecutive tokens with an evaluation prompt is dropped."""


@dataclass(frozen=True)
class Corpus:
    """Rows as one flat token array; the columns have one entry per row."""

    tokens: np.ndarray  # uint16, flat
    lengths: np.ndarray  # tokens of the row
    answer_starts: np.ndarray  # index, in the row, of the answer's first token
    categories: np.ndarray  # index into CATEGORIES
    greedy: np.ndarray  # answered greedily
    held_out: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        """Index of each row's first token in `tokens`."""
        return np.cumsum(self.lengths) - self.lengths

    def save(self, path: Path) -> None:
        """Write one compressed file."""
        np.savez_compressed(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(**{name: arrays[name] for name in arrays.files})


def build(
    conversations: Conversations,
    seeds: list[Seed],
    user_start: int,
    between: int,
    evaluation: list[list[int]],
) -> tuple[Corpus, dict[str, int]]:
    """Filter and split; also returns how many rows each rule dropped.

    user_start: tokens before the user's words; between: tokens from the end of the user's turn to the answer;
    evaluation: the evaluation prompts' token ids.
    """
    forbidden = {gram for ids in evaluation for gram in _grams(ids, EVALUATION_OVERLAP)} | {
        tuple(ids) for ids in evaluation
    }
    rows, columns, counts, seen = [], [], Counter[str](), set()
    tokens = conversations.tokens.numpy().astype(np.uint16)
    facts = zip(
        conversations.lengths.tolist(),
        conversations.answer_starts.tolist(),
        conversations.seeds.tolist(),
        strict=True,
    )
    for row, (length, start, seed) in enumerate(facts):
        ids = tokens[row, :length]
        user = tuple(ids[user_start : start - between - 1].tolist())
        verdict = _verdict(ids, start, user, forbidden, seen)
        counts[verdict] += 1
        if verdict != "kept":
            continue
        rows.append(ids)
        columns.append((length, start, CATEGORIES.index(seeds[seed].category),
                        seeds[seed].answer_temperature == 0, _is_held_out(user)))  # fmt: skip
    lengths, starts, categories, greedy, held_out = (np.array(column) for column in zip(*columns, strict=True))
    return Corpus(np.concatenate(rows), lengths, starts, categories, greedy, held_out), dict(counts)


def _verdict(ids: np.ndarray, start: int, user: tuple[int, ...], forbidden: set, seen: set) -> str:
    if start == 0 or len(user) < 3:
        return "no user turn"
    answer = ids[start:]
    if len(answer) < MIN_ANSWER:
        return "short answer"
    if repeated_share(answer) > MAX_REPEATED:
        return "loop"
    if user in forbidden or any(gram in forbidden for gram in _grams(user, EVALUATION_OVERLAP)):
        return "evaluation prompt"
    key = (user, answer[:MIN_ANSWER].tobytes())
    if key in seen:
        return "duplicate"
    seen.add(key)
    return "kept"


def repeated_share(ids: np.ndarray) -> float:
    """Share of 4-grams that occurred before in `ids`: uint16."""
    wide = ids.astype(np.uint64)
    packed = wide[:-3] | wide[1:-2] << np.uint64(16) | wide[2:-1] << np.uint64(32) | wide[3:] << np.uint64(48)
    return 1 - len(np.unique(packed)) / len(packed)


def _grams(ids: "list[int] | tuple[int, ...]", size: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]


def _is_held_out(user: tuple[int, ...]) -> bool:
    digest = hashlib.sha256(json.dumps(user).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32
