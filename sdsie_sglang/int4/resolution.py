"""Which layers the Resolution Gear switches: `--sdsie-resolution-layers SPEC`. No torch, no SGLang.

SPEC is MODULE@LAYERS, several joined by `;`. MODULE is a linear layer as SGLang names it within a decoder layer
(`mlp.down_proj`); LAYERS is `all`, indices and ranges from 0 (`0,7,12-15`), or a place and a count (`first:4`,
`middle:4`, `last:4`, `spread:4`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GEAR = "R"
"""What telemetry calls it."""
PLACES = ("first", "middle", "last", "spread")
# SGLang runs these as one layer each.
FUSED = {
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}
# Families whose layers are known before they are loaded; others are looked at then.
LLAMA_LIKE = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
LLAMA_MODULES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


class BadLayers(ValueError):
    """A SPEC that cannot be used. One line."""


def pick(place: str, count: int, total: int) -> tuple[int, ...]:
    """Indices of `count` of `total` layers, ascending; `spread` takes the middle of `count` equal stretches.

    Raises BadLayers.
    """
    if not 1 <= count <= total:
        raise BadLayers(f"{place}:{count} asks for {count} layers, the model has {total}")
    if place == "spread":
        return tuple((2 * i + 1) * total // (2 * count) for i in range(count))
    start = {"first": 0, "middle": (total - count) // 2, "last": total - count}[place]
    return tuple(range(start, start + count))


@dataclass(frozen=True)
class Choice:
    """One MODULE@LAYERS; `layers` as written."""

    module: str
    layers: str

    def indices(self, total: int) -> tuple[int, ...]:
        """Of a model of `total` decoder layers, ascending. Raises BadLayers."""
        if self.layers == "all":
            return tuple(range(total))
        place, _, count = self.layers.partition(":")
        if place in PLACES:
            return pick(place, int(count), total)
        chosen: set[int] = set()
        for part in self.layers.split(","):
            first, _, last = part.partition("-")
            chosen.update(range(int(first), int(last or first) + 1))
        if max(chosen) >= total:
            raise BadLayers(
                f"layer {max(chosen)} of {self.module}@{self.layers} is not there: the model has 0 to {total - 1}"
            )
        return tuple(sorted(chosen))


@dataclass(frozen=True)
class Layers:
    """A parsed SPEC."""

    choices: tuple[Choice, ...]

    def names(self, total: int) -> frozenset[str]:
        """`layers.0.mlp.down_proj` and so on, of a model of `total` decoder layers. Raises BadLayers."""
        return frozenset(f"layers.{i}.{choice.module}" for choice in self.choices for i in choice.indices(total))


_LAYERS = re.compile(
    rf"all|(?:{'|'.join(PLACES)}):[1-9]\d{{0,3}}|\d{{1,4}}(?:-\d{{1,4}})?(?:,\d{{1,4}}(?:-\d{{1,4}})?)*"
)
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")


def parse_layers(text: str) -> Layers:
    """Raises BadLayers."""
    choices = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        module, _, layers = (side.strip() for side in part.partition("@"))
        layers = layers.replace(" ", "")
        if not _MODULE.fullmatch(module) or not _LAYERS.fullmatch(layers):
            raise BadLayers(
                f"layers must look like mlp.down_proj@all, mlp.down_proj@0,7,12-15 or mlp.down_proj@spread:4 "
                f"(first, middle, last, spread), several joined by ';', not {part!r}"
            )
        for first, last in re.findall(r"(\d+)-(\d+)", layers):
            if int(first) > int(last):
                raise BadLayers(f"{first}-{last} in {part!r} ends before it begins")
        if module in FUSED:
            raise BadLayers(f"SGLang runs {module} as a part of {FUSED[module]}: name that")
        choices.append(Choice(module, layers))
    if not choices:
        raise BadLayers("no layer is named")
    return Layers(tuple(choices))


def layers_problem(text: str, model: Mapping[str, Any]) -> str | None:
    """One line that says why a model cannot have these layers switched, as far as its config.json tells, or None."""
    try:
        layers = parse_layers(text)
        if set(model.get("architectures") or ()) & LLAMA_LIKE:
            for choice in layers.choices:
                if choice.module not in LLAMA_MODULES:
                    raise BadLayers(f"the model has no linear layer {choice.module}: {', '.join(LLAMA_MODULES)}")
        total = model.get("num_hidden_layers")
        if isinstance(total, int):
            layers.names(total)
    except BadLayers as error:
        return f"--sdsie-resolution-layers: {error}"
    return None
