"""The demo's checkpoints: naming, row order, hashes, idempotence. Nothing is downloaded."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sdsie_sglang.demo import DemoError, cache_dir
from sdsie_sglang.demo import compose as public_compose
from sdsie_sglang.demo.checkpoints import EMBEDDING, compose, eagle3_config
from sdsie_sglang.demo.digest import sha256_of
from sdsie_sglang.demo.target import hugging_face_name, rotary_halves


@pytest.fixture
def tiny_target(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the target's conversion by a tiny file; returns the list of folders it was asked to write."""
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        save_file({EMBEDDING: torch.arange(6.0).reshape(3, 2)}, folder / "model.safetensors")
        (folder / "tokenizer.json").write_text("{}")

    monkeypatch.setattr("sdsie_sglang.demo.checkpoints.write_target", write)
    return written


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Shipped weights of a draft in two shards and a head in one, with their manifest."""
    folder = tmp_path / "weights"
    folder.mkdir()
    shards = {
        "draft-1.safetensors": "model.norm.weight",
        "draft-2.safetensors": "model.layers.0.w",
        "eagle3.safetensors": "fc.weight",
    }
    for name, key in shards.items():
        save_file({key: torch.full((2,), float(len(key)))}, folder / name)
    digests = {name: sha256_of(folder / name) for name in shards}
    manifest = {
        "draft": {"files": {n: d for n, d in digests.items() if n.startswith("draft")}, "layers": 4},
        "eagle3": {
            "files": {"eagle3.safetensors": digests["eagle3.safetensors"]},
            "aux_hidden_states": [2, 15, 27],
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_draft_holds_the_targets_embedding_and_every_shard(tmp_path, tiny_target, weights):
    made = compose(tmp_path / "out", weights)
    tensors = load_file(made.draft / "model.safetensors")
    assert set(tensors) == {EMBEDDING, "model.norm.weight", "model.layers.0.w"}
    assert torch.equal(tensors[EMBEDDING], torch.arange(6.0).reshape(3, 2))
    config = json.loads((made.draft / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    assert config["tie_word_embeddings"] is True
    assert (made.draft / "tokenizer.json").is_file()


def test_head_config_counts_layers_as_sglang_does():
    config = eagle3_config([2, 15, 27])
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    assert config["draft_vocab_size"] is None  # the target's own output head


def test_second_call_writes_nothing_and_a_damaged_result_is_made_anew(tmp_path, tiny_target, weights):
    out = tmp_path / "out"
    made = compose(out, weights)
    before = (made.draft / "model.safetensors").stat().st_mtime_ns
    assert compose(out, weights) == made
    assert (made.draft / "model.safetensors").stat().st_mtime_ns == before
    assert len(tiny_target) == 1
    (made.target / "model.safetensors").write_bytes(b"damaged")
    compose(out, weights)
    assert len(tiny_target) == 2
    assert sorted(path.name for path in out.iterdir()) == ["draft", "eagle3", "target"]


def test_new_weights_replace_the_old_checkpoint(tmp_path, tiny_target, weights):
    out = tmp_path / "out"
    compose(out, weights)
    save_file({"fc.weight": torch.zeros(2)}, weights / "eagle3.safetensors")
    manifest = json.loads((weights / "manifest.json").read_text())
    manifest["eagle3"]["files"]["eagle3.safetensors"] = sha256_of(weights / "eagle3.safetensors")
    (weights / "manifest.json").write_text(json.dumps(manifest))
    made = compose(out, weights)
    assert torch.equal(load_file(made.eagle3 / "model.safetensors")["fc.weight"], torch.zeros(2))


def test_damaged_shard_is_named(tmp_path, tiny_target, weights):
    (weights / "draft-2.safetensors").write_bytes(b"damaged")
    with pytest.raises(DemoError, match=r"draft-2\.safetensors is damaged"):
        compose(tmp_path / "out", weights)


def test_without_shipped_weights_only_the_target_is_made(tmp_path, tiny_target):
    made = public_compose(tmp_path / "out", tmp_path / "nothing")
    assert made.target.is_dir()
    assert made.draft is None
    assert made.eagle3 is None


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SDSIE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("SDSIE_CACHE")
    assert cache_dir() == Path("/b/sdsie")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "sdsie"


def test_names():
    assert hugging_face_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert hugging_face_name("blk.29.ffn_norm.weight") == "model.layers.29.post_attention_layernorm.weight"
    assert hugging_face_name("token_embd.weight") == EMBEDDING
    assert hugging_face_name("output_norm.weight") == "model.norm.weight"


def test_rotary_pairs_become_halves():
    rows = np.arange(8)[:, None] * np.ones((1, 3))  # two heads of four rows
    assert rotary_halves(rows, head_dim=4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_folder_of_somebody_else_is_never_replaced(tmp_path, tiny_target, weights):
    (tmp_path / "out" / "draft").mkdir(parents=True)
    thesis = tmp_path / "out" / "draft" / "thesis.txt"
    thesis.write_text("years of work")
    with pytest.raises(DemoError, match="is not the demo's"):
        compose(tmp_path / "out", weights)
    assert thesis.read_text() == "years of work"


@pytest.mark.parametrize("stamp", ["[]", "{", '{"files": 3, "format": 1, "sources": {}}'])
def test_a_damaged_stamp_means_made_anew(tmp_path, tiny_target, weights, stamp):
    made = compose(tmp_path / "out", weights)
    (made.target / "sdsie-demo.json").write_text(stamp)
    compose(tmp_path / "out", weights)
    assert len(tiny_target) == 2


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_manifest_is_named(tmp_path, tiny_target, weights, text):
    (weights / "manifest.json").write_text(text)
    with pytest.raises(DemoError, match=r"manifest\.json is damaged"):
        compose(tmp_path / "out", weights)
