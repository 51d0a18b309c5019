"""Whether a checkpoint that `sdsie_sglang.int4.quantize` wrote is whole, told from its headers. No torch, no SGLang."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdsie_sglang.int4.checkpoint_format import CODES, FACTORS, METHOD, SCALES, ZEROS
from sdsie_sglang.int4.resolution import LLAMA_LIKE
from sdsie_sglang.int4.settings import CALIBRATIONS, FUSED

INDEX = "model.safetensors.index.json"
LAYERS = (*FUSED["qkv_proj"], "o_proj", *FUSED["gate_up_proj"], "down_proj")


class Damaged(ValueError):
    """One line."""


def header(path: Path) -> dict[str, Any]:
    """A safetensors file's names, types, shapes and places. Raises Damaged, also where the file is cut short.

    Format: https://github.com/huggingface/safetensors#format.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise Damaged(f"{path} is no safetensors file, or damaged")
            found = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in found.items() if name != "__metadata__"]
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{path} is no safetensors file, or damaged") from None
    if size != 8 + length + max(ends, default=0):
        raise Damaged(f"{path} is cut short or damaged: {size} bytes instead of {8 + length + max(ends, default=0)}")
    found.pop("__metadata__", None)
    return found


def tensors_of(folder: Path) -> set[str]:
    """Names of all tensors. Raises Damaged."""
    paths = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        try:
            named = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError):
            raise Damaged(f"{folder / INDEX} is no index of weights") from None
        paths = [folder / name for name in named]
    if not paths:
        raise Damaged(f"{folder} holds no safetensors")
    return {name for path in paths for name in header(path)}


def saved_problem(folder: Path, model: Mapping[str, Any]) -> str | None:
    """One line that says what a saved INT4 checkpoint lacks, or None; None as well where it is none or not at hand.

    Args:
        model: its config.json.
    """
    saved = model.get("quantization_config") or {}
    how = CALIBRATIONS.get(str(saved.get("calibration")))
    if saved.get("quant_method") != METHOD or how is None or not folder.is_dir():
        return None
    wanted = [CODES, SCALES, *([] if how.symmetric else [ZEROS]), *([FACTORS] if how.needs_text else [])]
    try:
        names = tensors_of(folder)
    except Damaged as error:
        return f"{error}: write it again with python -m sdsie_sglang.int4.quantize"
    int4 = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in (CODES, SCALES, ZEROS, FACTORS)}
    missing = sorted({f"{layer}.{each}" for layer in int4 for each in wanted} - names)
    if not int4:
        missing = [f"any layer's {CODES}"]
    elif set(model.get("architectures") or ()) & LLAMA_LIKE and isinstance(model.get("num_hidden_layers"), int):
        there = {name.rpartition(".")[0] for name in names}
        for i in range(model["num_hidden_layers"]):
            parts = {name.rpartition(".")[2] for name in there if f"layers.{i}." in f"{name}."}
            missing += [f"layers.{i}, {part}" for part in LAYERS if part not in parts]
    if not missing:
        return None
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{folder} is damaged: it lacks {missing[0]}{more}: write it again with python -m sdsie_sglang.int4.quantize"
