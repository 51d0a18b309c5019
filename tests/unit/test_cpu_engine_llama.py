"""The ops put together as SGLang's Llama does: against Transformers, and independent of how tokens are fed."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sdsie_sglang.cpu_engine.ops import attention

ops = torch.ops.sgl_kernel
CONFIG = LlamaConfig(
    vocab_size=1000,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=3,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
TOKENS = 90


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, CONFIG.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))


class Llama:
    """One request on the CPU ops, its KV cache in a pool."""

    def __init__(self, reference):
        self.model = reference.model
        half = torch.arange(0, 64, 2) / 64
        angles = torch.outer(torch.arange(1024.0), 1.0 / CONFIG.rope_parameters["rope_theta"] ** half)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.pack = [self._packed(layer) for layer in self.model.layers]
        self.pools = [[torch.zeros(1024, 3, 64) for _ in "kv"] for _ in self.model.layers]
        generator = torch.Generator().manual_seed(2)
        self.table = (torch.randperm(1023, generator=generator) + 1).int().unsqueeze(0)
        self.length = 0

    @staticmethod
    def _packed(layer):
        a, m = layer.self_attn, layer.mlp
        fused = {
            "qkv": torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)),
            "o": a.o_proj.weight,
            "gate_up": torch.cat((m.gate_proj.weight, m.up_proj.weight)),
            "down": m.down_proj.weight,
        }
        return {name: ops.convert_weight_packed(w) for name, w in fused.items()}

    def feed(self, tokens, decode=False):
        """Logits of the tokens, which follow those already fed; `decode`: the op for one token a request."""
        new = len(tokens)
        positions = torch.arange(self.length, self.length + new)
        slots = self.table[0, positions].long()
        self.length += new
        x, residual = self.model.embed_tokens(tokens), None
        for layer, w, (k_pool, v_pool) in zip(self.model.layers, self.pack, self.pools, strict=True):
            if residual is None:
                residual = x.clone()
                x = ops.rmsnorm_cpu(x, layer.input_layernorm.weight, 1e-5)
            else:
                ops.fused_add_rmsnorm_cpu(x, residual, layer.input_layernorm.weight, 1e-5)
            q, k, v = ops.weight_packed_linear(x, w["qkv"], None, True).split((576, 192, 192), dim=-1)
            q, k = ops.rotary_embedding_cpu(positions, q, k, 64, self.cos_sin, True)
            o = torch.empty(new, 9, 64)
            one, scale = torch.tensor([0]), 1 / math.sqrt(64)
            if decode:
                ops.decode_attention_cpu(
                    q.view(-1, 9, 64), k_pool, v_pool, 1.0, 1.0, o, k, v, slots, torch.empty(0), self.table,
                    one, torch.tensor([self.length]), scale, 0.0, False, 0, None, None,
                )  # fmt: skip
            else:
                ops.store_cache_cpu(k, v, k_pool, v_pool, slots, 192)
                ops.extend_attention_cpu(
                    q.view(-1, 9, 64), k, v, o, k_pool, v_pool, 1.0, 1.0, self.table, one,
                    torch.tensor([self.length]), torch.tensor([new]), one, new, scale, 0.0, False, 0,
                    None, None, None, True,
                )  # fmt: skip
            x = ops.weight_packed_linear(o.flatten(1), w["o"], None, True)
            ops.fused_add_rmsnorm_cpu(x, residual, layer.post_attention_layernorm.weight, 1e-5)
            x = ops.silu_and_mul_cpu(ops.weight_packed_linear(x, w["gate_up"], None, True))
            x = ops.weight_packed_linear(x, w["down"], None, True)
        ops.fused_add_rmsnorm_cpu(x, residual, self.model.norm.weight, 1e-5)
        return ops.weight_packed_linear(x, self.model.embed_tokens.weight, None, True)


def in_pieces(reference, tokens, sizes, decode_ones=True):
    model = Llama(reference)
    pieces = tokens.split(sizes)
    return torch.cat([model.feed(piece, decode=decode_ones and len(piece) == 1) for piece in pieces])


def test_logits_are_those_of_transformers(reference, tokens):
    expected = reference(tokens.unsqueeze(0)).logits[0]
    actual = in_pieces(reference, tokens, [20, *[1] * 30, *[6] * 6, 4])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("width", [2, 4, 6, 8, 30])
def test_verifying_gives_the_bits_of_decoding(reference, tokens, width):
    """A prompt of 20, then tokens one by one or `width` at a time: the logits are equal."""
    rest = TOKENS - 20
    one_by_one = in_pieces(reference, tokens, [20] + [1] * rest)
    wide = in_pieces(reference, tokens, [20] + [width] * (rest // width) + [rest % width] * (rest % width > 0))
    assert torch.equal(one_by_one, wide)


def test_the_whole_text_as_a_prompt_gives_the_bits_of_decoding(reference, tokens):
    """So a retracted request that is prefilled again, or a radix-cache hit, changes nothing."""
    assert attention.MAX_ROWS >= TOKENS
    one_by_one = in_pieces(reference, tokens, [1] * TOKENS)
    assert torch.equal(one_by_one, in_pieces(reference, tokens, [TOKENS]))
