"""Gear R, the Resolution Gear: a plain decode in which named linear layers multiply by INT4 weights. Not lossless.

It stands for every K above 0 of the policy, so that the clutch that engages a draft engages it. Nothing is drafted
and nothing verified. Under CUDA graphs each gear has a decode graph of its own: in one graph a kernel would have to
read a flag on the device and hold both products, with one tile shape and one launch grid for bf16 and INT4.
"""

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState

from sdsie_sglang.int4.both import add_int4
from sdsie_sglang.int4.method import Int4Unsupported
from sdsie_sglang.int4.precision import int4_products, running_int4
from sdsie_sglang.int4.resolution import BadLayers, parse_layers
from sdsie_sglang.int4.settings import Int4Settings

logger = logging.getLogger(__name__)

_IN_A_LAYER = re.compile(r"(?:^|\.)(layers\.(\d+)\.(.+))$")


class NotCaptured(RuntimeError):
    """A decode graph does not hold the products that its gear should run."""


def find_layers(model: torch.nn.Module, spec: str) -> frozenset[str]:
    """Full names of the linear layers that `spec` means. Raises Int4Unsupported."""
    there: dict[str, str] = {}
    modules: set[str] = set()
    total = 0
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase) and (match := _IN_A_LAYER.search(name)):
            there[match[1]] = name
            total = max(total, int(match[2]) + 1)
            modules.add(match[3])
    try:
        wanted = parse_layers(spec).names(total)
    except BadLayers as error:
        raise Int4Unsupported(f"--sdsie-resolution-layers: {error}") from None
    if missing := sorted(wanted - there.keys()):
        raise Int4Unsupported(
            f"--sdsie-resolution-layers: the model has no linear layer {missing[0]}: {', '.join(sorted(modules))}"
        )
    return frozenset(there[name] for name in wanted)


class ResolutionGear:
    """Gives the named layers their INT4 weights, and counts the products by them where they run.

    Raises:
        Int4Unsupported: the layers cannot be had as asked.
    """

    def __init__(self, model: torch.nn.Module, spec: str, settings: Int4Settings) -> None:
        self.names = find_layers(model, spec)
        self.spec = spec
        self.calibration = settings.calibration
        add_int4(model, settings, only=self.names)
        self._replayed = 0

    def warning(self) -> str:
        """For the log of a server that starts."""
        return (
            f"sdsie: the Resolution Gear is on and output is NOT LOSSLESS: while the policy engages, {len(self.names)} "
            f"linear layers ({self.spec}, {self.calibration}) multiply by 4-bit weights, and no token is verified. "
            "Where the text must stay the same use --sdsie-draft self-int4"
        )

    def running(self, k: int) -> AbstractContextManager[None]:
        """Around the target's decode pass: in INT4 if any gear above 0 was decided."""
        return running_int4() if k else nullcontext()

    def expected(self, k: int) -> int:
        """INT4 layers of one decode pass."""
        return len(self.names) if k else 0

    @property
    def executed(self) -> int:
        """INT4 layers that ran since the start, eagerly or in a replayed graph."""
        return int4_products() + self._replayed

    def build(self, build_plain: Callable[[], SpecRuntimeState], k: int) -> SpecRuntimeState:
        """A gear's bundle; its graphs hold the precision that runs while they are captured.

        Args:
            build_plain: builds the bundle of a plain decode.

        Raises:
            NotCaptured: a graph was captured in which another precision runs.
        """
        before = int4_products()
        with self.running(k):
            bundle = build_plain()
        graph = bundle.target_graph_runner
        if graph is not None:
            captured = int4_products() - before
            if (captured > 0) != (k > 0) or captured % len(self.names):
                raise NotCaptured(f"{captured} INT4 products were captured for gear {'R' if k else 0}")
            self._count_replays(graph, self.expected(k))
        return bundle

    def _count_replays(self, graph: Any, layers: int) -> None:
        execute = graph.execute

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._replayed += layers
            return execute(*args, **kwargs)

        graph.execute = counted
