"""Products with a norm compile for sm_90 without a GPU, with the loads where they were put."""

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sdsie_sglang.kernels.skinny_gemm import gemm, norm_kernel  # noqa: E402

pytestmark = pytest.mark.skipif(gemm.INTERPRET, reason="the interpreter doesn't compile")


def _compile(kernel: Any, **changes: Any) -> Any:
    constants = {
        "K": 2048, "MASK_N": False, "R": 1, "C": 1, "W": 8, "V": 2, "DEPTH": 1,
        "HAS_BIAS": False, "PDL": True, "IS_BF16": True, "INTERPRET": False,
    } | changes  # fmt: skip
    types = {"x": "*i32", "w": "*i32", "squares": "*fp32", "eps": "fp32", "M": "i32", "N": "i32", "x_stride8": "i32"}
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name == "N"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": constants["W"], "maxnreg": 80, "launch_pdl": True}
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        (norm_kernel.add_norm_kernel, {}),
        (norm_kernel.normed_kernel, {"PAIR": 0}),
        (norm_kernel.normed_kernel, {"PAIR": 8192}),
    ],
    ids=["add_norm", "normed", "silu"],
)
def test_only_weights_are_asked_for_before_the_wait(kernel: Any, changes: dict[str, int]) -> None:
    compiled = _compile(kernel, **changes)
    ptx = compiled.asm["ptx"]
    before, _, after = ptx.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert len(re.findall(r"ld\.global", before)) == before.count("L1::evict_first") == 4, "two vectors of two rows"
    first_step, _, _ = after.partition("griddepcontrol.wait")
    assert "mma.sync" not in first_step
    if kernel is norm_kernel.add_norm_kernel:
        assert len(re.findall(r"ld\.global\.b16", first_step)) == 2, "residual and norm weight before the product"
        assert not re.search(r"ld\.global\.b16", after.partition("mma.sync")[2])
    else:
        assert len(re.findall(r"ld\.global", first_step)) == 4, "two steps of activations, no sums of squares yet"
        *_, last_loads, last_product = ptx.split("griddepcontrol.wait")
        assert "ld.global" not in last_product, "sums of squares are asked for behind the last weights"
        assert "ld.global" in last_loads
        assert "rsqrt" in last_product
    assert compiled.metadata.shared == 0, "no layout conversion: shared memory is only in the sum over warps"
    assert ptx.count("bar.sync") == 1


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        (norm_kernel.add_norm_kernel, {"R": 2, "C": 2, "HAS_BIAS": True, "K": 8192, "W": 16}),
        (norm_kernel.normed_kernel, {"PAIR": 0, "R": 2, "C": 2, "HAS_BIAS": True, "MASK_N": True}),
        (norm_kernel.normed_kernel, {"PAIR": 8192, "R": 2, "C": 2}),
    ],
    ids=["add_norm", "normed", "silu"],
)
def test_two_row_and_column_tiles(kernel: Any, changes: dict[str, Any]) -> None:
    compiled = _compile(kernel, **changes)
    assert "m16n8k16" in compiled.asm["ptx"]
    assert compiled.metadata.shared == 0
