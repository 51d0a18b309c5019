"""Import names, installation checks and the command line's errors, each in a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdsie_sglang import plugin
from sdsie_sglang.launch_server import CPU_DEFAULTS, sglang_args, split_args
from sdsie_sglang.live import live_status

ROOT = Path(__file__).parents[2]


def run(*argv, cwd=ROOT, env=None):
    return subprocess.run(
        [sys.executable, *argv],
        cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_kernels_is_still_hugging_faces_from_the_repository_root():
    done = run("-c", "import kernels; print(kernels.get_kernel.__module__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kernels.")


@pytest.mark.parametrize("name", ["kernels.entropy", "patches.hook", "eval.server", "gears", "cpu_engine"])
def test_ours_import_under_our_name_from_anywhere(name, tmp_path):
    assert run("-c", f"import sdsie_sglang.{name}", cwd=tmp_path).returncode == 0


def test_top_level_folders_are_no_packages():
    assert not [f for f in ("kernels", "eval", "patches") if (ROOT / f / "__init__.py").exists()]


def test_importing_the_package_imports_neither_torch_nor_sglang():
    code = "import sys, sdsie_sglang, sdsie_sglang.gears; print({'torch', 'sglang'} & set(sys.modules))"
    assert run("-c", code).stdout.strip() == "set()"


def test_the_pin_comes_from_pyproject_alone():
    pinned = plugin.pinned_sglang()
    assert f"sglang=={pinned}" in (ROOT / "pyproject.toml").read_text()
    assert pinned not in Path(plugin.__file__).read_text()


def test_two_copies_are_named(tmp_path):
    other = tmp_path / "sdsie_sglang"
    other.mkdir()
    (other / "__init__.py").write_text("")
    assert plugin.installed_copies([str(ROOT), "", str(ROOT)]) == [str(ROOT / "sdsie_sglang")]
    assert len(plugin.installed_copies([str(ROOT), str(tmp_path)])) == 2


def test_a_second_copy_stops_the_launcher(tmp_path):
    other = tmp_path / "sdsie_sglang"
    other.mkdir()
    (other / "__init__.py").write_text("")
    done = run("-m", "sdsie_sglang.launch_server", env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert done.returncode == 2
    assert "two copies" in done.stderr


def test_another_sglang_stops_the_plugin_with_one_line(monkeypatch):
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda name: "0.5.24")
    with pytest.raises(SystemExit, match=r"works with SGLang .* and 0\.5\.24 is installed"):
        plugin.register()
    assert live_status() == {}


def test_not_installed_is_said(monkeypatch):
    def missing(name):
        raise plugin.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(plugin.importlib.metadata, "requires", missing)
    with pytest.raises(SystemExit, match="is not installed: run pip install"):
        plugin.register()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--sdsie-theta-low", "0.9", "--sdsie-theta-high", "0.2"],
            "theta_low (0.9) must be below theta_high (0.2)",
        ),
        (["--sdsie-k", "8"], "k: "),
        (["--sdsie-k", "five"], "invalid int value"),
        (["--sdsie-alpha", "0"], "alpha: "),
        (["--sdsie-policy", "magic"], "policy: "),
        (["--sdsie-colour", "red"], "unknown flag --sdsie-colour"),
        (["--sdsie-settings", "/nowhere"], "settings file"),
        (["--sdsie-schedule", "5;0"], "schedule must look like"),
        (["--sdsie-cost-table", "/nowhere"], "cost table /nowhere: No such file"),
        (["--sdsie-policy", "cost", "--sdsie-objective", "peace"], "objective: "),
    ],
)
def test_bad_flags_end_in_exit_code_2_and_one_line(argv, says):
    done = run("-m", "sdsie_sglang.launch_server", "--model-path", "x", *argv)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("argv", [["--sdsie-off"], ["--speculative-algorithm", "EAGLE3"]])
def test_our_flags_beside_another_algorithm_are_refused(argv):
    done = run("-m", "sdsie_sglang.launch_server", "--model-path", "x", *argv, "--sdsie-policy", "entropy")
    assert done.returncode == 2
    assert "mean nothing with" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("given", [["--speculative-algo", "STANDALONE"], ["--speculative-algorithm=STANDALONE"]])
def test_an_algorithm_that_was_given_is_kept(given):
    assert sglang_args(given, off=False, on_cpu=False) == given


def test_sglangs_config_file_counts_as_given(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("speculative-algorithm: STANDALONE\ndtype: bfloat16\n")
    given = ["--config", str(file)]
    added = sglang_args(given, off=False, on_cpu=True)[2:]
    assert "--dtype" not in added
    assert "--speculative-algorithm" not in added


def test_flags_are_split_between_us_and_sglang():
    ours, rest = split_args(["--sdsie-k", "3", "--model-path", "m", "--tp-size=2"])
    assert vars(ours) == {"sdsie_k": 3}
    assert rest == ["--model-path", "m", "--tp-size=2"]


def test_defaults_are_added_only_where_nothing_was_given():
    assert sglang_args(["--model-path", "m"], off=False, on_cpu=False)[2:] == [
        "--speculative-algorithm",
        "SDSIE",
    ]
    assert sglang_args(["--speculative-algorithm=EAGLE3"], off=False, on_cpu=False) == [
        "--speculative-algorithm=EAGLE3"
    ]
    on_cpu = sglang_args(["--dtype", "bfloat16"], off=True, on_cpu=True)
    assert on_cpu[:2] == ["--dtype", "bfloat16"]
    assert on_cpu.count("--dtype") == 1
    assert set(CPU_DEFAULTS) <= set(on_cpu)
    assert CPU_DEFAULTS["--dtype"] == "float32"
