"""Ranks decide alike, a disagreement stops them, and what cannot be split is refused."""

import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from sdsie_sglang.gears import PolicySettings
from sdsie_sglang.kernels.entropy import entropy_bits
from sdsie_sglang.telemetry.metrics import NoMetrics
from sdsie_sglang.telemetry.trace import NoTrace, open_trace
from sdsie_sglang.tensor_parallel import split_problem
from sdsie_sglang.worker.cycle import Cycle, HostCopy
from sdsie_sglang.worker.gate import Gate
from sdsie_sglang.worker.rank_check import PREFILL, RankCheck, RanksDisagree
from sdsie_sglang.worker.request_state import RequestState

CYCLES, VOCABULARY = 10_000, 64
THETA_LOW, THETA_HIGH = 0.55, 1.25


# -- 10,000 cycles at the thresholds --------------------------------------------------------------


def logits_of_entropy(bits: torch.Tensor) -> torch.Tensor:
    """[n] bits -> [n, vocabulary] float32 logits with about that entropy: one likely token, found by bisection."""
    low, high = torch.zeros_like(bits), torch.full_like(bits, 40.0)
    logits = torch.zeros(len(bits), VOCABULARY)
    for _ in range(60):
        logits[:, 0] = (low + high) / 2
        too_flat = entropy_bits(logits) > bits
        low, high = torch.where(too_flat, logits[:, 0], low), torch.where(too_flat, high, logits[:, 0])
    return logits


def at_the_thresholds() -> torch.Tensor:
    """[cycles, vocabulary] logits. Most are within a few float32 steps of a threshold, so that a last bit decides."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.where(torch.rand(CYCLES, generator=generator) < 0.5, THETA_LOW, THETA_HIGH)
    steps = torch.randint(-3, 4, (CYCLES,), generator=generator)
    return logits_of_entropy(theta * (1 + steps * 2.0**-22))


def gears_of(logits: torch.Tensor) -> tuple[list[int], int]:
    """Gears of one request whose cycles show `logits` in turn, and how often the smoothed entropy was that close."""
    settings = PolicySettings(policy="entropy", theta_low=THETA_LOW, theta_high=THETA_HIGH, alpha=1.0)
    gate = Gate(settings, (0, 5), 2, NoTrace(), NoMetrics())
    states = [gate.new_state()]
    gears, close = [], 0
    for n in range(len(logits)):
        k = gate.next_gear(states)
        bits = entropy_bits(logits[n : n + 1])
        close += bool(min(abs(bits - THETA_LOW), abs(bits - THETA_HIGH)) < 1e-5)
        numbers = HostCopy(torch.cat([torch.ones(1), bits]) if k else bits)
        gate.launched(Cycle(n, k, k, 0, ["r"], states, [state.gate for state in states], numbers))
        gate.settle_oldest()
        gears.append(k)
    assert gate.failures == 0
    return gears, close


def decide_on_gathered_logits(rank: int, size: int, folder: str) -> None:
    """As in SGLang's vocabulary-parallel head: each rank computes its part, and all gather the whole."""
    from sdsie_sglang.cpu_engine.ops import tensor_parallel  # noqa: F401 (registers the gather)

    torch.set_num_threads(1 + rank)  # ranks need not be alike
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.ops.sgl_kernel.initialize(size, rank)
    own = at_the_thresholds().chunk(size, dim=1)[rank]
    # A rank's hidden state may differ from the others' in its last bits: its part of the logits then does.
    own = own * (1 + rank * 2.0**-23)
    gears, close = gears_of(torch.ops.sgl_kernel.shm_allgather(own.contiguous(), 1))
    torch.save((gears, close), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_take_the_same_gears_over_10_000_cycles_at_the_thresholds(tmp_path):
    multiprocessing.spawn(decide_on_gathered_logits, (2, str(tmp_path)), nprocs=2)
    (first, close), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert len(first) == CYCLES
    assert first == second
    assert close > 0.9 * CYCLES, "the entropies were not at the thresholds"
    assert sum(a != b for a, b in itertools.pairwise(first)) > CYCLES / 20, "the gears hardly changed"


def test_a_last_bit_decides_at_the_thresholds():
    """So ranks that computed their entropies from logits of their own would not agree."""
    logits = at_the_thresholds()[:2000]
    assert gears_of(logits)[0] != gears_of(logits * (1 + 2.0**-21))[0]


# -- the check ------------------------------------------------------------------------------------


def state(missed: int = 1) -> RequestState:
    return RequestState(gate=None, policy=None, missed=missed)


def compare_batches(rank: int, store: str, others: tuple, outcome: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    check = RankCheck(dist.group.WORLD, patience_s=2.0)
    check.compare(PREFILL, ["a"], [state()])
    check.compare(5, ["a", "b"], [state(), state(2)])
    said = "nothing"
    try:
        if rank == 0:
            check.compare(5, ["a", "b"], [state(), state(2)])
        elif others:
            check.compare(*others)
        else:
            dist.barrier()  # waits for rank 0 somewhere else
    except RanksDisagree as error:
        said = str(error)
    except RuntimeError:
        said = "left alone"
    Path(f"{outcome}{rank}").write_text(said)
    os._exit(0)  # a group with work that never ended cannot be taken down


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ((0, ["a", "b"], [state(), state(2)]), "rank 0 batch 2 gear 5, 2 requests"),
        ((PREFILL, ["c"], [state()]), "rank 1 batch 2 prefill, 1 request "),
        ((5, ["b", "a"], [state(), state(2)]), "about to run different things"),
        ((5, ["a", "b"], [state(), state(3)]), "about to run different things"),
    ],
)
def test_a_disagreement_is_one_line_on_all_ranks(tmp_path, other, says):
    multiprocessing.spawn(compare_batches, (str(tmp_path / "store"), other, str(tmp_path / "said")), nprocs=2)
    lines = [(tmp_path / f"said{rank}").read_text() for rank in range(2)]
    assert lines[0] == lines[1]
    assert says in lines[0]
    assert lines[0].startswith("sdsie: tensor-parallel ranks disagree, the server stops. ")
    assert "\n" not in lines[0]


def test_agreement_is_silent(tmp_path):
    same = (5, ["a", "b"], [state(), state(2)])
    multiprocessing.spawn(compare_batches, (str(tmp_path / "store"), same, str(tmp_path / "said")), nprocs=2)
    assert [(tmp_path / f"said{rank}").read_text() for rank in range(2)] == ["nothing", "nothing"]


def test_a_rank_that_waits_elsewhere_is_not_waited_for_for_ever(tmp_path):
    multiprocessing.spawn(compare_batches, (str(tmp_path / "store"), (), str(tmp_path / "said")), nprocs=2)
    assert "the other ranks did not answer" in (tmp_path / "said0").read_text()


# -- what can be split ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_size", "use"),
    [(32, 8, 2, None), (32, 8, 16, None), (9, 3, 3, None), (9, 3, 2, 1), (12, 3, 4, 3), (8, None, 8, None)],
)
def test_heads_divide_or_are_refused_with_what_would(heads, kv_heads, tp_size, use):
    problem = split_problem("draft", {"num_attention_heads": heads, "num_key_value_heads": kv_heads}, tp_size)
    assert (problem is None) == (use is None)
    if problem is not None:
        assert problem.endswith(f"use --tp-size {use}")
        assert "draft" in problem


def test_unknown_heads_are_left_to_sglang():
    assert split_problem("target", {}, 2) is None


# -- traces of ranks and replicas -----------------------------------------------------------------


def test_one_rank_writes_unless_all_are_compared(tmp_path):
    path = str(tmp_path / "trace")
    assert isinstance(open_trace(path, tp_rank=1, dp_rank=0, every_rank=False), NoTrace)
    for rank in range(2):
        open_trace(path, tp_rank=rank, dp_rank=1, every_rank=True).write({"cycle": rank})
    assert (tmp_path / "trace").read_text() == '{"dp_rank":1,"cycle":0}\n'
    open_trace(f"{path}2", tp_rank=0, dp_rank=0, every_rank=False, replica="a").write({"cycle": 0})
    assert (tmp_path / "trace2").read_text() == '{"dp_rank":0,"replica":"a","cycle":0}\n'
    assert (tmp_path / "trace.rank1").read_text() == '{"dp_rank":1,"cycle":1}\n'
