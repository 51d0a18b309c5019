"""Every kernel compiles for three generations without a GPU, with the loads and instructions it was written for."""

import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton._C.libtriton import ir  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402

from sdsie_sglang.kernels.int4_gemm import gemm, kernel  # noqa: E402
from sdsie_sglang.kernels.int4_gemm.tiles import REGISTERS_PER_SM, STREAM_TILES, Tile  # noqa: E402

pytestmark = pytest.mark.skipif(gemm.INTERPRET, reason="the interpreter doesn't compile")

INT, FLOAT = "*i32", "*bf16"
FRAGMENT_TYPES = {
    "x": INT,
    "words": INT,
    "scales": INT,
    "zeros": INT,
    "bias": FLOAT,
    "y": FLOAT,
    "partial": "*fp32",
    "arrived": INT,
}
FUSED_TYPES = FRAGMENT_TYPES | {"x": FLOAT}
STREAM_CONSTANTS = {
    "GROUP": 128, "SWIZZLE": 8, "SYMMETRIC": True, "HAS_BIAS": False, "IS_BF16": True, "INTERPRET": False,
}  # fmt: skip
H200_SHARED_BYTES = 228 * 1024  # of one SM
RESERVED_SHARED_BYTES = 1024  # of each resident block
DEQUANT_TYPES = {"words": INT, "scales": FLOAT, "zeros": FLOAT, "w": FLOAT}


def _source(function: Any, types: dict[str, str], constants: dict[str, Any]) -> ASTSource:
    names = [parameter.name for parameter in function.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name in ("N", "K")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(function, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)


def _compile(function: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int) -> Any:
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(_source(function, types, constants), target=target, options=options)


def _parse(function: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """Triton's front end alone, a tenth of the time: what it refuses depends on the variant and on the version."""
    target = GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    generators, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    return str(_source(function, types, constants).make_ir(target, parsed, generators, modules, context))


def _fragment(capability: int, rows: int, columns: int, warps: int, **changes: Any) -> Any:
    constants = {
        "GROUP": 128, "EVEN": True, "ONCE": False, "R": rows, "C": columns, "W": warps, "SPLIT": False,
        "SYMMETRIC": True, "HAS_BIAS": False, "AHEAD": True, "PDL": False, "IS_BF16": True, "INTERPRET": False,
    }  # fmt: skip
    return _compile(kernel.fragment_kernel, FRAGMENT_TYPES, constants | changes, capability, num_warps=warps)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_fragment_kernel(capability: int) -> None:
    compiled = _fragment(capability, rows=2, columns=1, warps=8)
    ptx = compiled.asm["ptx"]
    weights = re.findall(r"ld\.global\.L1::evict_first\S*\.b32 \{([^}]*)\}", ptx)
    assert len(weights) == 8, "two chunks of two row tiles, before and in the loop"
    assert all(len(registers.split(",")) == 4 for registers in weights), "16 bytes a thread"
    assert ptx.count("mma.sync.aligned.m16n8k16") == 16
    assert ptx.count("lop3.b32") >= 64
    assert "cvt.rn.f32.s" not in ptx, "no integer-to-float conversion"
    assert compiled.metadata.shared == 0, "no layout conversion: shared memory is only in the sum over warps"
    assert ptx.count("bar.sync") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"SPLIT": True, "EVEN": False},
        {"SYMMETRIC": False, "GROUP": 32, "HAS_BIAS": True},
        {"GROUP": 0, "ONCE": True, "IS_BF16": False},
        {"AHEAD": False, "GROUP": 64, "PDL": True},
    ],
    ids=["split", "asymmetric", "per channel fp16", "overlapping launches"],
)
def test_fragment_kernel_variants(changes: dict[str, Any]) -> None:
    ptx = _fragment(90, rows=1, columns=2, warps=4, **changes).asm["ptx"]
    assert "m16n8k16" in ptx
    assert ("griddepcontrol.wait" in ptx) == changes.get("PDL", False)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("once", [False, True], ids=["loop", "once"])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_every_variant_of_the_kernels_parses(group: int, once: bool, split: bool) -> None:
    fragment = {"EVEN": False, "ONCE": once, "R": 2, "C": 2, "W": 8, "PDL": True, "INTERPRET": False}
    fused = {"BLOCK_M": 32, "BLOCK_N": 64, "SWIZZLE": 8, "INTERPRET": False}
    for symmetric, is_bf16, ahead in itertools.product([True, False], repeat=3):
        kind = {"GROUP": group, "SPLIT": split, "SYMMETRIC": symmetric, "IS_BF16": is_bf16, "HAS_BIAS": ahead}
        float_type = "*bf16" if is_bf16 else "*fp16"
        types = FRAGMENT_TYPES | {"y": float_type, "bias": float_type}
        module = _parse(kernel.fragment_kernel, types, fragment | kind | {"AHEAD": ahead}, num_warps=8)
        assert ("tt.atomic_rmw" in module) == split
        module = _parse(kernel.fused_kernel, types | {"x": float_type}, fused | kind, num_warps=4)
        assert ("tt.atomic_rmw" in module) == split
        if not (once or split):
            stream = {name: value for name, value in (fused | kind).items() if name != "SPLIT"}
            stream |= {"SLICE": 16, "TMA": False, "PDL": True}
            assert "tt.atomic_rmw" in _parse(kernel.stream_kernel, types | {"x": float_type}, stream, num_warps=4)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_fused_kernel(capability: int) -> None:
    constants = {
        "GROUP": 128, "SPLIT": True, "BLOCK_M": 64, "BLOCK_N": 64, "SWIZZLE": 8, "SYMMETRIC": True,
        "HAS_BIAS": False, "IS_BF16": True, "INTERPRET": False,
    }  # fmt: skip
    compiled = _compile(kernel.fused_kernel, FUSED_TYPES, constants, capability, num_warps=4, num_stages=3)
    ptx = compiled.asm["ptx"]
    if capability == 90:
        assert ptx.count("wgmma.mma_async") == 4, "four steps of a chunk"
        assert "st.shared" not in ptx[: ptx.rindex("wgmma.mma_async")], "the weights go from registers"
    else:
        assert "mma.sync" in ptx


def _stream(capability: int, tile: Tile) -> Any:
    constants = STREAM_CONSTANTS | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "SLICE": tile.slice_m}
    constants["PDL"] = capability >= 90
    constants["TMA"] = tile.tma
    types = FUSED_TYPES | ({"x": f"tensordesc<bf16[{tile.block_m},64]>"} if tile.tma else {})
    return _compile(kernel.stream_kernel, types, constants, capability, num_warps=tile.warps, num_stages=tile.stages)


@pytest.mark.parametrize("tma", [False, True], ids=["loads", "tma"])
@pytest.mark.parametrize("capability", [80, 120])
def test_stream_kernel(capability: int, tma: bool) -> None:
    ptx = _stream(capability, Tile("fused", warps=4, block_m=64, block_n=64, per_sm=2, tma=tma)).asm["ptx"]
    assert "mma.sync" in ptx
    assert ("griddepcontrol.wait" in ptx) == (capability >= 90)
    assert ("cp.async.bulk.tensor" in ptx) == (tma and capability >= 90)


@pytest.mark.parametrize("tile", sorted({replace(tile, per_sm=1) for tile in STREAM_TILES}, key=str), ids=str)
def test_as_many_blocks_fit_an_sm_as_the_tuner_tries(tile: Tile, tmp_path: Path) -> None:
    compiled = _stream(90, tile)
    ptx = compiled.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 4, "four steps of a chunk"
    assert ptx.count("cp.async.bulk.tensor") == (tile.stages if tile.tma else 0), (
        "the first stages, and one in the loop"
    )
    source = tmp_path / "stream.ptx"
    source.write_text(ptx)
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", source, "-o", tmp_path / "stream.cubin"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert " 0 bytes spill stores" in said
    registers = -(-int(re.findall(r"Used (\d+) registers", said)[0]) // 8) * 8
    most = max(other.per_sm for other in STREAM_TILES if replace(other, per_sm=1) == tile)
    assert most * registers * tile.warps * 32 <= REGISTERS_PER_SM
    assert most * (compiled.metadata.shared + RESERVED_SHARED_BYTES) <= H200_SHARED_BYTES
    held = tile.block_m * tile.block_n // (tile.warps * 32)  # accumulators of a thread
    parts, whole, sums = held // 4, held // 8, held // 4 // 8
    assert len(re.findall(r"st\.global\S*\.v4", ptx)) == parts + whole + sums, "16 bytes a thread"
    assert len(re.findall(r"ld\.global\.cg\S*\.v4", ptx)) == 4 * held // 4 // 4, "four parts of a quarter of the tile"
    assert len(re.findall(r"stmatrix|st\.shared", ptx[: ptx.index("atom.")])) == whole, "parts leave from registers"


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_dequantize_and_permute_kernels(capability: int) -> None:
    constants = {"GROUP": 128, "P": 4, "SYMMETRIC": True, "INTERPRET": False}
    ptx = _compile(kernel.dequant_kernel, DEQUANT_TYPES, constants, capability, num_warps=4).asm["ptx"]
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 4, "16-byte stores"
    _compile(
        kernel.permute_kernel,
        {"x": INT, "out": INT},
        {"BLOCK": 1024, "PDL": capability >= 90, "INTERPRET": False},
        capability,
        num_warps=4,
    )
