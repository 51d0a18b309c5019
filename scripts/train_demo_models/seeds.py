"""Openings of user turns, which the target itself completes: nine categories, topic words, temperatures.

`seed_phrases.json` holds the openings of each category; `{t}` in one is replaced by a topic, in "coding" by a
program's subject. An opening may stop anywhere in a sentence, and one is empty.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

_PHRASES = json.loads(Path(__file__).with_name("seed_phrases.json").read_text())
OPENINGS: dict[str, list[str]] = _PHRASES["openings"]
CATEGORIES = tuple(OPENINGS)
WEIGHTS = dict.fromkeys(CATEGORIES, 1.0) | {"coding": 2.2, "math": 1.2, "reference": 1.2}
USER_TEMPERATURES = (0.6, 0.8, 0.8, 1.0)
ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.5, 0.5, 0.7, 0.7, 0.7, 0.8, 0.8)
"""Three in ten are answered greedily; many of those loop and are dropped later (training.json counts what is left)."""


@dataclass(frozen=True)
class Seed:
    """One user turn to be completed. A temperature of 0 is greedy."""

    category: str
    opening: str
    user_temperature: float
    answer_temperature: float


def make_seeds(count: int, seed: int) -> list[Seed]:
    """Seeds in a fixed random order; the category shares follow `WEIGHTS`."""
    rng = random.Random(seed)
    openings = {category: _openings(category, rng) for category in CATEGORIES}
    picked = rng.choices(CATEGORIES, [WEIGHTS[category] for category in CATEGORIES], k=count)
    return [
        Seed(
            category,
            next(openings[category]),
            rng.choice(USER_TEMPERATURES),
            rng.choice(ANSWER_TEMPERATURES),
        )
        for category in picked
    ]


def _openings(category: str, rng: random.Random) -> Iterator[str]:
    """Endless filled openings; one without a topic comes a third as often as one with."""
    topics = _PHRASES["programs" if category == "coding" else "topics"]
    filled = []
    for opening in OPENINGS[category]:
        words = topics if "{t}" in opening else [""] * (len(topics) // 3)
        filled += [opening.replace("{t}", word) for word in words]
    rng.shuffle(filled)
    return cycle(filled)
