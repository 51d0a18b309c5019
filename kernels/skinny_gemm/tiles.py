"""Which tile for (M, N, K): tables of measured tiles. No entry: cuBLAS is faster there, or nobody has measured."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

MAX_M = 16
BUCKETS = (2, 8, 16)  # largest M of each
STATIC_SHARED_BYTES = 48 * 1024  # what PTX may declare; the kernel adds its warps' sums there
REGISTERS_PER_SM = 65536
MAX_STEPS = 32  # the loop over K is unrolled


@dataclass(frozen=True)
class Tile:
    """A way to run one bucket of M. Entries of one shape share warps and vectors, which decide the order of sums."""

    rows: int = 1  # row tiles of 16 a warp
    warps: int = 8
    vectors: int = 4  # 16-byte vectors a lane loads of a row in one step
    depth: int = 1  # steps whose weights are asked for ahead
    registers: int = 128  # ptxas's limit; with few it sinks loads to their first use


def bucket(m: int) -> int:
    """The tuned M that stands for ``m`` <= 16."""
    return next(b for b in BUCKETS if m <= b)


def columns(m: int) -> int:
    """Column tiles of 8 activations: 1 or 2."""
    return 1 if m <= 8 else 2


def steps(tile: Tile, k: int) -> int:
    """Steps that the K loop is unrolled to."""
    return -(-k // (32 * tile.vectors * tile.warps))


def fits(tile: Tile, m: int, k: int) -> bool:
    """Whether the kernel exists with this tile."""
    elements = tile.rows * columns(m)
    return (
        tile.warps >= 4
        and elements <= 2 * tile.warps
        and tile.warps * elements * 512 <= STATIC_SHARED_BYTES
        and steps(tile, k) <= MAX_STEPS
    )


def key(n: int, k: int, m_bucket: int) -> str:
    """Name of an entry."""
    return f"{n}x{k}/m{m_bucket}"


def table_path(device: str) -> Path:
    """tuned/H200.json for "NVIDIA H200"."""
    return Path(__file__).parent / "tuned" / f"{device.removeprefix('NVIDIA ').replace(' ', '_')}.json"


@cache
def table(device: str, batch_invariant: bool = False) -> dict[tuple[int, int, int], Tile]:
    """{(n, k, m): tile} of this GPU; empty for a GPU without a table. Where cuBLAS was faster there is no entry, unless
    every M of a measured shape is wanted."""
    path = table_path(device)
    if not path.is_file():
        return {}
    record = json.loads(path.read_text())
    entries = record["tiles"] | record["slower_than_cublas"] if batch_invariant else record["tiles"]
    found: dict[tuple[int, int, int], Tile] = {}
    for name, entry in entries.items():
        shape, m_bucket = name.split("/m")
        n, k = map(int, shape.split("x"))
        found |= {(n, k, m): Tile(**entry) for m in range(1, MAX_M + 1) if bucket(m) == int(m_bucket)}
    return found


def save(path: Path, device: str, faster: dict[str, Tile], slower: dict[str, Tile]) -> None:
    """Replace a table on disk and forget what was read before."""
    import triton

    record = {
        "device": device,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "tiles": {name: asdict(tile) for name, tile in faster.items()},
        "slower_than_cublas": {name: asdict(tile) for name, tile in slower.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    table.cache_clear()


def candidates(m: int, n: int, k: int, sms: int) -> Iterator[Tile]:
    """Tiles without masks in K, with the registers they need and not many more."""
    for warps, vectors in ((4, 4), (8, 4), (16, 4), (8, 2), (16, 2), (8, 8)):
        if k % (32 * warps * vectors):
            continue
        for rows, depth in ((1, 1), (1, 2), (2, 1)):
            needed = 8 * vectors * rows * depth + 4 * columns(m) * (2 * vectors + rows) + 20
            enough = [registers for registers in (64, 80, 128, 168, 255) if registers >= needed]
            for registers in enough[: 2 if (rows, depth) == (1, 1) else 1]:
                tile = Tile(rows, warps, vectors, depth, registers)
                if (
                    fits(tile, m, k)
                    and registers * warps * 32 <= REGISTERS_PER_SM
                    and depth <= steps(tile, k)
                    and (rows == 1 or n >= 16 * rows * sms)
                ):
                    yield tile
