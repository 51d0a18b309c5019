import multiprocessing
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from sdsie_sglang.cpu_engine import EnableError, activation, enable, is_enabled, platform_plugin

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def host(monkeypatch):
    """A process in which nothing is enabled or imported yet, on a host without an accelerator."""
    monkeypatch.setattr(activation, "_enabled", False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(activation.SHADOW)])
    for name in ("sglang.srt.utils.common", "sgl_kernel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in (activation.ENGINE_VARIABLE, "TORCH_COMPILE_DISABLE"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards, whatever the test sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(activation, "_has_accelerator", lambda: False)
    monkeypatch.setattr(activation, "_is_installed", lambda name: False)
    monkeypatch.setattr(activation, "_report_amx_once", lambda: None)
    return monkeypatch


def test_enable_is_idempotent(host):
    assert not is_enabled()
    assert enable()
    assert enable()
    assert is_enabled()
    assert sys.path.count(str(activation.SHADOW)) == 1
    assert sys.path[0] == str(activation.SHADOW)
    assert os.environ[activation.ENGINE_VARIABLE] == "1"


def untouched():
    return not (is_enabled() or str(activation.SHADOW) in sys.path or activation.ENGINE_VARIABLE in os.environ)


def test_a_gpu_host_is_left_alone(host):
    host.setattr(activation, "_has_accelerator", lambda: True)
    assert not enable()
    assert untouched()


def test_a_gpu_host_can_ask_for_it(host):
    host.setattr(activation, "_has_accelerator", lambda: True)
    host.setenv(activation.ENGINE_VARIABLE, "1")
    assert enable()


def test_zero_refuses_it(host):
    host.setenv(activation.ENGINE_VARIABLE, "0")
    assert not enable()
    assert not is_enabled()


def test_a_compiled_build_is_preferred(host):
    host.setattr(activation, "_is_installed", lambda name: name == "sglang-kernel-cpu")
    assert not enable()
    assert untouched()


def test_too_late_is_an_error(host):
    common = types.ModuleType("sglang.srt.utils.common")
    host.setitem(sys.modules, "sglang.srt.utils.common", common)
    assert enable()  # it is still being imported: where SGLang loads platform plugins
    host.setattr(activation, "_enabled", False)
    common.is_amx_tile_supported = False
    with pytest.raises(EnableError, match="before sglang is imported"):
        enable()


def test_too_late_for_the_real_sgl_kernel(host):
    host.setitem(sys.modules, "sgl_kernel", types.ModuleType("sgl_kernel"))
    with pytest.raises(EnableError, match="before sgl_kernel is imported"):
        enable()
    assert untouched()


def test_the_platform_plugin_offers_no_platform(host):
    assert platform_plugin() is None
    assert is_enabled()


def run_python(script: str, **environment: str) -> str:
    """Output of a fresh interpreter that has no GPU and this checkout on its path."""
    inherited = {k: v for k, v in os.environ.items() if k != activation.ENGINE_VARIABLE}
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("amx", [True, False])
def test_a_process_and_its_child_see_amx_whatever_the_processor_has(amx):
    here, child = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_cpu_engine_activation import report, spawn_child
        print(report({amx}), spawn_child({amx}), sep="|")
        """
    ).split("|")
    for engine, sglang_sees, torch_says, path in (here.split(), child.split()):
        assert path.endswith(os.path.join("shadow", "sgl_kernel", "__init__.py"))
        assert (engine, sglang_sees) == ("True", "True")
        assert torch_says == str(amx)  # its own answer is back


def report(amx: bool) -> str:
    """What an enabled process finds on a processor with or without AMX."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: amx
    platform_plugin()  # what SGLang calls while it is imported, if the package is installed
    import sgl_kernel
    import sglang.srt.utils.common as common

    sees = common.is_cpu(), common.cpu_has_amx_support(), torch.cpu._is_amx_tile_supported()
    return " ".join([*map(str, sees), sgl_kernel.__file__])


def spawn_child(amx: bool) -> str:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=put_report, args=(queue, amx))
    child.start()
    answer = queue.get(timeout=100)
    child.join()
    return answer


def put_report(queue, amx: bool) -> None:
    queue.put(report(amx))
