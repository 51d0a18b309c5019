"""The EAGLE-3 head as SGLang 0.5.23 runs it (`models/llama_eagle3.py`), unrolled over whole rows at once.

Entry i of a row holds the target's feature of token i and the embedding of token i + 1, sits at position i
and predicts token i + 2. Draft step k of a cycle reads the head's own un-normed output of step k - 1 in
place of a feature. Unrolled on the row's true tokens, step k of entry i therefore attends to the step-1
keys of entries up to i - (k - 1) and to the step-m key of entry i - (k - m) for m = 2 … k: what the chain
that was started at entry i - (k - 1) would have cached. This is exact as long as every drafted token before
it was accepted.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sdsie_sglang.demo.llama import (
    GROUP,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    Block,
    linear,
    rms_norm,
    rotary_table,
)

AUX_HIDDEN_STATES = (2, 15, 27)
"""Which of the target's hidden states are read: SGLang's default for 30 layers, written out in the config."""


class Eagle3Head(nn.Module):
    """One decoder layer over [embedding, hidden]; embedding and output head are the target's."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse = nn.Parameter(torch.empty(HIDDEN, len(AUX_HIDDEN_STATES) * HIDDEN))
        self.block = Block(input_width=2 * HIDDEN)
        self.hidden_norm = nn.Parameter(torch.ones(HIDDEN))
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.register_buffer("embedding", torch.empty(0, HIDDEN), persistent=False)
        self.embedding: Tensor

    @classmethod
    def from_target(cls, folder: Path, donor: int = 28) -> "Eagle3Head":
        """A start for training: a late layer of the target that reads the last feature almost unchanged."""
        weights = load_file(folder / "model.safetensors")
        prefix, head = f"model.layers.{donor}.", cls()
        generator = torch.Generator().manual_seed(0)
        for part in "qkv":
            name = f"{prefix}self_attn.{part}_proj.weight"
            late = weights[name].float()
            weights[name] = torch.cat([0.01 * torch.randn(late.shape, generator=generator), late], 1)
        head.block.load(weights, prefix)
        head.block.input_norm.data = torch.ones(HIDDEN)
        head.hidden_norm.data = weights[prefix + "input_layernorm.weight"].float()
        head.norm.data = weights["model.norm.weight"].float()
        fuse = 0.002 * torch.randn(head.fuse.shape, generator=generator)
        fuse[:, -HIDDEN:] += torch.eye(HIDDEN)
        head.fuse.data = fuse
        head.embedding = weights["model.embed_tokens.weight"]
        return head

    @classmethod
    def from_checkpoint(cls, folder: Path, target: Path) -> "Eagle3Head":
        """Read a trained head and the target's embedding."""
        weights, head = load_file(folder / "model.safetensors"), cls()
        head.block.load(weights, "midlayer.")
        head.fuse.data = weights["fc.weight"].float()
        head.hidden_norm.data = weights["midlayer.hidden_norm.weight"].float()
        head.norm.data = weights["norm.weight"].float()
        head.embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        return head

    def named_weights(self) -> dict[str, Tensor]:
        """Weights under the names that SGLang's loader reads."""
        return {
            "fc.weight": self.fuse.detach(),
            "midlayer.hidden_norm.weight": self.hidden_norm.detach(),
            "norm.weight": self.norm.detach(),
            **self.block.named_weights("midlayer."),
        }

    def unroll(self, tokens: Tensor, features: Sequence[Tensor], steps: int) -> list[Tensor]:
        """Normed output (B, T - 1, H) of each draft step.

        tokens: (B, T); features: the target's hidden states at `AUX_HIDDEN_STATES`, each (B, T, H).
        """
        embedded = rms_norm(F.embedding(tokens[:, 1:], self.embedding), self.block.input_norm)
        hidden = linear(torch.cat([feature[:, :-1] for feature in features], -1), self.fuse)
        length = hidden.shape[1]
        tables = rotary_table(length, hidden.device, hidden.dtype)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for _ in range(steps):
            both = torch.cat([embedded, rms_norm(hidden, self.hidden_norm)], -1)
            queries, key, value = self.block.split_heads(both, *tables)
            keys.append(key)
            values.append(value)
            attended = _chain_attention(queries, keys, values)
            raw = self.block.feed_forward(hidden + linear(attended, self.block.out))
            outputs.append(rms_norm(raw, self.norm))
            hidden = _later(raw, 1, axis=1)
        return outputs


def _chain_attention(queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention of draft step k = len(keys). queries: (B, 9, T, D); keys, values: per step (B, 3, T, D).

    Returns (B, T, 9 * D).
    """
    step, length = len(keys), queries.shape[2]
    grouped = queries.unflatten(1, (KV_HEADS, GROUP))  # (B, 3, 3, T, D)
    scores = grouped.flatten(2, 3) @ keys[0].transpose(-1, -2)  # (B, 3, 3 * T, T)
    index = torch.arange(length, device=queries.device)
    visible = index[None, :] <= index[:, None] - (step - 1)
    scores = scores.unflatten(2, (GROUP, length)).masked_fill(~visible, torch.finfo(scores.dtype).min)
    shifts = [step - m for m in range(2, step + 1)]
    own = [
        (grouped * _later(key, shift, axis=2).unsqueeze(2)).sum(-1, keepdim=True)
        for key, shift in zip(keys[1:], shifts, strict=True)
    ]
    weights = torch.softmax(torch.cat([scores, *own], -1).float() * HEAD_DIM**-0.5, -1).to(queries.dtype)
    attended = (weights[..., :length].flatten(2, 3) @ values[0]).unflatten(2, (GROUP, length))
    for column, (value, shift) in enumerate(zip(values[1:], shifts, strict=True)):
        share = weights[..., length + column, None]
        attended = attended + share * _later(value, shift, axis=2).unsqueeze(2)
    return attended.flatten(1, 2).transpose(1, 2).flatten(2)


def _later(x: Tensor, entries: int, axis: int) -> Tensor:
    """Shift along `axis` so that entry i gets what entry i - `entries` held; zeros come in at the front."""
    if entries == 0:
        return x
    length = x.shape[axis]
    padding = [0, 0] * (x.dim() - axis - 1) + [entries, 0]
    return F.pad(x, padding).narrow(axis, 0, length)
