"""Writes conversations with the target: it completes the user's turn, then answers, in one stream per slot.

Every slot decodes one token a step at its own place; a finished slot starts the next seed at once. All
state lives on the device and no step looks at it from the host, so that a step is one CUDA graph.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from seeds import Seed
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sdsie_sglang.demo.llama import (
    GROUP,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Block,
    Llama,
    linear,
    rms_norm,
    rotary_table,
    rotate,
)

END_OF_TURN = 2
USER_TOKENS = 72
"""A user turn that is longer, opening included, is dropped."""


@dataclass(frozen=True)
class Conversations:
    """Rows of finished conversations, on the host."""

    tokens: Tensor  # (rows, length) int32
    lengths: Tensor  # (rows,)
    answer_starts: Tensor  # (rows,) index of the answer's first token; 0: the user's turn never ended
    seeds: Tensor  # (rows,) index into the seed list


class KeyValueCache:
    """Keys and values of every layer, (slots, 3, length, D) each."""

    def __init__(self, layers: int, slots: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (layers, slots, KV_HEADS, length, HEAD_DIM)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.cosines, self.sines = rotary_table(length, device, dtype)
        self.slots = torch.arange(slots, device=device)[:, None]
        self.heads = torch.arange(KV_HEADS, device=device)[None, :]
        self.places = torch.arange(length, device=device)


def decode(model: Llama, tokens: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
    """Normed hidden states (slots, H) after one token per slot, cached at `positions`: (slots,)."""
    x = F.embedding(tokens, model.embedding)
    cosines, sines = cache.cosines[positions, None], cache.sines[positions, None]  # (slots, 1, D)
    hidden_places = (cache.places > positions[:, None])[:, None, None]  # (slots, 1, 1, length)
    bias = torch.zeros(hidden_places.shape, device=x.device, dtype=x.dtype).masked_fill(hidden_places, -torch.inf)
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        joined = linear(rms_norm(x, block.input_norm), block.qkv).unflatten(-1, (-1, HEAD_DIM))
        rotated = rotate(joined[:, : HEADS + KV_HEADS], cosines, sines)
        where = (cache.slots, cache.heads, positions[:, None])
        cache.keys[layer][where] = rotated[:, HEADS:]
        cache.values[layer][where] = joined[:, HEADS + KV_HEADS :]
        # The three query heads of a group act as three rows of one head, so keys are read once.
        queries = rotated[:, :HEADS].unflatten(1, (KV_HEADS, GROUP))
        attended = F.scaled_dot_product_attention(queries, cache.keys[layer], cache.values[layer], attn_mask=bias)
        x = block.feed_forward(x + linear(attended.flatten(1), block.out))
    return rms_norm(x, model.norm)


class Sampler:
    """`slots` streams of at most `length` tokens; keeps the first `rows` conversations that finish."""

    def __init__(
        self,
        target: Llama,
        tokenizer: PreTrainedTokenizerBase,
        seeds: list[Seed],
        slots: int,
        length: int,
        rows: int,
    ) -> None:
        self.target, self.length, self.rows = target, length, rows
        device = target.embedding.device
        before, self.between = chat_frame(tokenizer)
        self.user_start = len(before)
        encoded = [before + tokenizer(seed.opening, add_special_tokens=False).input_ids for seed in seeds]
        width = max(map(len, encoded))
        self.openings = torch.tensor([ids + [0] * (width - len(ids)) for ids in encoded], device=device)
        self.opening_lengths = torch.tensor([len(ids) for ids in encoded], device=device)
        temperatures = [(seed.user_temperature, seed.answer_temperature) for seed in seeds]
        self.temperatures = torch.tensor(temperatures, device=device)
        self.reply = torch.tensor(self.between, device=device)

        self.cache = KeyValueCache(len(target.blocks), slots, length, device, target.embedding.dtype)
        self.seed = torch.arange(slots, device=device) % len(seeds)
        self.next_seed = torch.tensor(slots, device=device)
        self.history = torch.zeros(slots, length, dtype=torch.long, device=device)
        self.history[:, :width] = self.openings[self.seed]
        self.known = self.opening_lengths[self.seed].clone()
        self.position = torch.zeros(slots, dtype=torch.long, device=device)
        self.answer_start = torch.zeros(slots, dtype=torch.long, device=device)
        # One row more than asked for: unfinished slots and surplus rows are written there.
        self.kept = torch.zeros(rows + 1, length, dtype=torch.int32, device=device)
        self.kept_facts = torch.zeros(rows + 1, 3, dtype=torch.long, device=device)
        self.finished_rows = torch.zeros((), dtype=torch.long, device=device)

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every slot."""
        tokens = self.history.gather(1, self.position[:, None])[:, 0]
        hidden = decode(self.target, tokens, self.position, self.cache)
        answering = self.answer_start > 0
        named = self._choose(F.linear(hidden, self.target.embedding), answering)

        following = self.position + 1
        fresh = following >= self.known
        old = self.history.gather(1, following[:, None])[:, 0]
        self.history.scatter_(1, following[:, None], torch.where(fresh, named, old)[:, None])
        self.known.copy_(torch.maximum(self.known, following + 1))

        ended = fresh & (named == END_OF_TURN)
        self._open_answers(ended & ~answering, following)
        user_too_long = (self.answer_start == 0) & (following - self.user_start >= USER_TOKENS)
        finished = (ended & answering) | user_too_long | (following >= self.length - 1)
        self._keep(finished, following + 1)
        self.position.copy_(following)
        self._restart(finished)

    def _choose(self, logits: Tensor, answering: Tensor) -> Tensor:
        """argmax(logits + temperature * Gumbel noise): a sample at that temperature, greedy at 0."""
        pair = self.temperatures[self.seed]
        temperature = torch.where(answering, pair[:, 1], pair[:, 0])
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_()
        return noise.mul_(-temperature[:, None]).add_(logits).argmax(-1)

    def _open_answers(self, turn_over: Tensor, following: Tensor) -> None:
        """Where the user's turn just ended, put the template's text between the turns behind it."""
        start = following + 1
        places = (start[:, None] + torch.arange(len(self.between), device=start.device)).clamp(max=self.length - 1)
        old = self.history.gather(1, places)
        self.history.scatter_(1, places, torch.where(turn_over[:, None], self.reply, old))
        behind = start + len(self.between)
        self.known.copy_(torch.where(turn_over, behind, self.known))
        self.answer_start.copy_(torch.where(turn_over, behind, self.answer_start))

    def _keep(self, finished: Tensor, lengths: Tensor) -> None:
        order = self.finished_rows + finished.cumsum(0) - 1
        row = order.masked_fill(~finished | (order >= self.rows), self.rows)
        self.kept[row] = self.history.int()
        self.kept_facts[row] = torch.stack([lengths, self.answer_start, self.seed], 1)
        self.finished_rows += finished.sum()

    def _restart(self, finished: Tensor) -> None:
        """Give finished slots the next seeds. The system prompt's keys and values stay where they are."""
        upcoming = (self.next_seed + finished.cumsum(0) - 1) % len(self.openings)
        self.next_seed += finished.sum()
        self.seed.copy_(torch.where(finished, upcoming, self.seed))
        width = self.openings.shape[1]
        opened = torch.where(finished[:, None], self.openings[self.seed], self.history[:, :width])
        self.history[:, :width] = opened
        self.known.copy_(torch.where(finished, self.opening_lengths[self.seed], self.known))
        self.position.masked_fill_(finished, self.user_start - 1)
        self.answer_start.masked_fill_(finished, 0)

    def run(self, seconds: float) -> Conversations:
        """Decode for about `seconds` or until enough rows are full; slots still open give cut-off rows."""
        advance = self._captured() if self.history.is_cuda else self.step
        start, steps = time.monotonic(), 0
        while time.monotonic() - start < seconds and int(self.finished_rows) < self.rows:
            for _ in range(25):
                advance()
            steps += 25
            if steps % 500 == 0:
                rate = steps * len(self.seed) / (time.monotonic() - start)
                print(f"  {steps} steps, {int(self.finished_rows)} rows, {rate:.0f} tokens/s", flush=True)
        with torch.inference_mode():
            self._keep(self.answer_start > 0, self.position + 1)
        count = min(int(self.finished_rows), self.rows)
        facts = self.kept_facts[:count].cpu()
        return Conversations(self.kept[:count].cpu(), facts[:, 0], facts[:, 1], facts[:, 2])

    def _captured(self) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The chat template's tokens before the user's words, and between end of turn and answer."""
    marker = "QQQQ"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split(marker)
    encoded = [tokenizer(part, add_special_tokens=False).input_ids for part in (before, after)]
    return encoded[0], encoded[1][1:]
