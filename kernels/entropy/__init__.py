"""Shannon entropy of rows of logits, in bits: the only entropy function in the repository."""

import torch

from sdsie_sglang.kernels.entropy.reference import entropy_bits_reference


def entropy_bits(
    logits: torch.Tensor, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Entropy of softmax(logits[rows]) in bits, by the Triton kernel on a GPU and by PyTorch elsewhere.

    Args:
        logits: [num_rows, vocab], any float dtype; -inf marks a token that cannot be drawn.
        rows: [n] int64 row indices on the same device; None means every row.
        out: [n] float32, contiguous, to write into.

    Returns:
        [n] float32. A row with a NaN, with +inf, or with nothing but -inf gives NaN.
    """
    if logits.is_cuda:
        from sdsie_sglang.kernels.entropy.kernel import entropy_bits_triton

        return entropy_bits_triton(logits, rows, out)
    bits = entropy_bits_reference(logits, rows)
    return bits if out is None else out.copy_(bits)


def top_probability(logits: torch.Tensor) -> torch.Tensor:
    """Probability of each row's likeliest token, of logits [rows, vocab]: [rows] float32, NaN as for the entropy."""
    if logits.is_cuda:
        from sdsie_sglang.kernels.entropy.kernel import top_probability_triton

        return top_probability_triton(logits)
    return logits.float().softmax(dim=-1).amax(dim=-1)


__all__ = ["entropy_bits", "entropy_bits_reference", "top_probability"]
