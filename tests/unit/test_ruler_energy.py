"""The energy reader on a fake GPU with a counter that moves in steps."""

import pynvml
import pytest

from sdsie_sglang.eval import energy
from sdsie_sglang.eval.energy import Gpu, NoEnergy, Recorder
from tests.unit.ruler_fakes import FakeGpu, Lab


def test_quantum_is_measured():
    lab = Lab(FakeGpu(leak=0.0))
    lab.run(5)
    found = energy.quantum(lab.readings)
    assert found.period_s == pytest.approx(0.1, abs=0.011)
    assert found.energy_j == pytest.approx(40.0, rel=0.05)
    assert found.edges == pytest.approx(50, abs=1)


def test_window_is_exact_where_a_difference_of_two_readings_is_a_step_off():
    """Windows that begin just before an edge and end just after one, on a counter with a coarse step."""
    gpu = FakeGpu(leak=0.0, tick_s=1.0)
    lab = Lab(gpu)
    lab.run(0.95)
    naive, stretch = -gpu.shown_j, lab.run(12.1)
    naive += gpu.shown_j
    true_j = 400 * 12.1
    assert abs(naive / true_j - 1) > 0.05
    found = energy.window_energy_j(lab.readings, stretch.start_s, stretch.end_s)
    assert found == pytest.approx(true_j, rel=0.01)


def test_too_short_a_window_gives_no_energy():
    lab = Lab(FakeGpu())
    lab.run(20)
    with pytest.raises(NoEnergy, match="shorter than 10 s"):
        energy.window_energy_j(lab.readings, 1.0, 10.5)


def test_a_silent_counter_gives_no_energy():
    lab = Lab(FakeGpu(tick_s=1e6))
    lab.run(12)
    for ask in (
        lambda: energy.window_energy_j(lab.readings, 0.0, 12.0),
        lambda: energy.quantum(lab.readings),
        lambda: energy.shares_j(lab.readings, [(0.0, 1.0)]),
    ):
        with pytest.raises(NoEnergy, match="did not move"):
            ask()


def test_a_counter_that_went_backwards_gives_no_energy():
    """A driver that was loaded anew starts it again."""
    lab = Lab(FakeGpu(leak=0.0))
    lab.run(7)
    lab.gpu.energy_j = 0.0
    lab.run(7)
    with pytest.raises(NoEnergy, match="backwards"):
        energy.window_energy_j(lab.readings, 0.0, 14.0)
    assert energy.window_energy_j(lab.readings, 7.5, 13.5, 3.0) == pytest.approx(400 * 6, rel=0.01)


@pytest.mark.parametrize("idle_first", [True, False])
def test_a_window_that_was_not_sampled_to_its_end_gives_no_energy(idle_first):
    """Idle and then busy, or the other way: mean power of the sampled part would be a guess of the rest."""
    lab = Lab(FakeGpu(load_w=lambda t: 100.0 if (t < 6) == idle_first else 500.0, leak=0.0))
    lab.run(0.5)
    lab.run(5.5)
    lab.gpu.advance(6.0)
    with pytest.raises(NoEnergy, match=r"not seen to move in 6\.\d s"):
        energy.window_energy_j(lab.readings, 0.5, 12.0)


def test_integrated_power_agrees_with_the_counter_also_when_power_changes():
    lab = Lab(FakeGpu(load_w=lambda t: 200.0 if int(t) % 2 else 500.0, leak=0.0))
    lab.run(14)
    counter = energy.window_energy_j(lab.readings, 1.0, 13.0)
    assert counter == pytest.approx(350 * 12, rel=0.01)
    assert energy.integrated_power_j(lab.readings, 1.0, 13.0) == pytest.approx(350 * 12, rel=0.01)


def test_power_is_held_between_readings():
    readings = energy.Readings(power_w=[(0.0, 100.0), (2.0, 300.0)])
    assert energy.integrated_power_j(readings, 1.0, 4.0) == pytest.approx(100 + 600)
    assert energy.mean_power_w(readings, 0.5, 1.5) == pytest.approx(100)


def test_shares_of_overlapping_requests_add_up():
    lab = Lab(FakeGpu(leak=0.0))
    lab.run(21)
    spans = [(2.0, 12.0), (7.0, 12.0), (12.0, 17.0)]
    shares = energy.shares_j(lab.readings, spans)
    assert shares == pytest.approx([400 * (5 + 2.5), 400 * 2.5, 400 * 5], rel=0.02)
    assert sum(shares) == pytest.approx(400 * 15, rel=0.01)


def test_only_changes_are_kept():
    lab = Lab(FakeGpu(leak=0.0))
    lab.run(1)
    assert lab.readings.sampled == 100
    assert len(lab.readings.power_w) == 1
    assert len(lab.readings.energy_j) in (10, 11)
    assert len(lab.readings.slow) == 10


def test_no_gpu_is_said():
    nvml = FakeGpu().nvml()
    nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    with pytest.raises(NoEnergy, match="gives no energy"):
        Gpu(0, nvml)


def test_processes_that_a_container_may_not_see():
    nvml = FakeGpu().nvml()
    nvml.nvmlDeviceGetComputeRunningProcesses.side_effect = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    assert Gpu(0, nvml).slow(0.0).processes is None


def test_recorder_thread_samples_and_reports_its_own_failure():
    fake = FakeGpu()
    nvml = fake.nvml()
    with Recorder(Gpu(0, nvml), period_s=0.001) as recorder:
        while recorder.readings.sampled < 3:
            pass
    nvml.nvmlDeviceGetPowerUsage.side_effect = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(NoEnergy, match="cannot be read any more"), Recorder(Gpu(0, nvml), period_s=0.001) as recorder:
        recorder._thread.join(5)
