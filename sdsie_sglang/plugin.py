"""SGLang calls `register` in every process it starts (entry-point group `sglang.srt.plugins`).

SGLang logs a plugin's exception and starts unpatched; only SystemExit stops it. A server that is
not ours must not be measured as ours, so everything is checked before anything is registered.
"""

import importlib.metadata
import logging
import os
import re
import sys
from pathlib import Path

import sdsie_sglang
from sdsie_sglang.config import ALGORITHM, is_off
from sdsie_sglang.live import set_live
from sdsie_sglang.patches.hook import SeamMoved, check_hooks, register_hooks

logger = logging.getLogger(__name__)

DISTRIBUTION = "sdsie-sglang"


class InstallError(RuntimeError):
    """This package or SGLang is not installed as it must be. One line."""


def pinned_sglang() -> str:
    """The one SGLang version that pyproject.toml names. Raises InstallError."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise InstallError(f"{DISTRIBUTION} is not installed: run pip install -e . in its checkout") from None
    for requirement in requirements:
        if match := re.fullmatch(r"sglang\s*==\s*([^\s;]+)", requirement.strip()):
            return match[1]
    raise InstallError(f"{DISTRIBUTION} is installed without its pin of sglang: install it again")


def check_install() -> None:
    """Raises InstallError: not installed, two copies within reach, or another SGLang."""
    wanted = pinned_sglang()
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise InstallError(f"SGLang is not installed: pip install sglang=={wanted}") from None
    if found != wanted:
        raise InstallError(f"this version works with SGLang {wanted}, and {found} is installed")
    copies = installed_copies(sys.path)
    if len(copies) > 1:
        raise InstallError(f"two copies of sdsie_sglang are on the path, keep one: {', '.join(copies)}")


def installed_copies(path: list[str]) -> list[str]:
    """Distinct folders of this package that `path`, or the import that already happened, reaches."""
    own = Path(sdsie_sglang.__file__).resolve().parent
    reached = {Path(entry or ".").resolve() / "sdsie_sglang" for entry in path}
    return sorted({str(own), *(str(folder) for folder in reached if (folder / "__init__.py").is_file())})


def register() -> None:
    """Checks, then registers hooks and the algorithm. Raises SystemExit with one line if it can't."""
    if is_off():
        return
    try:
        _register()
    except (InstallError, SeamMoved) as error:
        raise SystemExit(f"sdsie: {error}") from None
    except Exception as error:
        logger.exception("sdsie: the plugin failed")
        raise SystemExit(f"sdsie: the plugin failed, see above: {type(error).__name__}: {error}") from error


def _register() -> None:
    check_install()
    from sdsie_sglang.algorithm import register_algorithm
    from sdsie_sglang.int4.quantization import register_quantization
    from sdsie_sglang.patches.registry import active_hooks

    hooks = active_hooks()
    check_hooks(hooks)
    register_hooks(hooks)
    register_algorithm()
    register_quantization()
    if not os.environ.get("SGLANG_CUDA_COREDUMP"):
        # A server that lost a rank would wait a minute for core dumps that nobody has enabled.
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "0")
    set_live(
        {
            "version": sdsie_sglang.__version__,
            "sglang": pinned_sglang(),
            "algorithm": ALGORITHM,
            "hooks": [hook.name for hook in hooks],
        }
    )
