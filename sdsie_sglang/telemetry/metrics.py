"""Prometheus counters on SGLang's own /metrics.

SGLang exposes every metric that any of its processes registers while PROMETHEUS_MULTIPROC_DIR is
set, so the scheduler process only has to register them after SGLang set it.
"""

from typing import Protocol

ENTROPY_BUCKETS_BITS = (0.05, 0.1, 0.15, 0.3, 0.55, 0.7, 1.0, 1.25, 1.4, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)


class Metrics(Protocol):
    def cycle(self, gear: int | str, draft_passes: int, int4_layers: int) -> None: ...
    def request_cycle(self, gear: int | str, committed: int, switched: bool, entropy_bits: float) -> None: ...
    def gate_failed(self) -> None: ...


class NoMetrics:
    def cycle(self, gear: int | str, draft_passes: int, int4_layers: int) -> None:
        pass

    def request_cycle(self, gear: int | str, committed: int, switched: bool, entropy_bits: float) -> None:
        pass

    def gate_failed(self) -> None:
        pass


class PrometheusMetrics:
    """Labels: model_name, tp_rank, dp_rank and those of --extra-metric-labels, as SGLang's own metrics carry them, and
    the server's name (--sdsie-replica), if it has one."""

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Histogram

        names = list(labels)

        def counter(name: str, text: str, *extra: str) -> Counter:
            return Counter(f"sdsie:{name}", text, [*names, *extra])

        self._labels = labels
        self._cycles = counter("cycles", "Decode cycles that ran, by gear", "gear")
        self._draft_passes = counter("draft_passes", "Forward passes of the draft").labels(**labels)
        self._int4_layers = counter("int4_layers", "Linear layers that the target ran in INT4").labels(**labels)
        self._switches = counter("gear_switches", "Gear changes, summed over requests").labels(**labels)
        self._committed = counter("committed_tokens", "Tokens committed, by gear", "gear")
        self._failures = counter("gate_failures", "Failures inside the gate, each run in gear 0").labels(**labels)
        self._rejected = counter("rejected_entropies", "Entropies that were no usable number").labels(**labels)
        self._entropy = Histogram(
            "sdsie:entropy_bits",
            "Target entropy at the last committed position of a cycle",
            names,
            buckets=ENTROPY_BUCKETS_BITS,
        ).labels(**labels)

    def cycle(self, gear: int | str, draft_passes: int, int4_layers: int) -> None:
        self._cycles.labels(**self._labels, gear=str(gear)).inc()
        self._draft_passes.inc(draft_passes)
        self._int4_layers.inc(int4_layers)

    def request_cycle(self, gear: int | str, committed: int, switched: bool, entropy_bits: float) -> None:
        self._committed.labels(**self._labels, gear=str(gear)).inc(committed)
        self._switches.inc(switched)
        if entropy_bits == entropy_bits and entropy_bits != float("inf"):
            self._entropy.observe(entropy_bits)
        else:
            self._rejected.inc()

    def gate_failed(self) -> None:
        self._failures.inc()


def open_metrics(*, enabled: bool, labels: dict[str, str]) -> Metrics:
    return PrometheusMetrics(labels) if enabled else NoMetrics()
