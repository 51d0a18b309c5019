"""Composes the demo's checkpoints in the user's cache: target, draft and EAGLE-3 head.

The target comes from a GGUF file in the package registry; the trained weights lie in this package
(`weights/`). A draft needs the target's embedding to be a complete checkpoint, so it is put together here
instead of being shipped.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from sdsie_sglang.config import cache_dir
from sdsie_sglang.demo.digest import sha256_of
from sdsie_sglang.demo.errors import DemoError
from sdsie_sglang.demo.gguf_source import GGUF_SHA256
from sdsie_sglang.demo.target import CHAT_FILES, llama_config, write_target

WEIGHTS = Path(__file__).with_name("weights")
FORMAT = 1
"""Raised when the same sources are to give different checkpoints, so that cached ones are made anew."""
EMBEDDING = "model.embed_tokens.weight"
_STAMP = "sdsie-demo.json"


@dataclass(frozen=True)
class DemoCheckpoints:
    """Folders of complete checkpoints, ready for SGLang; a part whose weights aren't shipped is None."""

    target: Path
    draft: Path | None
    eagle3: Path | None


def compose(out: Path | None = None, weights: Path = WEIGHTS) -> DemoCheckpoints:
    """Make the demo's checkpoints under `out` (default: the cache), or check and reuse those that are there.

    Sources and results are checked by SHA-256; a missing or damaged result is made anew. Raises `DemoError`.
    """
    out = out if out is not None else cache_dir() / "demo"
    out.mkdir(parents=True, exist_ok=True)
    target = _ensure(out / "target", {"gguf": GGUF_SHA256}, write_target)
    manifest = _manifest(weights)
    made: dict[str, Path | None] = {"draft": None, "eagle3": None}
    for name, write in (("draft", _write_draft), ("eagle3", _write_eagle3)):
        if name not in manifest:
            continue
        part = manifest[name]
        shards = _checked_shards(weights, part["files"])

        def writer(folder: Path, write: Any = write, part: Any = part, shards: Any = shards) -> None:
            write(folder, target, part, shards)

        made[name] = _ensure(out / name, {"gguf": GGUF_SHA256, **part["files"]}, writer)
    return DemoCheckpoints(target, made["draft"], made["eagle3"])


def _manifest(weights: Path) -> dict[str, Any]:
    path = weights / "manifest.json"
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text())
    except ValueError:
        raise DemoError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(manifest, dict):
        raise DemoError(f"{path} is damaged: it is not a JSON object")
    return manifest


def _checked_shards(weights: Path, files: dict[str, str]) -> list[Path]:
    """The shipped files of one model, each compared with its SHA-256 in the manifest."""
    for name, wanted in files.items():
        path = weights / name
        if not path.is_file():
            raise DemoError(f"{path} is missing")
        found = sha256_of(path)
        if found != wanted:
            raise DemoError(f"{path} is damaged: SHA-256 {found}, wanted {wanted}")
    return [weights / name for name in files]


def _write_draft(folder: Path, target: Path, part: dict[str, Any], shards: list[Path]) -> None:
    """Trained layers + the target's embedding (tied with the output head) = an ordinary Llama checkpoint."""
    tensors = {EMBEDDING: load_file(target / "model.safetensors")[EMBEDDING], **_merged(shards)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(folder, {**llama_config(), "num_hidden_layers": part["layers"]})
    _copy_chat_files(target, folder)


def _write_eagle3(folder: Path, target: Path, part: dict[str, Any], shards: list[Path]) -> None:
    """The head as SGLang's `LlamaForCausalLMEagle3` reads it; embedding and output head are the target's."""
    save_file(_merged(shards), folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(folder, eagle3_config(part["aux_hidden_states"]))
    _copy_chat_files(target, folder)


def eagle3_config(aux_hidden_states: list[int]) -> dict[str, Any]:
    """The head's `config.json`.

    aux_hidden_states: which of Transformers' `hidden_states` the head reads. SGLang's ids count layers whose
    output is taken, one less each.
    """
    return {
        **llama_config(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": None,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [index - 1 for index in aux_hidden_states],
            "use_aux_hidden_state": True,
        },
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


def _merged(shards: list[Path]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for shard in shards:
        merged.update(load_file(shard))
    return merged


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def _copy_chat_files(target: Path, folder: Path) -> None:
    for name in CHAT_FILES:
        if (target / name).is_file():
            shutil.copy(target / name, folder)


def _ensure(folder: Path, sources: dict[str, str], write: Callable[[Path], None]) -> Path:
    """`folder`, made by `write` from `sources`: reused if its stamp and all hashes agree, else made anew.

    A new folder appears by one rename, so that an interrupted run leaves nothing half made. Raises DemoError rather
    than replace a folder that this function did not make.
    """
    if _is_current(folder, sources):
        return folder
    if folder.exists() and not (folder / _STAMP).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DemoError(f"{folder} is there and is not the demo's: choose another --out")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new = Path(scratch) / folder.name
        new.mkdir()
        write(new)
        for path in new.iterdir():
            path.chmod(0o644)
        files = {path.name: sha256_of(path) for path in sorted(new.iterdir())}
        stamp = {"files": files, "format": FORMAT, "sources": sources}
        (new / _STAMP).write_text(json.dumps(stamp, indent=1, sort_keys=True) + "\n")
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        new.rename(folder)
    return folder


def _is_current(folder: Path, sources: dict[str, str]) -> bool:
    try:
        stamp = json.loads((folder / _STAMP).read_text())
        same = stamp["format"] == FORMAT and stamp["sources"] == sources
        return same and all(sha256_of(folder / name) == digest for name, digest in stamp["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
