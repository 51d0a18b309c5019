"""What a record must say about where it was measured."""

import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sdsie-sglang", "sglang", "torch", "triton", "transformers", "nvidia-ml-py")


def describe() -> dict[str, Any]:
    """Versions, commit, processor and GPUs (name, driver, power limit, clocks, throttle reasons)."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
    }


def where(described: dict[str, Any] | None = None) -> str:
    """The hardware in one phrase, for headline figures: of this machine, or of a record's."""
    machine = describe() if described is None else described
    if gpus := machine["gpus"]:
        return f"{len(gpus)} x {gpus[0]['name']}"
    return f"{machine['cores']} cores, {machine['cpu']}"


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _commit() -> str | None:
    if commit := os.environ.get("SDSIE_COMMIT"):  # a copy without its .git
        return commit
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def cpu_name() -> str:
    """The processor, as the kernel names it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def _gpus() -> list[dict[str, Any]]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return []
    found = []
    for i in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(i)
        found.append(
            {
                "name": pynvml.nvmlDeviceGetName(gpu),
                "driver": pynvml.nvmlSystemGetDriverVersion(),
                "power_limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
                "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
                "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
                "throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
            }
        )
    return found


def this_command() -> str:
    """How the running program was started, with the interpreter's path left out."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = f"-m {spec.name.removesuffix('.__main__')}" if spec is not None else Path(sys.argv[0]).name
    if spec is None and (ROOT / "scripts" / program).exists():
        program = f"scripts/{program}"
    return f"python {program} {shlex.join(sys.argv[1:])}".strip()
