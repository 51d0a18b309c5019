"""Writes an INT4 checkpoint once: python -m sdsie_sglang.int4.quantize MODEL OUT [--calibration g128]

OUT is a folder that SGLang serves with --model-path OUT, as target or as draft. Calibration awq reads a little
text: the model's own greedy answers to this project's warm-up prompts.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from sdsie_sglang.gears.settings import first_error
from sdsie_sglang.int4.activations import collect_inputs, own_text
from sdsie_sglang.int4.calibration import CalibratedWeight, calibrate, calibrate_fused
from sdsie_sglang.int4.checkpoint import quantization_config, saved_tensors
from sdsie_sglang.int4.settings import CALIBRATIONS, Int4Settings

PROG = "python -m sdsie_sglang.int4.quantize"
# Layers that SGLang runs as one share what their common input is multiplied by.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
OWN_TOKENS = 128
INDEX = "model.safetensors.index.json"


class QuantizeError(ValueError):
    """A checkpoint that cannot be quantised. One line."""


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json. Raises QuantizeError: no checkpoint, or one that is quantised already."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError:
        raise QuantizeError(f"{folder} holds no config.json") from None
    except ValueError:
        raise QuantizeError(f"{folder / 'config.json'} is not JSON") from None
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise QuantizeError(f"{folder} is quantised already, by {method}: take the unquantised model")
    if not list(folder.glob("*.safetensors")):
        raise QuantizeError(f"{folder} holds no safetensors")
    return config


def linear_names(folder: Path, settings: Int4Settings) -> list[str]:
    """Names of the linear layers to quantise, by Transformers' own reading of the configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or settings.excludes(name):
            continue
        if module is head and (tied or config.tie_word_embeddings or not settings.lm_head):
            continue
        if module.in_features % 2:
            raise QuantizeError(f"{name} has an odd number of inputs ({module.in_features}): --exclude it")
        names.append(name)
    if not names:
        raise QuantizeError("no linear layer is left to quantise")
    return names


def fused_groups(names: Sequence[str]) -> list[list[str]]:
    """The names, those that SGLang fuses together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parent, _, own = name.rpartition(".")
        family = next((parts for parts in FUSED if own in parts), (own,))
        groups.setdefault(f"{parent}.{family[0]}", []).append(name)
    return list(groups.values())


def activation_aware(
    folder: Path, names: Sequence[str], settings: Int4Settings, device: str
) -> dict[str, CalibratedWeight]:
    """Every layer calibrated on the inputs that the model's own text gives it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from sdsie_sglang.eval.chat import chat_ids
    from sdsie_sglang.eval.prompts import warmup_prompts

    # On a CPU in float32: bf16 products are slow there.
    dtype = torch.float32 if device == "cpu" else "auto"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    stored = AutoConfig.from_pretrained(folder).dtype or torch.bfloat16
    prompts = [chat_ids(str(folder), prompt.text) for prompt in warmup_prompts()]
    inputs = collect_inputs(model, names, own_text(model, prompts, OWN_TOKENS))
    done: dict[str, CalibratedWeight] = {}
    for group in tqdm(fused_groups(names), desc=settings.calibration, unit="layer"):
        weights = [model.get_submodule(name).weight.detach() for name in group]
        seen = inputs[group[0]].to(device)
        found = calibrate_fused(weights, settings.calibration, inputs=seen, dtype=stored)
        done.update(zip(group, found, strict=True))
    return done


def quantise_folder(source: Path, out: Path, settings: Int4Settings, device: str) -> int:
    """Writes the INT4 checkpoint; returns its bytes. Raises QuantizeError before anything is written."""
    config = read_config(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise QuantizeError(f"{out} exists and is not an empty folder")
    names = linear_names(source, settings)
    how = CALIBRATIONS[settings.calibration]
    known = activation_aware(source, names, settings, device) if how.needs_text else {}
    out.mkdir(parents=True, exist_ok=True)
    wanted, done, where, size = set(names), set(), {}, 0
    progress = tqdm(total=len(names), desc="quantise", unit="layer")
    for shard in sorted(source.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        with safe_open(shard, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                name, _, kind = key.rpartition(".")
                if kind != "weight" or name not in wanted:
                    tensors[key] = file.get_tensor(key)
                    continue
                weight = file.get_tensor(key)
                found = known.get(name) or calibrate(weight.to(device), settings.calibration, dtype=weight.dtype)
                tensors.update({k: t.cpu() for k, t in saved_tensors(name, found).items()})
                done.add(name)
                progress.update()
        save_file(tensors, out / shard.name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, shard.name))
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    progress.close()
    if missing := sorted(wanted - done):
        raise QuantizeError(
            f"{source} lacks {missing[0]}.weight, and {len(missing) - 1} more: nothing usable was written"
        )
    if (source / INDEX).exists():
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1) + "\n")
    config["quantization_config"] = quantization_config(settings.calibration, settings.exclude, settings.lm_head)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for path in source.iterdir():  # the tokenizer and the like
        if path.is_file() and not path.name.endswith(".safetensors") and not (out / path.name).exists():
            shutil.copy(path, out)
    return size


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of an unquantised checkpoint")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--calibration", default="g128", help=", ".join(CALIBRATIONS))
    parser.add_argument("--exclude", default="", help="layers that keep full precision, parts of names")
    parser.add_argument("--lm-head", action="store_true", help="the output head as well, unless it is the embedding")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    try:
        settings = Int4Settings(calibration=options.calibration, exclude=options.exclude, lm_head=options.lm_head)
        size = quantise_folder(options.model, options.out, settings, options.device)
    except ValidationError as error:
        print(f"{PROG}: error: {first_error(error)}", file=sys.stderr)
        return 2
    except QuantizeError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {size / 1e9:.2f} GB, {settings.calibration}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
