"""From a layer's weight to four-bit codes: without data, or with activations of a little text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdsie_sglang.int4.settings import CALIBRATIONS, Calibration
from sdsie_sglang.kernels.int4_gemm import QuantizedWeight, quantize

EXPONENTS = tuple(step / 10 for step in range(11))
ROWS_AT_A_TIME = 8192


@dataclass(frozen=True)
class CalibratedWeight:
    """W ≈ dequantised codes · diag(input_factors): y = codes · (input_factors ∘ x).

    Args:
        codes: of W · diag(1 / input_factors).
        input_factors: [K] float32, what x is multiplied by first; None means ones.
    """

    codes: QuantizedWeight
    input_factors: Tensor | None = None

    def effective(self) -> Tensor:
        """[N, K] float32: the matrix that x is multiplied by in effect."""
        weight = self.codes.dequantize()
        return weight if self.input_factors is None else weight * self.input_factors


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scales for activations of `dtype`: the kernel wants them alike; float32 is the reference's and takes bf16."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def calibrate(
    weight: Tensor,  # [N, K]
    name: str,
    *,
    inputs: Tensor | None = None,  # [samples, K], what the layer was given for a little text
    dtype: torch.dtype = torch.bfloat16,  # of the activations it will meet
) -> CalibratedWeight:
    """Raises ValueError if the calibration needs inputs and has none."""
    return calibrate_fused([weight], name, inputs=inputs, dtype=dtype)[0]


def calibrate_fused(
    weights: Sequence[Tensor],  # [N, K] each
    name: str,
    *,
    inputs: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[CalibratedWeight]:
    """The same for layers that SGLang runs as one, which have one input and so one set of factors."""
    how = CALIBRATIONS[name]
    if not how.needs_text:
        return [CalibratedWeight(_codes(weight, how, dtype)) for weight in weights]
    if inputs is None:
        raise ValueError(f"calibration {name} needs the layer's inputs for a little text")
    factors = input_factors(torch.cat(list(weights)), how, inputs, dtype)
    return [CalibratedWeight(_codes(weight.float() / factors, how, dtype), factors) for weight in weights]


def _codes(weight: Tensor, how: Calibration, dtype: torch.dtype) -> QuantizedWeight:
    """Some rows at a time: the search holds several float32 copies of what it is given."""
    parts = [
        quantize(rows, group=how.group, symmetric=how.symmetric, method=how.method, scale_dtype=scale_dtype(dtype))
        for rows in weight.split(ROWS_AT_A_TIME)
    ]
    return QuantizedWeight(
        q=torch.cat([part.q for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=None if how.symmetric else torch.cat([part.zeros for part in parts if part.zeros is not None]),
        group=how.group,
    )


def input_factors(weight: Tensor, how: Calibration, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """[K] float32 factors of the inputs with which the layer's outputs change least.

    Activation-aware scaling (Lin et al. 2023, https://arxiv.org/abs/2306.00978): columns whose inputs are large
    are enlarged before they are rounded, by (mean |x|)^a; a is searched from 0 to 1 by the outputs' squared error.
    Ranges are not clipped: to clip by the weights' error would cut just the columns that were enlarged.
    """
    weight, inputs = weight.float(), inputs.float()
    magnitude = inputs.abs().mean(0).clamp(min=1e-6)
    wanted = inputs @ weight.T
    best, best_error = torch.ones_like(magnitude), float("inf")
    for exponent in EXPONENTS:
        scale = magnitude**exponent
        scale = scale / (scale.max() * scale.min()).sqrt()
        # Rounded as it will be stored, so that what is searched is what runs.
        factors = (1 / scale).to(scale_dtype(dtype)).float()
        tried = CalibratedWeight(_codes(weight / factors, how, dtype), factors)
        error = float(((inputs @ tried.effective().T - wanted) ** 2).sum())
        if error < best_error:
            best, best_error = factors, error
    return best
