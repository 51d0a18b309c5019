"""The one prompt set of every measurement here: 27 timed prompts of our own and 3 for warming up.

Three are the original project's reference prompts (a poem, physics, code); the others are three in each of
MT-Bench's eight categories, written for this project. They are never trained on.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

PROMPTS_FILE = Path(__file__).with_name("data") / "prompts.jsonl"
CATEGORIES = (
    "reference",
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)


@dataclass(frozen=True)
class Prompt:
    """One user turn. `kind` says whether it may be timed; warm-up prompts have the category `warmup`."""

    id: str
    kind: Literal["timed", "warmup"]
    category: str
    text: str

    @property
    def is_code(self) -> bool:
        """Whether the answer is a program: the coding category and the reference prompt for code."""
        return self.category == "coding" or self.id == "reference-code"


def timed_prompts(categories: Iterable[str] = CATEGORIES) -> list[Prompt]:
    """The prompts of these categories, in the file's order: 27 for all categories."""
    wanted = set(categories)
    return [prompt for prompt in all_prompts() if prompt.kind == "timed" and prompt.category in wanted]


def warmup_prompts() -> list[Prompt]:
    """The 3 prompts that are run before timing and never timed."""
    return [prompt for prompt in all_prompts() if prompt.kind == "warmup"]


@cache
def all_prompts() -> tuple[Prompt, ...]:
    """All 30 prompts in the file's order."""
    return tuple(Prompt(**json.loads(line)) for line in PROMPTS_FILE.read_text().splitlines())
