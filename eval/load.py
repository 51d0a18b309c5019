"""Sends requests and times them: warm-up, timed phases, prefill alone."""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from sdsie_sglang.eval.plan import Ask, WarmUp
from sdsie_sglang.eval.record import Request, WarmUpReading
from sdsie_sglang.eval.rules import settled

TWO_EVENTS = 1_000_000
"""SGLang's stream_interval, in tokens: an answer comes as its first token and then as a whole. Otherwise every cycle
would send an event, and a method with fewer cycles would also save on messages."""


class RequestFailed(RuntimeError):
    """A request that was not answered as it should be: the whole run is void."""


class Streams(Protocol):
    """What is used of `server.Server`."""

    def stream(self, prompt: str | list[int], **sampling: Any) -> Iterable[dict[str, Any]]: ...


def sha(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def answer(
    server: Streams, ids: list[int], tokens: int, *, ignore_eos: bool = False, clock: Callable[[], float]
) -> tuple[dict[str, Any], float, float, float]:
    """The last event of a greedy answer, and when it was asked for, began and ended. Raises RequestFailed."""
    started = clock()
    first = ended = 0.0
    event: dict[str, Any] = {}
    options: dict[str, Any] = {"stream_interval": TWO_EVENTS, **({"ignore_eos": True} if ignore_eos else {})}
    try:
        for newest in server.stream(ids, max_new_tokens=tokens, **options):
            event, ended = newest, clock()
            first = first or ended
    except Exception as error:
        raise RequestFailed(f"a request failed: {error}") from error
    if "error" in event:
        raise RequestFailed(f"a request failed: {event['error']}")
    finish = (event.get("meta_info") or {}).get("finish_reason") or {}
    if not event.get("output_ids") or finish.get("type") not in ("stop", "length"):
        raise RequestFailed(f"a request ended without an answer: finish reason {finish or 'missing'}")
    return event, started, first, ended


def timed(
    server: Streams, ask: Ask, ids: list[int], phase: int, tokens: int, ignore_eos: bool, clock: Callable[[], float]
) -> Request:
    """One timed request."""
    event, started, first, ended = answer(server, ids, tokens, ignore_eos=ignore_eos, clock=clock)
    meta = event["meta_info"]
    return Request(
        key=ask.key,
        prompt=ask.prompt.id,
        category=ask.prompt.category,
        is_code=ask.prompt.is_code,
        phase=phase,
        input_tokens=len(ids),
        input_ids_sha=sha(ids),
        output_ids=event["output_ids"],
        start_s=started,
        first_token_s=first,
        end_s=ended,
        finish=meta["finish_reason"]["type"],
        rid=str(meta.get("id", "")),
        verify_count=meta.get("spec_verify_ct"),
        drafts_accepted=meta.get("spec_correct_drafts_histogram"),
        sdsie=meta.get("sdsie"),
    )


def run_phase(
    server: Streams,
    work: Sequence[tuple[Ask, list[int]]],
    *,
    phase: int,
    concurrency: int,
    tokens: int,
    ignore_eos: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    on_done: Callable[[], None] = lambda: None,
) -> list[Request]:
    """A closed loop: `concurrency` requests are always on their way until none is left. Raises RequestFailed."""

    def one(item: tuple[Ask, list[int]]) -> Request:
        done = timed(server, *item, phase, tokens, ignore_eos, clock)
        on_done()
        return done

    with ThreadPoolExecutor(concurrency) as pool:
        futures = [pool.submit(one, item) for item in work]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def warm_up(
    server: Streams,
    prompts: Sequence[tuple[str, list[int]]],
    settings: WarmUp,
    gauge: Callable[[float, float], tuple[float, float]] | None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[WarmUpReading], bool | None]:
    """Reads the warm-up prompts in turn until each has settled, or `max_s` is over.

    Args:
        prompts: label and token ids.
        gauge: mean power (W) and temperature (°C) of a stretch; None where there is no GPU: then a server is
            warm after `min_s` and one reading a prompt.

    Returns:
        The readings, and whether all labels settled (None without a GPU).
    """
    begun = clock()
    readings: list[WarmUpReading] = []
    while True:
        for label, ids in prompts:
            started, tokens = clock(), 0
            while tokens == 0 or clock() - started < settings.reading_s:
                event, *_ = answer(server, ids, settings.tokens, clock=clock)
                tokens += len(event["output_ids"])
            reading = WarmUpReading(label=label, start_s=started, end_s=clock(), tokens=tokens)
            if gauge is not None:
                reading.power_w, reading.temperature_c = gauge(started, reading.end_s)
            readings.append(reading)
        passed = clock() - begun
        if gauge is None:
            if passed >= settings.min_s:
                return readings, None
        elif passed >= settings.min_s and settled(readings, settings):
            return readings, True
        elif passed >= settings.max_s:
            return readings, False


def prefill_only(
    server: Streams,
    prompts: Sequence[tuple[str, list[int]]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, int]:
    """One-token answers to the warm-up prompts in turn for so long; how many, and their prompt tokens together."""
    begun, count, tokens = clock(), 0, 0
    while clock() - begun < seconds:
        ids = prompts[count % len(prompts)][1]
        answer(server, ids, 1, clock=clock)
        count, tokens = count + 1, tokens + len(ids)
    return count, tokens
