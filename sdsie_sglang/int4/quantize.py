"""Writes an INT4 checkpoint once: python -m sdsie_sglang.int4.quantize MODEL OUT [--calibration g128]

OUT is a folder that SGLang serves with --model-path OUT, as target or as draft. It is complete once its config.json is
there: until then it is written in OUT/.partial, and what an interrupted run left is thrown away by the next.
Calibration awq reads a little text: the model's own greedy answers to this project's warm-up prompts.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from sdsie_sglang.gears.settings import first_error
from sdsie_sglang.int4.activations import collect_inputs, own_text
from sdsie_sglang.int4.calibration import CalibratedWeight, calibrate, calibrate_fused
from sdsie_sglang.int4.checkpoint import quantization_config, saved_tensors
from sdsie_sglang.int4.saved_checks import Damaged, header
from sdsie_sglang.int4.settings import CALIBRATIONS, FUSED, Int4Settings

PROG = "python -m sdsie_sglang.int4.quantize"
OWN_TOKENS = 128
INDEX = "model.safetensors.index.json"
PARTIAL = ".partial"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALLEST = 0.25  # of the model's bytes: what is written is more


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

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise QuantizeError(f"Transformers cannot make this model: {one_line(error)}") from None
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for part in settings.exclude:
        if not any(Int4Settings(exclude=(part,)).excludes(name) for name in linear):
            raise QuantizeError(f"--exclude {part}: no linear layer's name contains that")
    names = []
    for name, module in linear.items():
        if settings.excludes(name):
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
        # Layers that SGLang runs as one share what their common input is multiplied by.
        family = next((parts for parts in FUSED.values() if own in parts), (own,))
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


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def shards_of(source: Path) -> list[Path]:
    """The files that hold the weights: those of the index, where there is one. Raises QuantizeError."""
    if not (source / INDEX).exists():
        return sorted(source.glob("*.safetensors"))
    try:
        named = sorted(set(json.loads((source / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        raise QuantizeError(f"{source / INDEX} is no index of weights") from None
    if missing := [name for name in named if not (source / name).is_file()]:
        raise QuantizeError(f"{source} lacks {missing[0]}, which its index names")
    return [source / name for name in named]


@contextmanager
def staging(source: Path, out: Path) -> Iterator[Path]:
    """An empty folder in `out`, whose files move into `out` at the end, config.json last; nothing stays if it fails.

    Raises QuantizeError: `out` holds other things than what an interrupted run left, or cannot be written.
    """
    partial, made = out / PARTIAL, False
    try:
        if out.exists():
            there = {path.name for path in out.iterdir()} if out.is_dir() else {""}
            ours = {PARTIAL, *(path.name for path in source.iterdir())} if PARTIAL in there else set()
            if there - ours or "config.json" in there:
                raise QuantizeError(f"{out} exists and is not an empty folder")
        else:
            out.mkdir(parents=True)
            made = True
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        needed, free = (
            SMALLEST * sum(p.stat().st_size for p in source.glob("*.safetensors")),
            shutil.disk_usage(out).free,
        )
        if free < needed:
            raise QuantizeError(f"{out} has {free / 1e9:.2f} GB free, and at least {needed / 1e9:.2f} GB are written")
        yield partial
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(out / path.name)
        partial.rmdir()
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise QuantizeError(f"{getattr(error, 'filename', None) or out} cannot be used: {reason}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made and not (out / "config.json").exists():
            shutil.rmtree(out, ignore_errors=True)


def quantise_folder(source: Path, out: Path, settings: Int4Settings, device: str) -> int:
    """Writes the INT4 checkpoint; returns its bytes. Raises QuantizeError; then `out` is as it was."""
    config = read_config(source)
    names, shards = linear_names(source, settings), shards_of(source)
    try:
        for shard in shards:
            header(shard)
    except Damaged as error:
        raise QuantizeError(str(error)) from None
    with staging(source, out) as partial:
        size = write_checkpoint(source, shards, partial, names, settings, device)
        config["quantization_config"] = quantization_config(settings.calibration, settings.exclude, settings.lm_head)
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        for path in source.iterdir():  # the tokenizer and the like
            if path.is_file() and not path.name.endswith(".safetensors") and not (partial / path.name).exists():
                shutil.copy(path, partial)
    return size


def write_checkpoint(
    source: Path, shards: Sequence[Path], out: Path, names: Sequence[str], settings: Int4Settings, device: str
) -> int:
    """The weights, file by file, and their index; returns their bytes. Raises QuantizeError."""
    needs_text = CALIBRATIONS[settings.calibration].needs_text
    known = activation_aware(source, names, settings, device) if needs_text else {}
    wanted, done, where, size = set(names), set(), {}, 0
    with tqdm(total=len(names), desc="quantise", unit="layer") as progress:
        for shard in shards:
            tensors: dict[str, Tensor] = {}
            for key, value in read_shard(shard):
                name, _, kind = key.rpartition(".")
                if kind != "weight" or name not in wanted:
                    tensors[key] = value
                    continue
                if value.dtype not in DTYPES:
                    raise QuantizeError(f"{key} is {value.dtype}: INT4 is made from bfloat16, float16 or float32")
                if not value.isfinite().all():
                    raise QuantizeError(f"{key} holds infinities or values that are no numbers")
                found = known.get(name) or calibrate(value.to(device), settings.calibration, dtype=value.dtype)
                tensors.update({k: t.cpu() for k, t in saved_tensors(name, found).items()})
                done.add(name)
                progress.update()
            save_file(tensors, out / shard.name, metadata={"format": "pt"})
            (out / shard.name).chmod(shard.stat().st_mode & 0o777)  # safetensors makes files for their owner alone
            where.update(dict.fromkeys(tensors, shard.name))
            size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if missing := sorted(wanted - done):
        raise QuantizeError(f"{source} lacks {missing[0]}.weight, and {len(missing) - 1} more")
    if (source / INDEX).exists():
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1) + "\n")
    return size


def read_shard(shard: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors. Raises QuantizeError where the file is damaged."""
    try:
        with safe_open(shard, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                yield key, file.get_tensor(key)
    except SafetensorError as error:
        raise QuantizeError(f"{shard} is damaged: {one_line(error)}") from None


def check_device(device: str) -> None:
    """Raises QuantizeError."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise QuantizeError(f"--device {device} cannot be used: {one_line(error)[:200]}") from None


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
        check_device(options.device)
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
