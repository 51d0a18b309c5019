"""What of a server the cost of a cycle depends on."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from sdsie_sglang.config import SdsieConfig
from sdsie_sglang.eval.machine import cpu_name
from sdsie_sglang.gears.cost_table import Conditions, load_cost_table

DIGEST_CHARACTERS = 12
DECIDES_NO_COST = ("_name_or_path", "transformers_version")
"""Of config.json: entries that differ between copies of one model."""


def conditions_of(server_args: Any, config: SdsieConfig) -> Conditions:
    """Of a server with these settings and arguments of SGLang's, resolved: the same in launcher and workers."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    args = resolving_view(server_args)
    draft, draft_config = _draft(args.speculative_draft_model_path, config)
    return Conditions(
        target=model_name(args.model_path),
        target_config=config_digest(args.model_path),
        draft=draft,
        draft_config=draft_config,
        hardware=hardware(args.device),
        dtype=str(model_config_of(server_args).dtype).removeprefix("torch."),
        attention_backend=str(args.decode_attention_backend or args.attention_backend or "default"),
        tp_size=args.tp_size,
        quantization=_quantization(args.quantization, config),
        draft_quantization=args.speculative_draft_model_quantization,
        skinny_gemm=not config.no_skinny_gemm,
        fused_layer=not (config.no_skinny_gemm or config.no_fused_layer),
        fused_attention=not config.no_fused_attention,
        draft_graph=config.wants_draft_graph,
    )


def _draft(path: str | None, config: SdsieConfig) -> tuple[str, str]:
    """Name and digest. A target that drafts for itself does so with INT4 weights of some form."""
    if config.drafts_itself or path is None:
        return config.draft, _digest(config.int4.model_dump_json())
    return model_name(path), config_digest(path)


def _quantization(name: str | None, config: SdsieConfig) -> str | None:
    """With the form of the weights, where this project makes them while loading."""
    return f"{name} {_digest(config.int4.model_dump_json())}" if name == "sdsie_int4" else name


def table_warning(path: str | None, conditions: Conditions) -> str | None:
    """One line if the cost table was measured under other conditions than these. Raises ValueError."""
    if path is None or (measured := load_cost_table(path).conditions) is None:
        return None
    differences = conditions.differences(measured)
    if not differences:
        return None
    return f"sdsie: cost table {path} was measured on another server: here {'; '.join(differences)}"


def model_name(path: str) -> str:
    """The folder's name alone, or the name on a model hub."""
    folder = Path(path).expanduser()
    return folder.name if folder.is_dir() else path


def config_digest(path: str) -> str:
    """Of what config.json says; of the name for a model that is no folder here."""
    file = Path(path).expanduser() / "config.json"
    try:
        values = json.loads(file.read_text())
        told = json.dumps({k: v for k, v in values.items() if k not in DECIDES_NO_COST}, sort_keys=True)
    except (OSError, ValueError, AttributeError):
        told = path
    return _digest(told)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def hardware(device: str) -> str:
    """The accelerator's name as its driver says it, or the cores and the processor."""
    if device != "cpu":
        from sglang.srt.utils.common import get_device_name

        return str(get_device_name())
    return f"{os.cpu_count()} cores, {cpu_name()}"
