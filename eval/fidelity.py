"""Did a method change what the target says, or only round it differently?

Token identity against plain decoding says where answers part. In bf16 every method parts from plain somewhere, since
one token and several are computed by other kernels. So where answers part, the target itself is asked in float32
(teacher forced, PyTorch): how much likelier is plain's token than the method's (a near tie is rounding), how far the
served precision's distributions are from float32's (KL, the size of rounding), and how likely each whole answer is.

    python -m sdsie_sglang.eval.fidelity eval/results/ruler/short     # writes fidelity.json there
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel
from tqdm import tqdm

from sdsie_sglang.demo import DemoError
from sdsie_sglang.eval.arguments import count

MAX_MARGIN = 0.25
"""Nats. A token that the target finds less likely than plain's by more than this was not lost to rounding."""


FILE = "fidelity.json"


class Identity(BaseModel):
    """Answers against plain's of the same repetition.

    Args:
        identical: share of answers that are the same to the last token.
        prefix: mean share of plain's answer before the first difference.
        first_difference: median index of it among answers that differ.
    """

    answers: int
    identical: float
    prefix: float
    first_difference: float | None


class Parting(BaseModel):
    """One pair of answers where it parts. In nats, of the target in float32.

    Args:
        margin: log-probability of plain's token less the method's, after the common prefix.
        rounding_kl: mean KL(float32 || served precision) over the positions of plain's answer up to there.
        plain_nll, method_nll: mean negative log-likelihood of each whole answer.
    """

    method: str
    key: str
    index: int
    margin: float
    rounding_kl: float
    plain_nll: float
    method_nll: float

    @property
    def is_rounding(self) -> bool:
        return abs(self.margin) <= MAX_MARGIN


class Fidelity(BaseModel):
    """What the target said of a folder's differing answers.

    Args:
        judged: the servers (paths of their records in the folder) whose answers were compared with plain's.
        limit: differing answers of a server that were judged at most.
        cut: answers that end where the other of the pair goes on: there is no token to judge.
    """

    judged: list[str]
    limit: int
    partings: list[Parting]
    cut: int = 0


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs (or where one ends), or None."""
    for i, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return i
    return None if len(plain) == len(other) else min(len(plain), len(other))


def identity(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Identity:
    """Of (plain, method) answers."""
    places = [first_difference(plain, other) for plain, other in pairs]
    parted = [place for place in places if place is not None]
    shares = [1.0 if at is None else at / max(1, len(plain)) for (plain, _), at in zip(pairs, places, strict=True)]
    return Identity(
        answers=len(pairs),
        identical=1 - len(parted) / len(pairs),
        prefix=float(np.mean(shares)),
        first_difference=float(np.median(parted)) if parted else None,
    )


def served_dtype(target: str, asked: str) -> Any:
    """The precision (a torch.dtype) in which SGLang serves a target that is started with `--dtype asked`."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig(target, dtype=asked).dtype


class Judge:
    """The target in float32 and in the served precision, on a GPU if there is one."""

    def __init__(self, target: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

        def load(kind: Any) -> Any:
            return AutoModelForCausalLM.from_pretrained(target, dtype=kind).to(self._device).eval()

        self._exact = load(torch.float32)
        served = served_dtype(target, dtype)
        self._served = self._exact if served == torch.float32 else load(served)

    def log_probs(self, ids: Sequence[int], start: int, *, served: bool = False) -> Any:
        """float32 [len(ids) - start, vocabulary]: of each token from `start` on, given all before it."""
        torch = self._torch
        model = self._served if served else self._exact
        with torch.inference_mode():
            logits = model(torch.tensor([list(ids)], device=self._device)).logits[0, start - 1 : -1]
        return torch.log_softmax(logits.float(), -1)

    def part(self, method: str, key: str, prompt: list[int], plain: list[int], other: list[int]) -> Parting | None:
        """What lies behind the first difference; None if there is none, or one answer ends where the other goes on."""
        at = first_difference(plain, other)
        if at is None or at >= min(len(plain), len(other)):
            return None
        start = len(prompt)
        exact = self.log_probs(prompt + plain, start)
        served = self.log_probs(prompt + plain, start, served=True)
        kl = (exact.exp() * (exact - served)).sum(-1)[: at + 1].mean()
        theirs = self.log_probs(prompt + other, start)
        return Parting(
            method=method,
            key=key,
            index=at,
            margin=float(exact[at, plain[at]] - exact[at, other[at]]),
            rounding_kl=float(kl),
            plain_nll=self._nll(exact, plain),
            method_nll=self._nll(theirs, other),
        )

    def _nll(self, log_probs: Any, ids: list[int]) -> float:
        taken = self._torch.tensor(ids, device=log_probs.device)
        return float(-log_probs.gather(1, taken[:, None]).mean())


def measure(folder: Path, limit: int) -> Fidelity:
    """Asks the target about the first `limit` differing answers of each server. Raises ValueError, Damaged."""
    from sdsie_sglang.eval.chat import chat_ids
    from sdsie_sglang.eval.plan import asks, resolve_models
    from sdsie_sglang.eval.record import read_all

    records = read_all(folder)
    if not records:
        raise ValueError(f"{folder} holds no records")
    plain = {
        (r.datapoint.part, r.datapoint.repetition, q.key): q
        for r in records
        if r.datapoint.role == "open"
        for q in r.requests
    }
    config = records[0].config
    texts = {
        ask.key: ask.text
        for part in config.parts
        for phase in range(len(config.phases_of(part)))
        for ask in asks(config, part, phase, 0)
    }
    models = resolve_models(config)
    judge: Judge | None = None
    found: list[Parting] = []
    cut = 0
    others = [record for record in records if record.datapoint.role != "open"]
    for record in tqdm(others, unit="server"):
        asked = 0
        for request in record.requests:
            base = plain.get((record.datapoint.part, record.datapoint.repetition, request.key))
            if base is None or base.output_ids == request.output_ids or asked >= limit:
                continue
            judge = judge or Judge(models.target, str(record.server_info.get("dtype", "float32")))
            prompt = chat_ids(models.target, texts[request.key])
            name = f"{record.datapoint.part}/{record.datapoint.method}"
            parting = judge.part(name, request.key, prompt, base.output_ids, request.output_ids)
            if parting is None:
                cut += 1
            else:
                found.append(parting)
                asked += 1
    judged = [str(record.datapoint.path(Path())) for record in others]
    return Fidelity(judged=judged, limit=limit, partings=found, cut=cut)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.fidelity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="a folder of records of sdsie_sglang.eval.run")
    parser.add_argument("--limit", type=count, default=40, help="differing answers of each server (default 40)")
    args = parser.parse_args(argv)
    try:
        found = measure(args.folder, args.limit)
    except (ValueError, OSError, DemoError) as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return 2
    path = args.folder / FILE
    path.write_text(found.model_dump_json(indent=1) + "\n")
    rounded = sum(p.is_rounding for p in found.partings)
    print(
        f"{len(found.judged)} servers, {len(found.partings)} differing answers judged, {rounded} part at a near tie "
        f"(within {MAX_MARGIN} nats): {path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
