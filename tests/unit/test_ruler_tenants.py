"""Who is on the GPU: ours wait there and are known, strangers are not."""

import pytest

from sdsie_sglang.eval import tenants
from sdsie_sglang.eval.energy import Gpu
from sdsie_sglang.eval.tenants import Tenants
from tests.unit.ruler_fakes import FakeGpu


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(tenants, "STEP_S", 0.0)


def a_fleet_starts(fake: FakeGpu, pids: set[int], seen_by_ps: set[int] | None = None) -> Tenants:
    gpu = Gpu(0, fake.nvml())
    account = Tenants(gpu)
    account.wait_until_free()
    fake.pids |= pids
    fake.memory_gib += 3 * len(pids)
    account.started(len(pids), pids if seen_by_ps is None else seen_by_ps)
    return account


def free_gpu(**changes) -> FakeGpu:
    return FakeGpu(processes=0, memory_gib=0.5, **changes)


def test_our_waiting_servers_are_nobody():
    assert a_fleet_starts(free_gpu(), {11, 12}).others() == {"processes": 0.0, "memory_gib": pytest.approx(0.5)}


def test_a_stranger_beside_ours_is_seen():
    fake = free_gpu()
    account = a_fleet_starts(fake, {11, 12})
    fake.pids.add(99)
    fake.memory_gib += 7
    assert account.others() == {"processes": 1.0, "memory_gib": pytest.approx(7.5)}


def test_a_stranger_that_came_while_ours_started_is_seen():
    fake = free_gpu()
    account = a_fleet_starts(fake, {11, 12, 99}, seen_by_ps={11, 12, 500})
    assert account.others()["processes"] == 1.0


def test_ids_that_are_not_this_machines():
    """A container: NVML's ids are the host's."""
    fake = free_gpu()
    account = a_fleet_starts(fake, {9011, 9012}, seen_by_ps={11, 12})
    assert account.others()["processes"] == 0.0
    fake.pids.add(9099)
    assert account.others()["processes"] == 1.0
    late = a_fleet_starts(free_gpu(), {9011, 9012}, seen_by_ps={11})
    late._uncounted = 0
    late.started(1, {11})
    assert late.others()["processes"] == 1.0  # two came, one server was started


def test_ids_that_may_not_be_seen():
    fake = free_gpu()
    nvml = fake.nvml()
    import pynvml

    nvml.nvmlDeviceGetComputeRunningProcesses.side_effect = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    account = Tenants(Gpu(0, nvml))
    account.wait_until_free()
    fake.memory_gib += 6
    account.started(2, {11, 12})
    assert account.others() == {"processes": 0.0, "memory_gib": pytest.approx(0.5)}
    fake.memory_gib += 6
    assert account.others()["memory_gib"] == pytest.approx(6.5)


def test_what_one_of_ours_gives_back_is_taken_off_the_account():
    fake = free_gpu()
    account = a_fleet_starts(fake, {11, 12})

    def end():
        fake.pids.discard(11)
        fake.memory_gib -= 3

    account.ended(end)
    assert account.others() == {"processes": 0.0, "memory_gib": pytest.approx(0.5)}
    fake.memory_gib += 3  # as much as ours gave back: no longer ours
    assert account.others()["memory_gib"] == pytest.approx(3.5)


def test_a_busy_gpu_is_waited_for_and_then_recorded(monkeypatch):
    monkeypatch.setattr(tenants, "FREE_TIMEOUT_S", 0.05)
    account = Tenants(Gpu(0, FakeGpu(processes=1).nvml()))
    assert account.wait_until_free().processes == 1
    account.started(1, {11})
    assert account.others()["processes"] == 1.0
