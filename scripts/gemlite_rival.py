"""GemLite in the INT4 benchmark: what its autotuner chooses from, compiled on every core before it measures.

GemLite's autotuner compiles one candidate after the other, seconds each. Here a first pass compiles them side by side
into Triton's caches; the autotuner then only measures them.

It searches GemLite's default list (``fast``). Its ``max`` list, through GEMLITE_AUTOTUNE=max, has up to 1500 candidates
for one shape and M. GemLite ships what it chose on some GPUs, no H200 among them: on a Hopper GPU without such a file,
the H100's choice for the same shape and M is one more candidate.
"""

import ast
import functools
import importlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KERNELS = {  # the three that it uses for 4-bit weights, by its own names: module, attribute
    "GEMV_REVSPLITK": ("gemv_revsplitK_kernels", "gemv_INT_revsplitK_kernel"),
    "GEMM_SPLITK": ("gemm_splitK_kernels", "gemm_splitK_INT_kernel"),
    "GEMM": ("gemm_kernels", "gemm_INT_kernel"),
}
Shipped = dict[tuple[int, ...], dict[str, Any]]
"""A kernel's tiles in a file of GemLite's, by M, N, K, group, codes in a word, type of x and bits of a weight."""


def search() -> str:
    """``fast`` or ``max``: GemLite's name for the list of candidates."""
    return os.environ.get("GEMLITE_AUTOTUNE", "fast")


@functools.cache
def load() -> None:
    """Import GemLite and set its search up, once a process. Raises whatever keeps it from importing."""
    import gemlite

    if search() != "fast":  # reloads its kernels
        gemlite.set_autotune(search())
    shipped_for_this_gpu = bool(gemlite.core.GEMLITE_TRITON_CONFIG_CACHE)
    if not shipped_for_this_gpu and torch.cuda.get_device_capability()[0] == 9:
        shipped = json.loads((Path(gemlite.__file__).parent / "configs" / "h100.json").read_text())
        nearest_m = importlib.import_module("gemlite.triton_kernels.utils").get_closest_m
        for name in KERNELS:
            offer(tuner(name), {ast.literal_eval(key): tile for key, tile in shipped[name].items()}, nearest_m)


def tuner(name: str) -> Any:
    """Triton's autotuner of one of KERNELS."""
    module, attribute = KERNELS[name]
    return getattr(importlib.import_module(f"gemlite.triton_kernels.{module}"), attribute)


def offer(autotuner: Any, shipped: Shipped, nearest_m: Callable[[int], int]) -> None:
    """Make a shape's shipped tile for the nearest M, else for M = 1, a candidate too; GemLite's own pruning decides."""
    import triton

    prune = autotuner.early_config_prune
    settings = autotuner.configs[0].kwargs.keys()

    def more(configs: list[Any], arguments: dict[str, Any], **others: Any) -> list[Any]:
        shape = [arguments[name] for name in ("N", "K", "group_size", "elements_per_sample", "type_id")]
        tile = shipped.get((nearest_m(arguments["M"]), *shape), shipped.get((1, *shape)))
        if tile is not None:
            kwargs = {name: tile[name] for name in settings}
            configs = [*configs, triton.Config(kwargs, num_warps=tile["num_warps"], num_stages=tile["num_stages"])]
        return list(prune(configs, arguments, **others))

    autotuner.early_config_prune = more


def compile_ahead(call: Callable[[Tensor], Tensor], inputs: Iterable[Tensor]) -> int:
    """Compile, on every core, all that ``call`` would autotune for these x (M, K); how many. Nothing of it runs."""
    import triton
    from triton.runtime.autotuner import Autotuner

    candidates = 0

    def compile_candidates(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> None:
        nonlocal candidates
        candidates += len(self.warmup(*args, **kwargs))

    run = Autotuner.run
    Autotuner.run = compile_candidates
    try:
        # One that doesn't compile is met again, and left out, by the autotuner.
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            try:
                for x in inputs:
                    call(x)
            except BaseException:  # out of time: what has not begun is not waited for
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        Autotuner.run = run
    return candidates


def chosen() -> list[dict[str, Any]]:
    """For the record: what the autotuner chose, one entry a kernel, shape and M. Empty where GemLite was not loaded."""
    if not load.cache_info().currsize:
        return []
    return [
        {"kernel": name, "key": [value for value in key if isinstance(value, int)], "tile": tile.all_kwargs()}
        for name in KERNELS
        for key, tile in tuner(name).cache.items()
    ]
