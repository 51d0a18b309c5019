"""What the benchmark lets GemLite's autotuner choose from, and that compiling it ahead runs nothing."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")
from triton.runtime._async_compile import active_mode  # noqa: E402
from triton.runtime.autotuner import Autotuner, Config  # noqa: E402

OWN = [Config({"BLOCK_SIZE_N": n}, num_warps=4, num_stages=5) for n in (32, 64)]


@pytest.fixture
def rival(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import gemlite_rival

    yield gemlite_rival
    sys.modules.pop("gemlite_rival")


class Kernel:
    """Stands in for the compiled function below an autotuner."""

    def __init__(self):
        self.compiled, self.ran = [], 0

    def warmup(self, *args, grid, **settings):
        assert active_mode.get() is not None, "compiled by the pool"
        self.compiled.append(settings)

    def run(self, *args, **settings):
        self.ran += 1


def autotuner(kernel):
    def prune(configs, arguments, **others):
        return [c for c in configs if c.kwargs["BLOCK_SIZE_N"] <= arguments["N"]]

    def kernel_function(x, N):  # what the autotuner looks for at the end of a chain of .fn
        pass

    kernel.fn = kernel_function
    return Autotuner(kernel, ["x", "N"], OWN, ["N"], None, None, prune_configs_by={"early_config_prune": prune})


def test_a_first_pass_compiles_every_candidate_and_runs_none(rival):
    kernel = Kernel()
    tuner = autotuner(kernel)
    run = Autotuner.run
    assert rival.compile_ahead(lambda n: tuner[(1,)](None, n), [32, 64]) == 3, "one candidate is pruned at 32"
    assert [settings["BLOCK_SIZE_N"] for settings in kernel.compiled] == [32, 32, 64]
    assert kernel.ran == 0
    assert tuner.cache == {}
    assert Autotuner.run is run


def test_out_of_time_ends_the_first_pass(rival):
    run = Autotuner.run

    def late(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rival.compile_ahead(late, [1])
    assert Autotuner.run is run
    assert active_mode.get() is None


@pytest.mark.parametrize(
    ("m", "n", "offered"),
    [(1, 64, [256]), (6, 64, [512]), (2, 64, [256]), (6, 96, [])],
    ids=["its M", "the nearest M", "no entry but for M = 1", "another shape"],
)
def test_a_shipped_tile_is_one_more_candidate(rival, m, n, offered):
    seen = []

    def prune(configs, arguments, **others):
        seen.extend(configs)
        return configs

    tuner = SimpleNamespace(configs=OWN, early_config_prune=prune)
    tile = {"num_warps": 1, "num_stages": 1, "num_ctas": 1}
    shipped = {
        (1, 64, 128, 32, 8, 104): tile | {"BLOCK_SIZE_N": 256},
        (8, 64, 128, 32, 8, 104): tile | {"BLOCK_SIZE_N": 512},
    }
    rival.offer(tuner, shipped, lambda m: 8 if m == 6 else m)
    arguments = {"M": m, "N": n, "K": 128, "group_size": 32, "elements_per_sample": 8, "type_id": 104}
    pruned = tuner.early_config_prune(OWN, arguments)
    assert pruned == seen, "GemLite's own pruning decides"
    assert seen[:2] == OWN
    assert [(c.kwargs["BLOCK_SIZE_N"], c.num_warps, c.num_stages) for c in seen[2:]] == [(n, 1, 1) for n in offered]
    assert len(OWN) == 2


def test_nothing_to_report_without_gemlite(rival):
    assert rival.chosen() == []
