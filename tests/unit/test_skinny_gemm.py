"""skinny_gemm without a GPU: the interpreter, the table of tiles, the op's reference path, what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdsie_sglang.kernels.skinny_gemm import skinny_gemm, skinny_gemm_applies, skinny_gemm_reference, tiles
from sdsie_sglang.kernels.skinny_gemm.tiles import Tile

BF16 = torch.bfloat16


def test_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, Path(__file__).with_name("skinny_interpreted.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_without_a_gpu_the_op_is_the_reference_and_never_applies() -> None:
    x, weight, bias = torch.randn(2, 3, 64).to(BF16), torch.randn(24, 64).to(BF16), torch.randn(24).to(BF16)
    y = torch.ops.sdsie.skinny_gemm(x, weight, bias)
    assert torch.equal(y, skinny_gemm_reference(x.reshape(6, 64), weight, bias).reshape(2, 3, 24))
    assert not skinny_gemm_applies(x, weight)


def test_fake_implementation_has_the_shape() -> None:
    x, weight = torch.empty(2, 3, 64, dtype=BF16, device="meta"), torch.empty(24, 64, dtype=BF16, device="meta")
    assert torch.ops.sdsie.skinny_gemm(x, weight).shape == (2, 3, 24)


@pytest.mark.parametrize(
    ("x", "weight", "error", "words"),
    [
        (torch.zeros(17, 64, dtype=BF16), torch.zeros(16, 64, dtype=BF16), ValueError, "at most 16 rows"),
        (torch.zeros(1, 64, dtype=BF16), torch.zeros(16, 72, dtype=BF16), ValueError, "64 columns"),
        (torch.zeros(1, 12, dtype=BF16), torch.zeros(16, 12, dtype=BF16), ValueError, "multiple of 8"),
        (torch.zeros(1, 64, dtype=BF16), torch.zeros(64, 16, dtype=BF16).T, ValueError, "contiguous"),
        (torch.zeros(1, 64), torch.zeros(16, 64), TypeError, "bf16 or fp16"),
        (torch.zeros(1, 64, dtype=BF16), torch.zeros(16, 64, dtype=torch.half), TypeError, "both alike"),
    ],
)
def test_refuses(x: torch.Tensor, weight: torch.Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        skinny_gemm(x, weight)


def test_a_saved_table_is_read_for_every_m_of_its_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(tiles, "table_path", lambda device: tmp_path / f"{device}.json")
    one, other = Tile(rows=2), Tile(depth=2)
    tiles.save(tmp_path / "gpu.json", "gpu", {tiles.key(32, 64, 2): one}, {tiles.key(32, 64, 16): other})
    assert tiles.table("gpu") == {(32, 64, 1): one, (32, 64, 2): one}
    found = tiles.table("gpu", batch_invariant=True)
    assert {m for n, k, m in found} == {1, 2, *range(9, 17)}
    assert found[32, 64, 9] == other
    assert tiles.table("another") == {}
    tiles.table.cache_clear()


@pytest.mark.parametrize("path", sorted((Path(tiles.__file__).parent / "tuned").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_tiles_exist_and_split_k_alike(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "table_path", lambda _: path)
    tiles.table.cache_clear()
    found = tiles.table(path.stem, batch_invariant=True)
    tiles.table.cache_clear()
    assert found
    orders: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for (n, k, m), tile in found.items():
        assert tiles.fits(tile, m, k)
        assert (n, k, 1) in found
        orders.setdefault((n, k), set()).add((tile.warps, tile.vectors))
    assert all(len(order) == 1 for order in orders.values()), "a row's bits would depend on how many rows there are"
