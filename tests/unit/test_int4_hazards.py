"""No register of a product is overwritten while the tensor core may still read it, in any kernel that is launched."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from sdsie_sglang.kernels.int4_gemm import gemm, kernel, tiles  # noqa: E402
from sdsie_sglang.kernels.int4_gemm.tiles import STREAM_TILES, Tile  # noqa: E402
from tests.unit.test_int4_compile import FUSED_TYPES, _compile, _stream  # noqa: E402
from tests.unit.wgmma_hazards import disassemble, hazards, parse  # noqa: E402

pytestmark = pytest.mark.skipif(gemm.INTERPRET, reason="the interpreter doesn't compile")
LOOP = """
.L_x_1:
        /*0010*/                   HMUL2.BF16_V2 R{first}, R10, R11 ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, R160, gdesc[UR20], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   HGMMA.64x256x16.F32.BF16 R24, R164, gdesc[UR20], R24, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0070*/               @P2 BRA `(.L_x_1) ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0090*/                   LDS.128 R164, [R4] ;
        /*00a0*/                   EXIT ;
"""


def _used() -> list[tuple[Tile, int, bool]]:
    """Tiles of the fused kernel that are shipped or guessed, with their group and whether K is split."""
    shipped = json.loads(tiles.shipped_path("NVIDIA H200").read_text())["tiles"]
    found = {
        (replace(Tile(**tile), split_k=1), int(name.split("/g")[1].split("/")[0]), Tile(**tile).split_k > 1)
        for name, tile in shipped.items()
        if tile["path"] == "fused" and not tile.get("per_sm")
    }
    guessed = [tiles.guess(m, n, 4096, 132) for m in (128, 256, 512) for n in (1024, 4096, 28672)]
    found |= {(replace(tile, split_k=1), 128, tile.split_k > 1) for tile in guessed if tile.path == "fused"}
    return sorted(found, key=str)


def _nvdisasm() -> str:
    return str(Path(triton.knobs.nvidia.ptxas.path).with_name("nvdisasm"))


@pytest.mark.parametrize(
    ("first", "left", "count"),
    [(164, "0x0", 0), (160, "0x1", 0), (100, "0x1", 0), (164, "0x1", 1), (167, "0x1", 1), (168, "0x1", 0)],
)
def test_a_register_written_too_early_is_found(first: int, left: str, count: int) -> None:
    assert len(hazards(LOOP.format(first=first, left=left))) == count


@pytest.mark.parametrize(("tile", "group", "split"), _used(), ids=str)
def test_fused_kernel(tile: Tile, group: int, split: bool, tmp_path: Path) -> None:
    for symmetric in (True, False):
        constants = {
            "GROUP": group, "SPLIT": split, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "SWIZZLE": 8,
            "SYMMETRIC": symmetric, "HAS_BIAS": False, "IS_BF16": True, "INTERPRET": False,
        }  # fmt: skip
        compiled = _compile(
            kernel.fused_kernel, FUSED_TYPES, constants, 90, num_warps=tile.warps, num_stages=tile.stages
        )
        _check(compiled, tmp_path)


@pytest.mark.parametrize("tile", sorted({replace(tile, per_sm=1) for tile in STREAM_TILES}, key=str), ids=str)
def test_stream_kernel(tile: Tile, tmp_path: Path) -> None:
    _check(_stream(90, tile), tmp_path)


def _check(compiled: triton.compiler.CompiledKernel, folder: Path) -> None:
    sass = disassemble(compiled.asm["cubin"], folder, _nvdisasm())
    assert any(instruction.read_late() for instruction in parse(sass)[0]), "weights come from registers"
    assert hazards(sass) == []
