import pytest
import torch

from sdsie_sglang.cpu_engine import packing


@pytest.mark.parametrize(
    ("dtype", "supported"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.int32, False)],
)
def test_float32_is_packed_too(dtype, supported):
    def sglangs(weight):
        return weight.dtype == torch.bfloat16

    assert packing.dtype_is_supported(sglangs, torch.zeros(2, 2, dtype=dtype)) is supported


def test_heads_are_multiplied_packed():
    def sglangs(layer):
        return getattr(layer, "use_intel_amx_backend", False)

    linear, head = torch.nn.Linear(4, 4), torch.nn.Embedding(4, 4)
    assert not packing.use_intel_amx_backend(sglangs, linear)
    linear.use_intel_amx_backend = True
    assert packing.use_intel_amx_backend(sglangs, linear)
    assert packing.use_intel_amx_backend(sglangs, head)
    assert not packing.use_intel_amx_backend(sglangs, head.to("meta"))
    assert not packing.use_intel_amx_backend(sglangs, head.to(torch.complex64))
    head.weight = None  # a head shared with the target before it is
    assert not packing.use_intel_amx_backend(sglangs, head)
