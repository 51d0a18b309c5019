"""Many Resolution Gears at once: greedy decoding of one model in PyTorch, each row with layers and a gate of its own.

A row is one prompt under one setting: which layers' down_proj run in INT4, and who decides when. Prefill is full
precision for all rows, as in the server; each decode step multiplies by both weights and takes, row by row, the
one that is engaged. The clutch is the server's own object, with the server's lag.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sdsie_sglang.demo.llama import GROUP, HEADS, KV_HEADS, Llama, linear, rms_norm, rotary_table
from sdsie_sglang.gears import Observation, PolicySettings, build_policy
from sdsie_sglang.kernels.entropy import entropy_bits

END = 2
STRETCH = 64  # attention reads the cache in steps of so many positions
SETTINGS_AT_ONCE = 8  # whose distributions are compared with the control's
Bools = NDArray[np.bool_]


class Gates:
    """Who is engaged at each step.

    Args:
        policies: one a row; None is the control, which never engages.
        lag: step n is decided by the entropies of steps up to n - lag.
        waits: the original's start: full precision until the first decision that saw an entropy.
    """

    def __init__(self, policies: Sequence[PolicySettings | None], lag: int, *, waits: bool = False) -> None:
        built = {settings: build_policy(settings) for settings in set(policies) if settings is not None}
        self._policies = [None if settings is None else built[settings] for settings in policies]
        self._gates = [None if policy is None else policy.start_request() for policy in self._policies]
        self._lag = lag
        self._waits = waits
        self._seen: list[Tensor] = []

    def step(self) -> Bools:
        """[rows], for the next step."""
        last = len(self._seen) - self._lag
        if last >= 0:
            for gate, bits in zip(self._gates, self._seen[last].tolist(), strict=True):
                if gate is not None:
                    gate.observe(Observation(1, (bits,), 1))
        elif self._waits:
            return np.zeros(len(self._gates), bool)
        return np.array(
            [
                policy is not None and gate is not None and policy.decide([gate]) > 0
                for policy, gate in zip(self._policies, self._gates, strict=True)
            ]
        )

    def saw(self, bits: Tensor) -> None:
        """Entropies [rows] of the step that was decided last; read when due, so that a device may run ahead."""
        self._seen.append(bits)


@dataclass
class Low:
    """INT4 weights as they multiply in effect, and which rows they belong to.

    Args:
        weights: [layers] of [H, MLP], in the activations' dtype; only gated layers' are read.
        layers: [rows, layers] bool, on the model's device.
    """

    weights: Sequence[Tensor]
    layers: Tensor

    def __post_init__(self) -> None:
        self._gated = self.layers.any(0).tolist()

    def of(self, layer: int, on: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """A layer's weight and the rows that multiply by it now; nothing where no row's setting holds the layer."""
        return (self.weights[layer], on & self.layers[:, layer]) if self._gated[layer] else (None, None)


def feed_forward(block: torch.nn.Module, x: Tensor, low: Tensor | None, on: Tensor | None) -> Tensor:
    """The residual stream [rows, …, H] after the MLP, down_proj by `low` in the rows that are `on`."""
    inner = mlp_inner(block, x)
    down = linear(inner, block.down)
    if low is None or on is None:
        return x + down
    return x + torch.where(on.view(-1, *[1] * (x.ndim - 1)), F.linear(inner, low), down)


def mlp_inner(block: torch.nn.Module, x: Tensor) -> Tensor:
    """What down_proj is given."""
    gate, up = linear(rms_norm(x, block.mlp_norm), block.gate_up).chunk(2, -1)
    return F.silu(gate) * up


@dataclass
class Cache:
    """Keys and values [layers, rows, 3, length, D]; how many positions each row has, [rows]."""

    keys: Tensor
    values: Tensor
    lengths: Tensor

    def repeated(self, times: int, length: int) -> "Cache":
        """For `times` settings of the same prompts, with room for `length` positions."""
        length = -(-length // STRETCH) * STRETCH

        def widened(x: Tensor) -> Tensor:
            wide = x.new_zeros(x.shape[0], times, *x.shape[1:3], length, x.shape[4])
            wide[:, :, :, :, : x.shape[3]] = x[:, None]
            return wide.flatten(1, 2)

        return Cache(widened(self.keys), widened(self.values), self.lengths.repeat(times))


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [rows, longest], zeros at the end, and lengths [rows]."""
    lengths = torch.tensor([len(row) for row in rows], device=device)
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    return tokens.to(device), lengths


def read(
    model: Llama,
    tokens: Tensor,  # [rows, T]
    lengths: Tensor,  # [rows]
    low: Low | None = None,
    on: Tensor | None = None,  # [rows] bool
    inners: list[Tensor] | None = None,
) -> tuple[Tensor, Cache]:
    """Logits [rows, vocabulary] after each row's last token, and the cache. With `low` at every position of a row.

    Args:
        inners: receives each layer's down_proj inputs [rows, T, MLP].
    """
    x = F.embedding(tokens, model.embedding)
    tables = rotary_table(tokens.shape[1], x.device, x.dtype)
    keys, values = [], []
    for i, block in enumerate(model.blocks):
        query, key, value = block.split_heads(rms_norm(x, block.input_norm), *tables)
        keys.append(key)
        values.append(value)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + linear(attended.transpose(1, 2).flatten(2), block.out)
        if inners is not None:
            inners.append(mlp_inner(block, x))
        x = feed_forward(block, x, *((None, None) if low is None or on is None else low.of(i, on)))
    last = x[torch.arange(len(x), device=x.device), lengths - 1]
    return logits_of(model, last), Cache(torch.stack(keys), torch.stack(values), lengths.clone())


def logits_of(model: Llama, x: Tensor) -> Tensor:
    return F.linear(rms_norm(x, model.norm), model.embedding)


def decode_step(model: Llama, tokens: Tensor, cache: Cache, low: Low, on: Tensor) -> Tensor:
    """Logits [rows, vocabulary] after one more token [rows] a row, which enters the cache. `on`: [rows] bool."""
    x = F.embedding(tokens, model.embedding)
    at = cache.lengths
    rows = torch.arange(len(tokens), device=x.device)[:, None]
    heads = torch.arange(KV_HEADS, device=x.device)[None]
    total = cache.keys.shape[3]
    span = -(-(int(at.max()) + 1) // STRETCH) * STRETCH
    cosines, sines = (table[at, None, None] for table in rotary_table(total, x.device, x.dtype))
    seen = (torch.arange(span, device=x.device) <= at[:, None])[:, None, None]
    for i, block in enumerate(model.blocks):
        query, key, value = block.split_heads(rms_norm(x, block.input_norm)[:, None], cosines, sines)
        cache.keys[i][rows, heads, at[:, None]] = key[:, :, 0]
        cache.values[i][rows, heads, at[:, None]] = value[:, :, 0]
        # The query heads of a group act as rows of one head, so keys are read once.
        grouped = query[:, :HEADS, 0].unflatten(1, (KV_HEADS, GROUP))
        attended = F.scaled_dot_product_attention(
            grouped, cache.keys[i][:, :, :span], cache.values[i][:, :, :span], attn_mask=seen
        )
        x = x + linear(attended.flatten(1), block.out)
        x = feed_forward(block, x, *low.of(i, on))
    cache.lengths = at + 1
    return logits_of(model, x)


@dataclass
class Text:
    """Answers [rows, new], each of them to be cut at `END`, and who was engaged [rows, new - 1]."""

    tokens: NDArray[np.int64]
    engaged: Bools


def generate(model: Llama, prompts: Cache, first: Tensor, low: Low, gates: Gates, new: int) -> Text:
    """Greedy answers of `new` tokens; `first` [prompts] is the prefill's. Rows are settings by prompts."""
    settings = len(low.layers) // len(first)
    cache = prompts.repeated(settings, int(prompts.lengths.max()) + new)
    token = first.repeat(settings)
    tokens, engaged = [token], []
    for _ in range(new - 1):
        engaged.append(gates.step())
        logits = decode_step(model, token, cache, low, torch.from_numpy(engaged[-1]).to(token.device))
        gates.saw(entropy_bits(logits))
        token = logits.argmax(-1)
        tokens.append(token)
    return Text(torch.stack(tokens, 1).cpu().numpy(), np.stack(engaged, 1))


@dataclass
class Forced:
    """Against the control, over its own answers: [rows] means a token. In nats."""

    kl: NDArray[np.float64]
    top1: NDArray[np.float64]
    nll: NDArray[np.float64]


def force(model: Llama, prompts: Cache, answers: Tensor, lengths: Tensor, low: Low, gates: Gates) -> Forced:
    """Every setting reads the control's answers [prompts, new] of these lengths. The first rows are the control."""
    count, new = answers.shape
    settings = len(low.layers) // count
    cache = prompts.repeated(settings, int(prompts.lengths.max()) + new)
    sums = torch.zeros(3, settings, count, device=answers.device, dtype=torch.float64)
    for step in range(new - 1):
        on = torch.from_numpy(gates.step()).to(answers.device)
        logits = decode_step(model, answers[:, step].repeat(settings), cache, low, on)
        gates.saw(entropy_bits(logits))
        q = logits.float().log_softmax(-1).unflatten(0, (settings, count))
        p, target = q[0], answers[:, step + 1]
        share = p.exp()
        kl = torch.cat([(share * (p - some)).sum(-1) for some in q.split(SETTINGS_AT_ONCE)])
        top1 = q.argmax(-1) == p.argmax(-1)
        nll = -q.gather(-1, target.expand(settings, count)[..., None])[..., 0]
        counts = step + 1 < lengths
        sums += torch.stack([kl, top1.to(kl.dtype), nll]).double() * counts
    means = (sums / (lengths - 1).clamp(min=1)).flatten(1).cpu().numpy()
    return Forced(*means)


def generate_recomputing(model: Llama, rows: Sequence[Sequence[int]], low: Low, gates: Gates, new: int) -> Text:
    """As the original did: no cache, so that a gear changes how the whole text before is read, at every step."""
    tokens, lengths = padded([list(row) + [0] * new for row in rows], low.layers.device)
    lengths = lengths - new
    places = torch.arange(len(rows), device=tokens.device)
    found, engaged = [], []
    for _ in range(new):
        engaged.append(gates.step())
        on = torch.from_numpy(engaged[-1]).to(tokens.device)
        logits, _ = read(model, tokens[:, : int(lengths.max())], lengths, low, on)
        gates.saw(entropy_bits(logits))
        found.append(logits.argmax(-1))
        tokens[places, lengths] = found[-1]
        lengths = lengths + 1
    return Text(torch.stack(found, 1).cpu().numpy(), np.stack(engaged, 1)[:, 1:])
