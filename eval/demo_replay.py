"""Accept lengths of the demo's draft and head by replay, and whether servers agree with it.

Accept length here is (answer tokens - 1) / cycles: the prefill's token is not counted, so it is 0.02 to
0.04 lower than SGLang's own figure.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sdsie_sglang.demo import DemoCheckpoints, DemoError
from sdsie_sglang.demo.eagle3_head import Eagle3Head
from sdsie_sglang.demo.llama import Llama
from sdsie_sglang.demo.replay import ServedText, Walk, draft_flags, head_flags, repeated_share, walk

STEPS = 7
DRAFT_LENGTHS = (3, 5, 7)
CHAIN_LENGTHS = (3, 5)
MAX_REPEATED = 0.3
"""An answer whose share of repeated 4-grams is higher counts as looping."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Replayed:
    """One answer with its flags: flags[k][p] as `replay.walk` takes them, for STEPS draft steps."""

    id: str
    category: str
    is_code: bool
    text: ServedText
    flags: dict[str, list[list[bool]]]  # "draft", "shifted", "eagle3"

    @property
    def answer(self) -> list[int]:
        """The answer's token ids."""
        return self.text.tokens[self.text.prompt_length :]

    @property
    def loops(self) -> bool:
        """Whether the answer repeats itself so much that it flatters every draft."""
        return repeated_share(self.answer) > MAX_REPEATED

    def walk(self, drafter: str, drafted: int) -> Walk:
        """Cycles of this answer."""
        return walk(self.flags[drafter][:drafted], self.text)


class Replayer:
    """The three models in float32 on the CPU."""

    def __init__(self, models: DemoCheckpoints) -> None:
        if models.draft is None or models.eagle3 is None:
            raise DemoError("the weights of draft and head are not shipped with this checkout")
        self.target = Llama.from_checkpoint(models.target).float()
        self.draft = Llama.from_checkpoint(models.draft).float()
        self.head = Eagle3Head.from_checkpoint(models.eagle3, models.target).float()

    def flags(self, drafter: str, text: ServedText) -> list[list[bool]]:
        """Flags of STEPS draft steps; a draft's are the same at each, as those of any language model."""
        if drafter == "eagle3":
            return head_flags(self.target, self.head, text, STEPS)
        return [draft_flags(self.draft, text, shifted=drafter == "shifted")] * STEPS

    def replay(self, answer: dict[str, Any], drafters: Sequence[str]) -> Replayed:
        """Replay one answer of a record (`id`, `category`, `is_code`, `tokens`, `prompt_length`)."""
        text = ServedText(answer["tokens"], answer["prompt_length"])
        flags = {drafter: self.flags(drafter, text) for drafter in drafters}
        return Replayed(answer["id"], answer["category"], answer["is_code"], text, flags)


def accept_length(answers: Iterable[Replayed], drafter: str, drafted: int) -> float:
    """Tokens a cycle over all these answers."""
    tokens, cycles = _sums(answers, drafter, drafted).sum(0)
    return float(tokens / cycles)


def accept_interval(answers: Sequence[Replayed], drafter: str, drafted: int) -> tuple[float, float]:
    """95 % bootstrap interval over prompts."""
    sums = _sums(answers, drafter, drafted)
    picks = np.random.default_rng(469507).integers(len(sums), size=(RESAMPLES, len(sums)))
    tokens, cycles = np.moveaxis(sums[picks].sum(1), 1, 0)
    low, high = np.quantile(tokens / cycles, [0.025, 0.975])
    return float(low), float(high)


def position_rates(answers: Iterable[Replayed], drafter: str) -> list[float]:
    """For the 1st … 7th drafted token: how often it is right when all before it were."""
    walks = [answer.walk(drafter, STEPS) for answer in answers]
    accepted = np.sum([walk.accepted for walk in walks], 0)
    return (accepted / np.sum([walk.reached for walk in walks], 0)).tolist()


def _sums(answers: Iterable[Replayed], drafter: str, drafted: int) -> np.ndarray:
    return np.array([[len(answer.answer) - 1, answer.walk(drafter, drafted).verify_count] for answer in answers], float)


@dataclass(frozen=True)
class Agreement:
    """A served record against replay and against plain decoding.

    predicted: prompts whose verify count the replay names exactly (None for a tree); identical: prompts whose
    tokens are those of the plain record (None without one).
    """

    method: str
    prompts: int
    new_tokens: int
    predicted: int | None
    identical: int | None
    accept_length: float | None
    differing: list[str]


def compare(record: dict[str, Any], plain: dict[str, Any] | None, replayer: Replayer) -> Agreement:
    """Compare one `served-….json`."""
    answers = record["answers"]
    wanted = {answer["id"]: answer["tokens"] for answer in plain["answers"]} if plain else {}
    both = [answer for answer in answers if answer["id"] in wanted]
    same = sum(_same(answer["tokens"], wanted[answer["id"]]) for answer in both)
    speculative = record["model"] is not None
    differing, predicted = [], None
    if speculative and record["topk"] == 1:
        drafter = "shifted" if record["shifted"] else record["model"]
        for answer in answers:
            replayed = replayer.replay(answer, [drafter])
            count = replayed.walk(drafter, record["drafted"]).verify_count
            if count != answer["verify_count"]:
                differing.append(f"{answer['id']}: served {answer['verify_count']}, replayed {count}")
        predicted = len(answers) - len(differing)
    emitted = sum(len(answer["tokens"]) - answer["prompt_length"] - 1 for answer in answers)
    cycles = sum(answer["verify_count"] or 0 for answer in answers)
    length = emitted / cycles if cycles else None
    same_or_unknown = same if both else None
    return Agreement(
        record["method"], len(answers), record["new_tokens"], predicted, same_or_unknown, length, differing
    )


def _same(tokens: list[int], wanted: list[int]) -> bool:
    """Equal as far as both were asked to go."""
    shared = min(len(tokens), len(wanted))
    return tokens[:shared] == wanted[:shared]


def read_served(folder: Path) -> dict[str, dict[str, Any]]:
    """Every `served-….json` by its method."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("served-*.json"))]
    return {record["method"]: record for record in records}


def set_threads() -> None:
    """Small models: one thread is as fast as many, and the same everywhere."""
    torch.set_num_threads(1)
