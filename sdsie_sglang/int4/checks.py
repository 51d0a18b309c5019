"""What INT4 cannot serve, told from flags and config.json before any weight is loaded. No torch, no SGLang."""

from collections.abc import Mapping
from typing import Any

from sdsie_sglang.int4.checkpoint_format import METHOD
from sdsie_sglang.int4.resolution import LLAMA_LIKE, LLAMA_MODULES, layers_problem, parse_layers
from sdsie_sglang.int4.settings import CALIBRATIONS, Int4Settings


def find_problem(
    int4: Int4Settings,
    model: Mapping[str, Any],
    *,
    quantization: str | None,
    drafts_itself: bool,
    tp_size: int,
    device: str,
    dtype: str,
    resolution_layers: str | None = None,
) -> str | None:
    """One line that says why not, or None.

    Args:
        model: the target's config.json, or a draft model's; empty where it is not at hand.
        quantization: what --quantization gives for it, or --speculative-draft-model-quantization.
        resolution_layers: what --sdsie-resolution-layers gives.
    """
    saved = model.get("quantization_config") or {}
    found = saved.get("quant_method")
    quantization = None if quantization == "unquant" else quantization
    beside = "--sdsie-draft self-int4" if drafts_itself else None
    if resolution_layers is not None:
        beside = "--sdsie-resolution-layers"
        if problem := layers_problem(resolution_layers, model):
            return problem
    if beside and (quantization or found):
        return f"{beside} needs an unquantised target, this one is {quantization or found}"
    if not beside and METHOD not in (quantization, found):
        return None
    calibration = saved.get("calibration", int4.calibration) if found == METHOD else int4.calibration
    how = CALIBRATIONS.get(calibration)
    if how is None:
        return f"the checkpoint's calibration {calibration!r} is not one of {', '.join(CALIBRATIONS)}"
    if how.needs_text and found != METHOD:
        return f"--sdsie-int4-calibration {calibration} needs a little text and so cannot be done while loading: " + (
            "choose another"
            if beside
            else "write a checkpoint with python -m sdsie_sglang.int4.quantize and serve that"
        )
    if device != "cpu" and dtype in ("float32", "float"):
        return "INT4 runs in bf16 or fp16 on a GPU: leave out --dtype float32"
    if found != METHOD and (problem := exclude_problem(int4, model)):
        return problem
    chosen = None if resolution_layers is None else {c.module for c in parse_layers(resolution_layers).choices}
    for name, k in row_parallel_inputs(model).items():
        full = int4.excludes(name) if chosen is None else name not in chosen
        if how.group and tp_size > 1 and k % tp_size == 0 and (k // tp_size) % how.group and not full:
            return (
                f"INT4 groups of {how.group} do not divide the {k // tp_size} inputs of {name} on each of {tp_size} "
                f"ranks: use a smaller group or --tp-size, or {'exclude' if chosen is None else 'leave out'} the layer"
            )
    return None


def exclude_problem(int4: Int4Settings, model: Mapping[str, Any]) -> str | None:
    """One line if a name to exclude is no layer's, or all are excluded; None where the layers are not known yet."""
    total = model.get("num_hidden_layers")
    if not int4.exclude or not set(model.get("architectures") or ()) & LLAMA_LIKE or not isinstance(total, int):
        return None
    names = [f"model.layers.{i}.{module}" for i in range(total) for module in LLAMA_MODULES]
    for part in int4.exclude:
        if not any(Int4Settings(exclude=(part,)).excludes(name) for name in (*names, "lm_head")):
            return f"--sdsie-int4-exclude {part}: no linear layer's name contains that"
    if all(int4.excludes(name) for name in names):
        return "--sdsie-int4-exclude leaves no linear layer to quantise"
    return None


def row_parallel_inputs(model: Mapping[str, Any]) -> dict[str, int]:
    """Inputs of the layers that tensor parallelism splits along them, by config.json of a Llama-like model."""
    try:
        heads = model["num_attention_heads"]
        return {
            "self_attn.o_proj": heads * (model.get("head_dim") or model["hidden_size"] // heads),
            "mlp.down_proj": model["intermediate_size"],
        }
    except (KeyError, TypeError):
        return {}
