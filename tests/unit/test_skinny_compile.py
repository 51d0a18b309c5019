"""The kernel compiles for sm_90 without a GPU, with the loads and instructions it was written for."""

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sdsie_sglang.kernels.skinny_gemm import gemm, kernel  # noqa: E402

pytestmark = pytest.mark.skipif(gemm.INTERPRET, reason="the interpreter doesn't compile")


def _compile(capability: int = 90, **changes: Any) -> Any:
    constants = {
        "K": 4096, "MASK_N": False, "R": 1, "C": 1, "W": 8, "V": 4, "DEPTH": 1,
        "HAS_BIAS": False, "PDL": capability >= 90, "IS_BF16": True, "INTERPRET": False,
    } | changes  # fmt: skip
    float_type = "*bf16" if constants["IS_BF16"] else "*fp16"
    types = {"x": "*i32", "w": "*i32", "bias": float_type, "y": float_type}
    names = [parameter.name for parameter in kernel.skinny_kernel.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name == "N"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": constants["W"], "maxnreg": 128} | ({"launch_pdl": True} if constants["PDL"] else {})
    source = ASTSource(kernel.skinny_kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def test_weights_are_asked_for_before_the_wait_with_16_byte_loads() -> None:
    compiled = _compile()
    ptx = compiled.asm["ptx"]
    weights = re.findall(r"ld\.global\.L1::evict_first\S*\.b32 \{([^}]*)\}", ptx)
    assert len(weights) == 4 * 8, "four steps of four vectors in two rows"
    assert all(len(registers.split(",")) == 4 for registers in weights), "16 bytes a lane"
    assert ptx.count("mma.sync.aligned.m16n8k16") == 4 * 8
    before, _, after = ptx.partition("griddepcontrol.wait")
    assert before.count("L1::evict_first") >= 8
    assert "griddepcontrol.launch_dependents" in before
    assert "ld.global.v4" not in before
    assert "ld.global.v4" in after, "activations only after the kernel before has ended"
    assert compiled.metadata.shared == 0, "no layout conversion: shared memory is only in the sum over warps"
    assert ptx.count("bar.sync") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"R": 2, "C": 2, "DEPTH": 2, "HAS_BIAS": True, "IS_BF16": False},
        {"K": 1288, "MASK_N": True, "W": 4, "V": 2},
        {"K": 14336, "W": 16},
    ],
    ids=["two column tiles fp16", "masked", "long"],
)
def test_variants(changes: dict[str, Any]) -> None:
    ptx = _compile(**changes).asm["ptx"]
    assert "m16n8k16" in ptx


def test_sm80_has_no_dependent_launch() -> None:
    assert "griddepcontrol" not in _compile(80).asm["ptx"]
