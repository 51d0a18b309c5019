"""Random models that start in no time: a target, and a draft that agrees with it about two times in three."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512
NOISE = 0.03  # of the draft's weights, as a share of their spread
SHARPNESS = 4.0  # spreads the entropies around 1.6 bits, across the thresholds of a preset


def _build(head_dim: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=512, initializer_range=0.2,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data *= SHARPNESS
    return model


def _write(model: LlamaForCausalLM, folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {**model.config.to_diff_dict(), "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: p.contiguous() for name, p in model.state_dict().items()}, folder / "model.safetensors")
    return folder


def write_tiny_models(folder: Path, head_dim: int = 16) -> tuple[Path, Path]:
    """Folders of target and draft: Llamas with 4 heads, 2 of keys and values; no tokenizer.

    Args:
        head_dim: a GPU's attention kernels want at least 64.
    """
    target, draft = _build(head_dim), _build(head_dim)
    generator = torch.Generator().manual_seed(5)
    for parameter in draft.parameters():
        parameter.data += NOISE * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    return _write(target, folder / "target"), _write(draft, folder / "draft")


def tiny_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (10 + 3 * i,), generator=generator).tolist() for i in range(count)]
