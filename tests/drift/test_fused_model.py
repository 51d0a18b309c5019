"""SGLang's Llama through the fused layer, in a process of its own: process groups and settings stay there."""

import os
import subprocess
import sys
from pathlib import Path


def test_fused_model() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, Path(__file__).with_name("fused_model_in_sglang.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
