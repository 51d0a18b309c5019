"""Scores drafts and heads by replay: accept lengths, and tokens per millisecond with measured step times."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import Corpus
from sampler import KeyValueCache, decode
from seeds import CATEGORIES
from torch import Tensor

from sdsie_sglang.demo.llama import Llama
from sdsie_sglang.demo.replay import ServedText, walk

Texts = list[tuple[str, ServedText]]
"""Answers with their categories."""


def held_out_texts(corpus: Corpus, count: int) -> Texts:
    """Up to `count` held-out greedy answers."""
    rows = np.flatnonzero(corpus.held_out & corpus.greedy)[:count]
    offsets = corpus.offsets
    return [
        (
            CATEGORIES[corpus.categories[row]],
            ServedText(
                corpus.tokens[offsets[row] : offsets[row] + corpus.lengths[row]].tolist(),
                int(corpus.answer_starts[row]),
            ),
        )
        for row in rows
    ]


def accept_lengths(
    texts: Texts, flags_of: Callable[[ServedText], Sequence[Sequence[bool]]], drafted: Sequence[int]
) -> dict[str, Any]:
    """Mean tokens a cycle for each draft length: over all texts ("all") and per category."""
    tokens: dict[str, int] = defaultdict(int)
    cycles: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for category, text in texts:
        flags = flags_of(text)
        for key in ("all", category):
            tokens[key] += len(text.tokens) - text.prompt_length - 1
            for length in drafted:
                cycles[key][length] += walk(flags[:length], text).verify_count
    return {key: {str(length): round(tokens[key] / cycles[key][length], 4) for length in drafted} for key in tokens}


@torch.inference_mode()
def step_milliseconds(model: Llama, context: int = 300, repeats: int = 200) -> float:
    """Time of one decoding step of one request with its output head, replayed as a CUDA graph."""
    device = model.embedding.device
    cache = KeyValueCache(len(model.blocks), 1, 512, device, model.embedding.dtype)
    token = torch.ones(1, dtype=torch.long, device=device)
    position = torch.full((1,), context, device=device)

    def step() -> Tensor:
        return F.linear(decode(model, token, position, cache), model.embedding).argmax(-1)

    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))
