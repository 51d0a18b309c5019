"""The target's architecture in plain PyTorch, for training, sampling and replay.

Weights keep their own dtype (float32 while training) and are cast to the activations' dtype where they are
used. Shapes: B rows, T tokens, H = 576 hidden, D = 64 per head, 9 query heads in 3 groups that share keys
and values.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

HIDDEN, MLP, VOCABULARY = 576, 1536, 49152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
GROUP = HEADS // KV_HEADS
QKV_ROWS = (HEADS + 2 * KV_HEADS) * HEAD_DIM
NORM_EPS, ROPE_THETA = 1e-5, 100000.0
TARGET_LAYERS = 30


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm over the last axis, in x's dtype."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), NORM_EPS)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in x's dtype."""
    return F.linear(x, weight.to(x.dtype))


def rotary_table(length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (length, D), of positions 0 … length - 1."""
    exponents = torch.arange(0, HEAD_DIM, 2, device=device, dtype=torch.float32) / HEAD_DIM
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), ROPE_THETA**-exponents)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of the last axis, first half against second half."""
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat([-second, first], -1) * sines


class Block(nn.Module):
    """One decoder layer; `input_width` is 2H in an EAGLE-3 head, whose attention reads two vectors."""

    def __init__(self, input_width: int = HIDDEN) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(QKV_ROWS, input_width))
        self.out = nn.Parameter(torch.empty(HIDDEN, HEADS * HEAD_DIM))
        self.gate_up = nn.Parameter(torch.empty(2 * MLP, HIDDEN))
        self.down = nn.Parameter(torch.empty(HIDDEN, MLP))
        self.input_norm = nn.Parameter(torch.ones(HIDDEN))
        self.mlp_norm = nn.Parameter(torch.ones(HIDDEN))

    def load(self, weights: dict[str, Tensor], prefix: str) -> None:
        """Take over the weights named `{prefix}self_attn.q_proj.weight` and so on."""
        for parameter, names in self._names().items():
            joined = torch.cat([weights[prefix + name] for name in names])
            getattr(self, parameter).data = joined.to(getattr(self, parameter))

    def named_weights(self, prefix: str) -> dict[str, Tensor]:
        """The reverse of `load`."""
        rows = {
            "qkv": [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM],
            "gate_up": [MLP, MLP],
        }
        named: dict[str, Tensor] = {}
        for parameter, names in self._names().items():
            value = getattr(self, parameter).detach()
            parts = value.split(rows[parameter]) if parameter in rows else [value]
            named.update({prefix + name: part for name, part in zip(names, parts, strict=True)})
        return named

    @staticmethod
    def _names() -> dict[str, list[str]]:
        return {
            "qkv": [f"self_attn.{part}_proj.weight" for part in "qkv"],
            "out": ["self_attn.o_proj.weight"],
            "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            "down": ["mlp.down_proj.weight"],
            "input_norm": ["input_layernorm.weight"],
            "mlp_norm": ["post_attention_layernorm.weight"],
        }

    def split_heads(self, x: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, 9, T, D) and keys (B, 3, T, D), and values like keys. x: (B, T, width)."""
        joined = linear(x, self.qkv).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        rotated = rotate(joined[:, : HEADS + KV_HEADS], cosines, sines)
        return rotated[:, :HEADS], rotated[:, HEADS:], joined[:, HEADS + KV_HEADS :]

    def feed_forward(self, x: Tensor) -> Tensor:
        """The residual stream after the MLP. x: (…, H)."""
        gate, up = linear(rms_norm(x, self.mlp_norm), self.gate_up).chunk(2, -1)
        return x + linear(F.silu(gate) * up, self.down)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Causal attention over whole rows. x: (B, T, H); tables: (T, D)."""
        queries, keys, values = self.split_heads(rms_norm(x, self.input_norm), cosines, sines)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        x = x + linear(attended.transpose(1, 2).flatten(2), self.out)
        return self.feed_forward(x)


class Llama(nn.Module):
    """Decoder whose embedding is tied with its output head. The target, and drafts cut out of it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.register_buffer("embedding", torch.empty(VOCABULARY, HIDDEN), persistent=False)
        self.embedding: Tensor

    @classmethod
    def from_checkpoint(cls, folder: Path, layers: Sequence[int] | None = None) -> "Llama":
        """Read a checkpoint; `layers` picks some of its layers (default: all), which starts a draft."""
        weights = load_file(folder / "model.safetensors")
        picked = range(count_layers(weights)) if layers is None else layers
        model = cls(len(picked))
        model.embedding = weights["model.embed_tokens.weight"]
        model.norm.data = weights["model.norm.weight"].float()
        for block, layer in zip(model.blocks, picked, strict=True):
            block.load(weights, f"model.layers.{layer}.")
        return model

    def named_weights(self) -> dict[str, Tensor]:
        """Everything but the embedding, under Transformers' names."""
        named = {"model.norm.weight": self.norm.detach()}
        for layer, block in enumerate(self.blocks):
            named.update(block.named_weights(f"model.layers.{layer}."))
        return named

    def forward(self, tokens: Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Normed last hidden states (B, T, H), and the residual stream entering each layer in `taps`.

        tokens: (B, T), rows padded at the end. Activations have the embedding's dtype.
        """
        x = F.embedding(tokens, self.embedding)
        cosines, sines = rotary_table(tokens.shape[1], x.device, x.dtype)
        tapped = []
        for layer, block in enumerate(self.blocks):
            if layer in taps:
                tapped.append(x)
            x = block(x, cosines, sines)
        return rms_norm(x, self.norm), tapped


def count_layers(weights: dict[str, Tensor]) -> int:
    """Number of decoder layers in a checkpoint's weights."""
    return sum(name.endswith(".input_layernorm.weight") for name in weights)
