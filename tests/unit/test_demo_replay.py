"""Models and replay of the demo against slower, plainer forms of the same thing."""

import pytest
import torch
import torch.nn.functional as F

from sdsie_sglang.demo.eagle3_head import AUX_HIDDEN_STATES, Eagle3Head
from sdsie_sglang.demo.llama import HEAD_DIM, HIDDEN, KV_HEADS, Llama, linear, rms_norm, rotary_table
from sdsie_sglang.demo.replay import ServedText, Walk, draft_flags, repeated_share, walk


def randomise(module: torch.nn.Module) -> None:
    """Fresh random weights, small enough that activations stay near one."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.04 * noise if parameter.dim() == 2 else 1 + 0.1 * noise


@pytest.fixture(scope="module")
def llama() -> Llama:
    model = Llama(2)
    randomise(model)
    model.embedding = torch.randn(300, HIDDEN, generator=torch.Generator().manual_seed(2))
    return model


def test_llama_agrees_with_transformers(llama: Llama):
    transformers = pytest.importorskip("transformers")
    from sdsie_sglang.demo.target import llama_config

    config = transformers.LlamaConfig(**{**llama_config(), "num_hidden_layers": 2, "vocab_size": 300})
    reference = transformers.LlamaForCausalLM(config).float().eval()
    weights = {**llama.named_weights(), "model.embed_tokens.weight": llama.embedding}
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    tokens = torch.randint(300, (2, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = reference.model(tokens, output_hidden_states=True)
        final, tapped = llama(tokens, taps=(0, 1))
    torch.testing.assert_close(final, wanted.last_hidden_state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tapped[1], wanted.hidden_states[1], rtol=1e-4, atol=1e-4)


def test_block_weights_survive_a_round_trip(llama: Llama):
    copy = Llama(2)
    weights = llama.named_weights()
    for layer, block in enumerate(copy.blocks):
        block.load(weights, f"model.layers.{layer}.")
    assert torch.equal(copy.blocks[1].qkv, llama.blocks[1].qkv)
    assert torch.equal(copy.blocks[1].gate_up, llama.blocks[1].gate_up)


def drafted_outputs(
    head: Eagle3Head, tokens: torch.Tensor, features: list[torch.Tensor], start: int, steps: int
) -> list[torch.Tensor]:
    """The chain started at entry `start`, one entry at a time with a cache, as a server runs it."""
    block = head.block
    hidden = linear(torch.cat([feature[0, : start + 1] for feature in features], -1), head.fuse)
    cosines, sines = rotary_table(tokens.shape[1], hidden.device, hidden.dtype)
    cached_keys = torch.empty(1, KV_HEADS, 0, HEAD_DIM)
    cached_values = torch.empty(1, KV_HEADS, 0, HEAD_DIM)
    outputs = []
    entries = list(range(start + 1))
    for _ in range(steps):
        for row, entry in enumerate(entries):
            embedded = rms_norm(F.embedding(tokens[0, entry + 1], head.embedding), block.input_norm)
            both = torch.cat([embedded, rms_norm(hidden[row], head.hidden_norm)])[None, None]
            query, key, value = block.split_heads(both, cosines[entry], sines[entry])
            cached_keys = torch.cat([cached_keys, key], 2)
            cached_values = torch.cat([cached_values, value], 2)
            attended = F.scaled_dot_product_attention(query, cached_keys, cached_values, enable_gqa=True)
            raw = block.feed_forward(hidden[row] + linear(attended.flatten(), block.out))
        outputs.append(rms_norm(raw, head.norm))
        hidden, entries = raw[None], [entries[-1] + 1]
    return outputs


def test_unrolled_head_equals_cached_drafting():
    head = Eagle3Head()
    randomise(head)
    generator = torch.Generator().manual_seed(4)
    head.embedding = torch.randn(300, HIDDEN, generator=generator)
    tokens = torch.randint(300, (1, 14), generator=generator)
    features = [torch.randn(1, 14, HIDDEN, generator=generator) for _ in AUX_HIDDEN_STATES]
    with torch.no_grad():
        unrolled = head.unroll(tokens, features, steps=5)
        for start in (0, 3, 8):
            chain = drafted_outputs(head, tokens, features, start, steps=5)
            for step, wanted in enumerate(chain):
                torch.testing.assert_close(unrolled[step][0, start + step], wanted, rtol=1e-4, atol=1e-4)


def test_draft_flags_say_which_next_tokens_are_named(llama: Llama):
    tokens = torch.randint(300, (1, 9), generator=torch.Generator().manual_seed(5))[0].tolist()
    with torch.no_grad():
        named = F.linear(llama(torch.tensor([tokens]))[0][0], llama.embedding).argmax(-1).tolist()
        shifted = F.linear(llama(torch.tensor([tokens[1:]]))[0][0], llama.embedding).argmax(-1).tolist()
    tokens[5] = named[4]  # the draft is right about token 5; nothing before it changes
    flags = draft_flags(llama, ServedText(tokens, 2))
    assert len(flags) == 9
    assert flags[4] is True
    assert flags[:4] == [named[p] == tokens[p + 1] for p in range(4)]
    assert draft_flags(llama, ServedText(tokens, 2), shifted=True)[:4] == [
        False,
        *(shifted[p - 1] == tokens[p + 1] for p in range(1, 4)),
    ]


def test_walk_counts_cycles_and_positions():
    # Prompt of 2, answer of 8 tokens (2 … 9): the prefill emits token 2, seven are left.
    flags = [p in (2, 3, 5, 7, 8) for p in range(10)]
    text = ServedText(list(range(10)), 2)
    # From 2: 3, 4 right, 5 wrong -> emits 3, 4, 5. From 5: 6 right, 7 wrong -> 6, 7. From 7: 8, 9.
    assert walk([flags] * 3, text) == Walk(3, reached=[3, 3, 1], accepted=[3, 2, 0])
    assert walk([flags], text).verify_count == 4
    assert walk([[False] * 10], text).verify_count == 7


def test_each_draft_step_has_flags_of_its_own():
    text = ServedText(list(range(6)), 1)
    always, never = [True] * 6, [False] * 6
    assert walk([always, never], text).verify_count == 2
    assert walk([never, always], text).verify_count == 4


def test_repeated_share():
    assert repeated_share([1, 2, 3, 4, 5, 6]) == 0
    assert repeated_share([7] * 10) == pytest.approx(6 / 7)
    assert repeated_share([1, 2]) == 0
