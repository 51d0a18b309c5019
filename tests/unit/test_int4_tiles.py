"""Tile tables: what ships, what is guessed, and how the tuner chooses."""

import json
from pathlib import Path

import pytest

from sdsie_sglang.kernels.int4_gemm import tiles
from sdsie_sglang.kernels.int4_gemm.tiles import BUCKETS, Tile

LLAMA_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles._table.cache_clear()
    tiles._choose.cache_clear()


def test_shipped_table_covers_the_8b_shapes() -> None:
    entries = json.loads(tiles.shipped_path("NVIDIA H200").read_text())["tiles"]
    for n, k in LLAMA_8B:
        for m in BUCKETS[:6]:
            tile = Tile(**entries[tiles._key(n, k, 128, m)])
            assert tile.path != "fragment" or tiles.fits(tile, m)


@pytest.mark.parametrize(("n", "k"), [*LLAMA_8B, (2048, 2048), (576, 576), (49152, 576), (100, 64)])
def test_rows_up_to_16_split_k_alike(n: int, k: int) -> None:
    for device in ("NVIDIA H200", "some other GPU"):
        splits = {(t.warps, t.split_k) for t in (tiles.choose(m, n, k, 128, device, 132) for m in (1, 6, 8, 9, 16))}
        assert len(splits) == 1


@pytest.mark.parametrize(("n", "k"), [*LLAMA_8B, (576, 1536), (49152, 576), (17, 8)])
@pytest.mark.parametrize("m", BUCKETS)
def test_guesses_and_candidates_exist(m: int, n: int, k: int) -> None:
    for tile in (tiles.guess(m, n, k, 132), *tiles.candidates(m, n, k, 132)):
        assert tile.path != "fragment" or tiles.fits(tile, m)
        assert tile.path != "fused" or (k // tile.split_k >= 64 or tile.split_k == 1)
    assert tiles.candidates(m, n, k, 132)


def test_tuner_takes_the_fastest_with_one_split_for_small_m() -> None:
    def time_us(tile: Tile, m: int) -> float:
        if tile.path == "fragment" and m <= 16:
            if (tile.warps, tile.split_k) == (8, 1):
                return 10.0 + tile.rows
            return 1.0 if m == 8 and tile.warps == 4 else 50.0
        return 5.0 if tile == Tile("fused", warps=4, block_m=64, block_n=64, stages=4, split_k=2) else 9.0

    assert tiles.buckets_to_tune(6, 60) == (8, 16, 64)
    chosen = tiles.tune(4096, 4096, 128, 132, time_us, tiles.buckets_to_tune(6, 60))
    assert {(chosen[f"4096x4096/g128/m{m}"].warps, chosen[f"4096x4096/g128/m{m}"].split_k) for m in (8, 16)} == {(8, 1)}
    assert chosen["4096x4096/g128/m64"] == Tile("fused", warps=4, block_m=64, block_n=64, stages=4, split_k=2)


def test_stream_k_is_tried_where_whole_tiles_do_not_come_out_even() -> None:
    def tried(m: int, n: int, k: int) -> set[tuple[int, int, int]]:
        return {(t.block_m, t.block_n, t.per_sm) for t in tiles.candidates(m, n, k, 132) if t.per_sm}

    assert (256, 64, 2) in tried(256, 6144, 4096)
    assert {block_m for block_m, _, _ in tried(128, 6144, 4096)} == {128}
    assert tried(64, 6144, 4096) == tried(1024, 6144, 4096) == set()
    assert (256, 64, 1) not in tried(256, 132 * 64 * 2, 4096), "two whole tiles a block"
    assert tried(256, 256, 512) == set(), "too little to share"


@pytest.mark.parametrize(("n", "k"), LLAMA_8B)
def test_few_kernels_are_compiled_to_tune_256_rows(n: int, k: int) -> None:
    found = tiles.candidates(256, n, k, 132)
    assert len({(t.path, t.block_m, t.block_n, t.stages, t.split_k > 1, t.per_sm > 0, t.tma) for t in found}) <= 13


def test_saved_tiles_are_used_and_kept_apart_by_shape() -> None:
    mine = Tile("fragment", rows=4, warps=4)
    path = tiles.save("GPU X", {tiles._key(512, 256, 64, 8): mine})
    tiles.save("GPU X", {tiles._key(512, 256, 64, 16): mine})
    assert tiles.choose(3, 512, 256, 64, "GPU X", 132) == mine
    assert tiles.choose(3, 512, 256, 128, "GPU X", 132) != mine
    assert tiles.is_tuned(9, 512, 256, 64, "GPU X")
    assert not tiles.is_tuned(9, 512, 257, 64, "GPU X")
    assert set(json.loads(path.read_text())) == {"device", "triton", "torch", "tiles"}
