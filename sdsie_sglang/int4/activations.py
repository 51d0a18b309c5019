"""What linear layers are given for a little text, for calibrations that look at it."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

SAMPLES = 512  # rows of inputs kept a layer


def own_text(model: Any, prompts: Iterable[Sequence[int]], new_tokens: int) -> list[Tensor]:
    """Each prompt with the model's own greedy answer: [1, tokens] int64."""
    texts = []
    for ids in prompts:
        prompt = torch.tensor([list(ids)], device=model.device)
        texts.append(
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False)
        )
    return texts


def collect_inputs(model: torch.nn.Module, names: Iterable[str], texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Inputs [samples, K] of each named layer over the texts, rows spread evenly over them."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    rows = sum(text.numel() for text in texts)
    stride = max(1, rows // SAMPLES)

    def keeper(name: str) -> Any:
        def keep(_module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen[name].append(arguments[0].detach().flatten(0, -2)[::stride].cpu())

        return keep

    handles = [model.get_submodule(name).register_forward_pre_hook(keeper(name)) for name in seen]
    try:
        with torch.inference_mode():
            for text in texts:
                model(text)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}
