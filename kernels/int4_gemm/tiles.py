"""Which kernel and tile for (M, N, K, group): tuned tables, a guess where there is none, and the tuner itself."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FRAGMENT_MAX_M = 64
REGISTERS_PER_SM = 65536
STATIC_SHARED_BYTES = 48 * 1024  # what PTX may declare; the fragment kernel adds its warps' sums there


@dataclass(frozen=True)
class Tile:
    """One way to run one bucket of M. ``path`` decides which fields count."""

    path: str  # "fragment", "fused" or "dequant"
    rows: int = 2  # fragment: row tiles of 16 a warp
    warps: int = 8
    split_k: int = 1  # fragment, fused: blocks that share a tile's K
    ahead: bool = True  # fragment: request the next unit before multiplying this one
    block_m: int = 128  # fused
    block_n: int = 128
    stages: int = 3
    per_sm: int = 0  # fused: blocks an SM that share all tiles' K equally (stream-K); 0: blocks have tiles of their own
    tma: bool = False  # stream-K: x by the tensor memory accelerator (sm_90 and newer; elsewhere by ordinary loads)

    @property
    def slice_m(self) -> int:
        """Rows of x that stream-K adds up at a time: four parts of so many and their sum hardly exceed the registers
        of the product's accumulators."""
        return max(16, self.block_m // 4)


DEQUANT = Tile("dequant", warps=4)


def fits(tile: Tile, m: int) -> bool:
    """Whether the fragment kernel exists with this tile for ``m`` rows."""
    elements = tile.rows * columns(m)
    return (
        tile.warps >= 4 and elements <= min(16, 2 * tile.warps) and tile.warps * elements * 512 <= STATIC_SHARED_BYTES
    )


def bucket(m: int) -> int:
    """The tuned M that stands for ``m``."""
    return next((b for b in BUCKETS if m <= b), BUCKETS[-1])


def buckets_to_tune(*rows: int) -> tuple[int, ...]:
    """The buckets of these M; 8 and 16 are tuned together, because they must split K alike."""
    found = {bucket(m) for m in rows}
    return tuple(sorted(found | {8, 16} if found & {8, 16} else found))


def columns(m: int) -> int:
    """Column tiles of 8 activations in the fragment kernel: 1, 2, 4 or 8."""
    return max(1, bucket(m) // 8)


def _key(n: int, k: int, group: int, m_bucket: int) -> str:
    return f"{n}x{k}/g{group}/m{m_bucket}"


def choose(m: int, n: int, k: int, group: int, device: str, sms: int) -> Tile:
    """The tile for this product. Rows of M <= 16 get the same K split whatever M is, so a row's result doesn't depend
    on how many others are in the batch."""
    return _choose(bucket(m), n, k, group, device, sms)


@cache
def _choose(m_bucket: int, n: int, k: int, group: int, device: str, sms: int) -> Tile:
    table = _table(device)
    found = table.get(_key(n, k, group, m_bucket))
    return Tile(**found) if found else guess(m_bucket, n, k, sms)


def guess(m_bucket: int, n: int, k: int, sms: int) -> Tile:
    """A tile without measurements: enough blocks for every SM, enough warps to split K."""
    tiles, units = -(-n // 16), -(-k // 128)
    if m_bucket > FRAGMENT_MAX_M:
        if m_bucket >= (1024 if n >= 64 * sms else 512):
            return DEQUANT
        block_m = 256 if m_bucket >= 256 and n >= 64 * sms else 128
        blocks = -(-m_bucket // block_m) * -(-n // 64)
        split_k = max(1, min(4, 2 * sms // blocks, units // 4))
        return Tile("fused", warps=4, block_m=block_m, block_n=64, stages=3 if block_m == 256 else 4, split_k=split_k)
    rows = 2 if tiles >= 2 * sms and m_bucket <= 32 else 1
    warps = 16 if units >= 16 else 8 if units >= 8 else 4
    while not fits(Tile("fragment", rows=rows, warps=warps), m_bucket):
        warps //= 2
    return Tile("fragment", rows=rows, warps=warps)


@cache
def _table(device: str) -> dict[str, dict[str, Any]]:
    """Shipped entries for this GPU, overlaid with those tuned on this machine."""
    entries: dict[str, dict[str, Any]] = {}
    for path in (shipped_path(device), cache_path(device)):
        if path.is_file():
            entries |= json.loads(path.read_text())["tiles"]
    return entries


def is_tuned(m: int, n: int, k: int, group: int, device: str) -> bool:
    """Whether this product's tile was measured, here or before shipping."""
    return _key(n, k, group, bucket(m)) in _table(device)


def shipped_path(device: str) -> Path:
    """tuned/H200.json for "NVIDIA H200"."""
    return Path(__file__).parent / "tuned" / f"{device.removeprefix('NVIDIA ').replace(' ', '_')}.json"


def cache_path(device: str) -> Path:
    """Where this machine's own measurements are kept."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "sdsie" / "int4_gemm" / f"{device.replace(' ', '_')}.json"


def save(device: str, entries: dict[str, Tile], path: Path | None = None) -> Path:
    """Merge entries into a table on disk and forget what was read before."""
    import triton

    path = path or cache_path(device)
    known = json.loads(path.read_text())["tiles"] if path.is_file() else {}
    known |= {key: asdict(tile) for key, tile in entries.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"device": device, "triton": triton.__version__, "torch": torch.__version__, "tiles": known}
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    scratch.replace(path)
    _table.cache_clear()
    _choose.cache_clear()
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Candidates and tuning
# ---------------------------------------------------------------------------------------------------------------------


def fragment_candidates(m_bucket: int, n: int, k: int, sms: int) -> Iterator[Tile]:
    """Tiles that fit the register file and neither starve nor flood the SMs."""
    tiles, units, c = -(-n // 16), -(-k // 128), columns(m_bucket)
    for rows in (1, 2, 4):
        for warps in (4, 8, 16):
            registers = 8 * rows * c + 14 * (rows + c) + 24
            fitting = fits(Tile("fragment", rows=rows, warps=warps), m_bucket)
            if not fitting or registers > min(255, REGISTERS_PER_SM // (warps * 32)):
                continue
            for split_k in (1, 2, 4):
                blocks = -(-tiles // rows) * split_k
                if warps * split_k > max(units, 4) or (split_k > 1 and blocks > 4 * sms):
                    continue
                if blocks < sms // 2 and blocks < tiles:
                    continue
                for ahead in (True, False) if split_k == 1 and rows == 1 and units > warps else (True,):
                    yield Tile("fragment", rows=rows, warps=warps, split_k=split_k, ahead=ahead)


def fused_candidates(m_bucket: int, n: int, k: int, sms: int) -> Iterator[Tile]:
    """Tiles of the tl.dot kernel; K is split until every SM has two to four blocks."""
    for block_m, block_n, warps, stages in (
        (32, 64, 4, 5),
        (64, 64, 4, 4),
        (64, 128, 8, 3),
        (128, 64, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 4, 5),
        (128, 128, 8, 3),
        (256, 64, 4, 3),
        (256, 128, 8, 3),
    ):
        if block_m > m_bucket or block_m * 4 < min(m_bucket, 256):
            continue
        if m_bucket >= 256 and (block_m, block_n, stages) not in ((128, 64, 4), (256, 64, 3), (256, 128, 3)):
            continue  # the others won nowhere, and compiling takes longer than measuring
        blocks = -(-m_bucket // block_m) * -(-n // block_n)
        for split_k in (1, 2, 3, 4, 6):
            if split_k == 1 or (blocks * split_k <= 4.5 * sms and k // split_k >= 512):
                yield Tile("fused", warps=warps, block_m=block_m, block_n=block_n, stages=stages, split_k=split_k)


STREAM_BUCKETS = (128, 256, 512)
# Blocks an SM are at most those that an H200's registers and shared memory hold (test_int4_compile.py looks).
STREAM_TILES = tuple(
    Tile("fused", warps=warps, block_m=block_m, block_n=block_n, stages=stages, per_sm=per_sm, tma=tma)
    for block_m, block_n, warps, stages, tma, counts in (
        (128, 64, 4, 4, True, (2, 3)),
        (128, 128, 8, 4, True, (1, 2)),
        (256, 64, 4, 3, True, (1, 2)),
        (256, 64, 4, 6, True, (1,)),
        (256, 128, 8, 4, True, (1,)),
        (256, 64, 4, 3, False, (1, 2)),
    )
    for per_sm in counts
)


def stream_candidates(m_bucket: int, n: int, k: int, sms: int) -> Iterator[Tile]:
    """Stream-K where whole tiles don't come out even, with at least 512 k a block."""
    for tile in STREAM_TILES:
        blocks = -(-m_bucket // tile.block_m) * -(-n // tile.block_n)
        workers = tile.per_sm * sms
        if m_bucket in STREAM_BUCKETS and tile.block_m <= m_bucket and blocks % workers and blocks * k >= 512 * workers:
            yield tile


def candidates(m_bucket: int, n: int, k: int, sms: int) -> list[Tile]:
    """Everything worth timing for a bucket of M."""
    found = list(fragment_candidates(m_bucket, n, k, sms)) if m_bucket <= FRAGMENT_MAX_M else []
    if m_bucket >= 32:
        found += fused_candidates(m_bucket, n, k, sms)
        found += stream_candidates(m_bucket, n, k, sms)
    if m_bucket >= 256:
        found.append(DEQUANT)
    return found


def tune(
    n: int,
    k: int,
    group: int,
    sms: int,
    time_us: Callable[[Tile, int], float],
    buckets: tuple[int, ...] = BUCKETS,
) -> dict[str, Tile]:
    """Entries for one weight shape; ``time_us(tile, m)`` measures one tile (infinity when it doesn't compile).

    Buckets 8 and 16 must split K alike: the split with the smallest sum of both best times is kept for both.
    """
    chosen: dict[str, Tile] = {}
    small = [b for b in buckets if b <= 16]
    best: dict[tuple[int, int], dict[int, tuple[float, Tile]]] = {}
    for b in small:
        for tile in fragment_candidates(b, n, k, sms):
            us = time_us(tile, b)
            of_split = best.setdefault((tile.warps, tile.split_k), {})
            if b not in of_split or us < of_split[b][0]:
                of_split[b] = (us, tile)
    if small:
        complete = [found for found in best.values() if len(found) == len(small)]
        winner = min(complete, key=lambda found: sum(us for us, _ in found.values()))
        chosen |= {_key(n, k, group, b): tile for b, (_, tile) in winner.items()}
    for b in buckets:
        if b > 16:
            chosen[_key(n, k, group, b)] = min(candidates(b, n, k, sms), key=lambda tile: time_us(tile, b))
    return chosen
