"""The attention kernel without a GPU: the interpreter, the reference against PyTorch's own, compiling, refusals."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sdsie_sglang.kernels.skinny_attention import attention, skinny_attention
from sdsie_sglang.kernels.skinny_attention.reference import rotate

from .skinny_attention_cases import make_case


def test_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, Path(__file__).with_name("skinny_attention_interpreted.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_reference_is_causal_attention() -> None:
    length, width, groups, heads, size = 40, 6, 4, 2, 64
    case = make_case([length], width, groups, heads, size)
    arrived = torch.zeros(heads, dtype=torch.int32)
    ours = case.fresh()
    got = skinny_attention(*ours, arrived)
    q, k, v = case.qkv.view(width, -1, size).split([groups * heads, heads, heads], dim=1)
    q, k = rotate(q, case.cos_sin, case.positions), rotate(k, case.cos_sin, case.positions)
    before = case.table[0, : length - width].long()
    keys, values = torch.cat([case.k_cache[before], k]), torch.cat([case.v_cache[before], v])
    mask = torch.ones(width, length, dtype=torch.bool).tril(length - width)
    expected = scaled_dot_product_attention(
        *(x.transpose(0, 1).float() for x in (q, keys, values)), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(got.float(), expected.transpose(0, 1).reshape(width, -1), rtol=1e-2, atol=1e-2)
    assert torch.equal(ours.k_cache[case.slots], k)


def test_rotation_is_sglangs() -> None:
    rope = pytest.importorskip("sglang.srt.layers.rotary_embedding.utils")
    case = make_case([9], 6, 2, 1, 32)
    q, k, _ = case.qkv.view(6, -1, 32).split([2, 1, 1], dim=1)
    cos, sin = case.cos_sin[case.positions].chunk(2, dim=-1)
    for x in (q, k):
        theirs = rope.apply_rotary_emb(x.float(), cos, sin, is_neox_style=True)
        torch.testing.assert_close(rotate(x, case.cos_sin, case.positions).float(), theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("width", "groups", "size"), [(1, 4, 64), (1, 4, 128), (6, 4, 128), (16, 4, 64)])
def test_compiles_for_hopper(width: int, groups: int, size: int) -> None:
    pytest.importorskip("triton")
    if attention.INTERPRET:
        pytest.skip("the interpreter doesn't compile")
    compiled = compile_for_hopper(width, groups, size)
    before, _, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert "ld.global" in before, "cached keys are asked for before the product is waited for"
    assert "mma" in after
    assert "mma" not in before
    assert compiled.metadata.shared <= 200 * 1024


def compile_for_hopper(width: int, groups: int, size: int, shape: attention.Shape | None = None) -> Any:
    """Compiled without a GPU; shape: how to cut, instead of what is used."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sdsie_sglang.kernels.skinny_attention import kernel

    chosen = attention.constants(width, groups, 8, size, shape or attention.best_shape(width * groups, size), True)
    types = {
        "positions": "*i64", "slots": "*i64", "table": "*i32", "lengths": "*i32", "arrived": "*i32", "cos_sin": "*fp32",
        "partial": "*fp32", "marks": "*fp32", "qkv_stride": "i32", "table_stride": "i32", "scale_log2": "fp32",
    }  # fmt: skip
    names = [parameter.name for parameter in kernel.attention_kernel.params]
    constants = {name: value for name, value in chosen.items() if name in names}
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in names if signature[name].startswith("*")}
    source = ASTSource(
        kernel.attention_kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes
    )
    options = {"num_warps": chosen["num_warps"], "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def test_says_what_it_does_not_take() -> None:
    case = make_case([9], 6, 2, 1, 32)
    arrived = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="takes no"):
        skinny_attention(*case._replace(qkv=case.qkv.half()), arrived)
    with pytest.raises(ValueError, match="fp32"):
        skinny_attention(*case._replace(cos_sin=case.cos_sin.bfloat16()), arrived)
    with pytest.raises(ValueError, match="slots"):
        skinny_attention(*case._replace(slots=case.slots.int()), arrived)
    with pytest.raises(ValueError, match="arrived"):
        skinny_attention(*case, arrived[:0])


def test_a_measured_cut_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(attention, "TUNED", tmp_path)
    (tmp_path / "H9.json").write_text('{"shapes": [{"size": 64, "rows": 32, "shape": [32, 128, 32, 8]}]}')
    assert attention.best_shape(24, 64, "NVIDIA H9") == attention.Shape(32, 128, 32, 8)
    for group_rows, size, gpu in ((4, 64, "NVIDIA H9"), (24, 128, "NVIDIA H9"), (24, 64, "NVIDIA H8"), (24, 64, "")):
        assert attention.best_shape(group_rows, size, gpu) == attention.Shape(warps=4 if group_rows <= 16 else 8)
