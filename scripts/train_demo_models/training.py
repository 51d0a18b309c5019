"""One training loop for draft and head: time-boxed, resumable, the same data and loss for both."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from features import Batch, Features, to_device
from loss import DistillationLoss
from safetensors.torch import save_file
from torch import Tensor, nn

from sdsie_sglang.demo.eagle3_head import AUX_HIDDEN_STATES, Eagle3Head
from sdsie_sglang.demo.llama import Llama

SHARD_BYTES = 15_000_000


class Student(Protocol):
    """What is trained: a model and how its outputs lie in a row."""

    model: nn.Module
    step_weights: Sequence[float]  # one per draft step
    lag: int  # the output that has read tokens 0 … p is entry p - lag

    def hidden(self, batch: Batch, features: Features) -> list[Tensor]:
        """Normed outputs (B, entries, H) of each draft step."""


class DraftStudent:
    """An ordinary language model: entry p has read tokens 0 … p, the first one included."""

    step_weights = (1.0,)
    lag = 0

    def __init__(self, model: Llama) -> None:
        self.model = model

    def hidden(self, batch: Batch, features: Features) -> list[Tensor]:
        """The draft's one output."""
        return [self.model(batch.tokens)[0]]


class HeadStudent:
    """An EAGLE-3 head: entry p - 1 holds the feature of token p - 1 and the embedding of token p."""

    step_weights = (1.0, 0.8, 0.64, 0.51, 0.41)
    lag = 1

    def __init__(self, model: Eagle3Head) -> None:
        self.model = model

    def hidden(self, batch: Batch, features: Features) -> list[Tensor]:
        """Outputs of five unrolled draft steps."""
        tapped = [tap[batch.places] for tap in features.taps]
        assert len(tapped) == len(AUX_HIDDEN_STATES)
        return self.model.unroll(batch.tokens, tapped, len(self.step_weights))


@dataclass(frozen=True)
class Plan:
    """seconds: length of the whole schedule; the learning rate falls to zero over its last `decay` share."""

    seconds: float
    batch_tokens: int = 32768
    places: int = 16384
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    decay: float = 0.45
    save_every: float = 60.0

    def rate(self, step: int, elapsed: float) -> float:
        """Learning rate after `elapsed` seconds of training."""
        left = max(0.0, 1 - elapsed / self.seconds)
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps, left / self.decay)


@dataclass
class Progress:
    """What a resumed run goes on from."""

    step: int = 0
    epoch: int = 0
    elapsed: float = 0.0
    places: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains a student on the corpus rows that are not held out."""

    def __init__(self, student: Student, features: Features, plan: Plan, run: Path, name: str) -> None:
        self.student, self.features, self.plan, self.run, self.name = student, features, plan, run, name
        parameters = list(student.model.parameters())
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=plan.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=parameters[0].is_cuda,
        )
        self.progress = Progress()
        if self._state_file.is_file():
            state = torch.load(self._state_file, map_location=features.tokens.device, weights_only=True)
            student.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])

    @property
    def _state_file(self) -> Path:
        return self.run / f"{self.name}.state.pt"

    def train(self, until: float) -> None:
        """Go on until `until` seconds of training in all (at most the plan's)."""
        rows = np.flatnonzero(~self.features.corpus.held_out)
        progress, until = self.progress, min(until, self.plan.seconds)
        recent: list[Tensor] = []
        begun = time.monotonic() - progress.elapsed
        saved = progress.elapsed
        while progress.elapsed < until:
            rng = np.random.default_rng(1000 + progress.epoch + 1000 * progress.step)
            for batch in self.features.batches(rows, self.plan.batch_tokens, rng):
                rate = self.plan.rate(progress.step, progress.elapsed)
                recent.append(self._step(batch, rate, rng))
                progress.step += 1
                progress.places += self.plan.places
                if progress.step % 50 == 0:
                    self._note(recent, rate)
                    recent = []
                progress.elapsed = time.monotonic() - begun
                if progress.elapsed - saved > self.plan.save_every:
                    self.save()
                    saved = progress.elapsed
                if progress.elapsed >= until:
                    break
            else:
                progress.epoch += 1
        if recent:
            self._note(recent, 0.0)
        self.save()

    def _step(self, batch: Batch, rate: float, rng: np.random.Generator) -> Tensor:
        """One update; returns (2, K): divergence and agreement of each draft step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        row, place = answer_places(batch, self.plan.places, rng)
        device = batch.tokens.device
        row_index, place_index = to_device(row, device), to_device(place, device)
        entry = place_index - self.student.lag
        hidden = torch.stack([output[row_index, entry] for output in self.student.hidden(batch, self.features)])
        teacher = self.features.final[batch.places[row_index, place_index]]
        weights = torch.tensor(self.student.step_weights, device=device)
        embedding = self.student.model.embedding
        loss, losses, agreed = DistillationLoss.apply(hidden, teacher, embedding, weights)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.student.model.parameters(), 1.0)
        self.optimizer.step()
        return torch.stack([losses.detach(), agreed.detach()])

    def _note(self, recent: list[Tensor], rate: float) -> None:
        losses, agreed = torch.stack(recent).mean(0).tolist()
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(f"{self.name}: divergence {losses} at step {self.progress.step}")
        point = {
            "step": self.progress.step,
            "seconds": round(self.progress.elapsed, 1),
            "rate": rate,
            "divergence": [round(value, 4) for value in losses],
            "agreement": [round(value, 4) for value in agreed],
        }
        self.progress.curve.append(point)
        if self.progress.step % 500 == 0:
            print(f"  {self.name} {json.dumps(point)}", flush=True)

    def save(self) -> None:
        """Write the state to go on from, the weights as they ship, and the curve."""
        state = {
            "model": self.student.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
        }
        new = self._state_file.with_suffix(".new")
        torch.save(state, new)
        new.replace(self._state_file)  # at once: a kill while it is written leaves the state before
        save_shards(self.student.model.named_weights(), self.run, self.name)
        (self.run / f"{self.name}.curve.json").write_text(json.dumps(vars(self.progress)))


def answer_places(batch: Batch, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`count` random (row, p) with both token p and token p + 1 in the row's answer."""
    spans = np.maximum(batch.lengths - 1 - batch.answer_starts, 0)
    rows = np.repeat(np.arange(len(spans)), spans)
    within = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
    chosen = rng.choice(len(rows), count, replace=len(rows) < count)
    return rows[chosen], (batch.answer_starts[rows] + within)[chosen]


def save_shards(weights: dict[str, Tensor], folder: Path, stem: str) -> list[Path]:
    """Write bfloat16 weights as files of at most SHARD_BYTES, `{stem}-1.safetensors` and so on."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        stored = tensor.to("cpu", torch.bfloat16).contiguous().clone()
        if size + stored.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += stored.nbytes
    paths = []
    for number, shard in enumerate(shards, 1):
        paths.append(folder / f"{stem}-{number}.safetensors")
        save_file(shard, paths[-1], metadata={"format": "pt"})
    return paths
