"""Switch SGLang's CPU engine on, with this project's ops as its `sgl_kernel`.

When it has to happen: `sglang.srt.utils.common` reads the processor's AMX flag while it is imported, and
SGLang's layers import `sgl_kernel` while they are imported. General plugins (`sglang.srt.plugins`) run after
that in a scheduler process. Platform plugins (`sglang.srt.platforms`) run at `sglang/srt/utils/common.py:102`
in the middle of the first SGLang import of every process, before both. So `platform_plugin` is registered
there, offers no platform, and calls `enable`. A program may also call `enable` before it imports sglang.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"
SHADOW = Path(__file__).parent / "shadow"
COMPILED_CPU_BUILDS = ("sglang-kernel-cpu", "sgl-kernel-cpu")

_enabled = False  # of this process; a spawned one inherits sys.path and the environment, but not torch's answer


class EnableError(RuntimeError):
    """SGLang was imported before the CPU engine could be switched on."""


def is_enabled() -> bool:
    """Whether `import sgl_kernel` finds this project's ops in this process."""
    return _enabled


def enable() -> bool:
    """Make this process and the ones it spawns run SGLang's CPU engine on this project's ops.

    Sets SGLANG_USE_CPU_ENGINE=1, puts the shadow `sgl_kernel` first on `sys.path` (multiprocessing hands both
    to children), and lets SGLang see AMX whatever the processor has: the ops are PyTorch and need none, and
    without the flag SGLang takes the torch_native backend, which refuses speculation. Turns torch.compile off
    (three small functions of SGLang's would need a C++ compiler on the host). Idempotent.

    Returns False, and changes nothing, where the CPU engine isn't wanted or this one isn't needed: there is
    an accelerator (unless SGLANG_USE_CPU_ENGINE=1 asks for the CPU engine all the same),
    SGLANG_USE_CPU_ENGINE=0, or SGLang's own compiled CPU build is installed. Raises EnableError if it comes
    too late.
    """
    global _enabled
    if _enabled:
        return True
    if not _wanted():
        return False
    _refuse_if_late()
    os.environ[ENGINE_VARIABLE] = "1"
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    if str(SHADOW) not in sys.path:
        sys.path.insert(0, str(SHADOW))
    _report_amx_once()
    _enabled = True
    return True


def platform_plugin() -> None:
    """Entry point of `sglang.srt.platforms`: switches the CPU engine on and offers no platform of its own."""
    enable()


def _wanted() -> bool:
    asked = os.environ.get(ENGINE_VARIABLE)
    if asked is not None and asked != "1":
        return False
    if any(_is_installed(name) for name in COMPILED_CPU_BUILDS):
        return False
    return asked == "1" or not _has_accelerator()


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _has_accelerator() -> bool:
    import torch

    return bool(torch.accelerator.is_available())  # CUDA, ROCm, XPU, MPS, and back ends that registered


def _refuse_if_late() -> None:
    common = sys.modules.get("sglang.srt.utils.common")
    if common is not None and hasattr(common, "is_amx_tile_supported"):
        raise EnableError("call sdsie_sglang.cpu_engine.enable() before sglang is imported")
    if "sgl_kernel" in sys.modules:
        raise EnableError("call sdsie_sglang.cpu_engine.enable() before sgl_kernel is imported")


def _report_amx_once() -> None:
    """Answer SGLang's one question about AMX with yes, then give torch its own answer back.

    TorchInductor asks the same function before it emits AMX code, so the answer must not stay.
    """
    import torch

    real = torch.cpu._is_amx_tile_supported

    def yes() -> bool:
        torch.cpu._is_amx_tile_supported = real
        return True

    torch.cpu._is_amx_tile_supported = yes
