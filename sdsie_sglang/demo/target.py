"""Turns the target's GGUF file (Q4_1, 135M parameters) into a Transformers checkpoint in bfloat16."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from sdsie_sglang.demo.gguf_source import locate_gguf

CHAT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def write_target(folder: Path) -> None:
    """Write the target's complete checkpoint (weights, config, tokenizer) into the empty `folder`."""
    from transformers import AutoTokenizer

    gguf_path = locate_gguf()
    save_file(read_weights(gguf_path), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", llama_config())
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    _write_json(folder / "generation_config.json", ids)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    # Some Transformers versions take the GGUF's first special token for the end of text.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder)


def llama_config() -> dict[str, Any]:
    """The target's `config.json`; the rotary base is given in both the old and the new way."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 49152,
    }


def read_weights(gguf_path: Path) -> dict[str, torch.Tensor]:
    """The GGUF file's tensors under Transformers' names, dequantised and rounded to bfloat16."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    weights: dict[str, torch.Tensor] = {}
    for tensor in GGUFReader(gguf_path).tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name = hugging_face_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = rotary_halves(values, head_dim=64)
        weights[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
    return weights


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`, and the like."""
    stem = gguf_name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return _TOP_NAMES[stem] + ".weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def rotary_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo GGUF's row order of query and key weights.

    GGUF interleaves the two rotated halves of each head (rows 0, 1, 2, … hold pairs); Transformers and
    SGLang keep them apart (first half, second half). rows: (heads * head_dim, width).
    """
    heads = rows.shape[0] // head_dim
    pairs = rows.reshape(heads, head_dim // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
