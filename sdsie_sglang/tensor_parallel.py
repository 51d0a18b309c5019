"""What can be split over tensor-parallel ranks, said before any weight is loaded. No SGLang."""

from typing import Any


def split_problem(role: str, config: dict[str, Any], tp_size: int) -> str | None:
    """Why the model cannot be split over `tp_size` GPUs, or None.

    A draft is split like its target, on the same ranks. SGLang's CPU engine needs none of this: it pads heads.

    Args:
        role: "target" or "draft".
        config: the checkpoint's config.json; what it does not say is left to SGLang.
    """
    heads = config.get("num_attention_heads")
    if heads is None:
        return None
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % tp_size == 0 and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0):
        return None
    fits = [n for n in range(1, tp_size) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    return (
        f"the {role}'s {heads} attention heads ({kv_heads} of keys and values) cannot be split over "
        f"--tp-size {tp_size}: use --tp-size {fits[-1]}"
    )
