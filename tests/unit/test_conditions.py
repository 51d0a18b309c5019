"""What a cost table was measured for, its key in the cache, and the warning where it is used for something else."""

import json

import pytest

from sdsie_sglang.calibration import cache
from sdsie_sglang.calibration.conditions import config_digest, model_name, table_warning
from sdsie_sglang.gears.cost_table import Cell, Conditions, CostTable

HERE = Conditions(
    target="big", target_config="aa", draft="small", draft_config="bb", hardware="NVIDIA H200",
    dtype="bfloat16", attention_backend="fa3", tp_size=1,
)  # fmt: skip
OTHERS = {
    "target_config": "cc",
    "draft_config": "cc",
    "hardware": "NVIDIA L4",
    "dtype": "float16",
    "attention_backend": "triton",
    "tp_size": 2,
    "quantization": "fp8",
    "draft_quantization": "fp8",
    "skinny_gemm": False,
    "fused_layer": False,
    "fused_attention": False,
    "draft_graph": True,
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SDSIE_CACHE", str(tmp_path / "cache"))


def table(conditions=HERE, gears=(0, 3), each_ms=0.5, joules=None):
    cells = tuple(Cell(k=k, batch=1, ms=1.0 + k * each_ms, joules=joules) for k in gears)
    return CostTable(models="m", where="w", method="t", cells=cells, conditions=conditions)


def test_nothing_is_left_out():
    assert OTHERS.keys() == Conditions.model_fields.keys() - {"target", "draft"}


@pytest.mark.parametrize("name", OTHERS)
def test_every_condition_has_a_table_of_its_own(name):
    there = HERE.model_copy(update={name: OTHERS[name]})
    assert cache.path_for(there, (0, 3), energies=False) != cache.path_for(HERE, (0, 3), energies=False)
    assert len(HERE.differences(there)) == 1


def test_gears_energies_and_versions_have_tables_of_their_own(monkeypatch):
    paths = [
        cache.path_for(HERE, (0, 3), energies=False),
        cache.path_for(HERE, (0, 5), energies=False),
        cache.path_for(HERE, (0, 3), energies=True),
    ]
    for package in cache.VERSIONED:
        monkeypatch.setattr(cache, "_version", lambda name, package=package: "9" if name == package else "1")
        paths.append(cache.path_for(HERE, (0, 3), energies=False))
    assert len(set(paths)) == 5


def test_a_model_that_moved_is_the_same_model(tmp_path):
    digests = []
    for folder, path in (("a", "/one"), ("b", "/two")):
        (tmp_path / folder).mkdir()
        values = {"vocab_size": 5, "_name_or_path": path, "transformers_version": folder}
        (tmp_path / folder / "config.json").write_text(json.dumps(values))
        digests.append(config_digest(str(tmp_path / folder)))
    assert digests[0] == digests[1]
    moved = HERE.model_copy(update={"target": "elsewhere"})
    assert cache.path_for(moved, (0, 3), energies=False).name.endswith(
        cache.path_for(HERE, (0, 3), energies=False).name.removeprefix("big")
    )
    assert HERE.differences(moved) == []
    (tmp_path / "b" / "config.json").write_text('{"vocab_size": 6}')
    assert config_digest(str(tmp_path / "b")) != digests[0]


def test_a_model_on_a_hub_is_known_by_its_name(tmp_path):
    assert config_digest("org/model") != config_digest("org/other")
    assert (model_name("org/model"), model_name(str(tmp_path))) == ("org/model", tmp_path.name)


def test_tables_are_kept_and_what_cannot_be_read_is_measured_again():
    path = cache.path_for(HERE, (0, 3), energies=False)
    assert cache.read(path) is None
    cache.write(path, table())
    assert cache.read(path) == table()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    path.write_text("{")
    assert cache.read(path) is None


def test_a_table_for_another_server_is_named_in_one_line(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(table().model_dump_json())
    assert table_warning(None, HERE) is None
    assert table_warning(str(path), HERE) is None
    warning = table_warning(str(path), HERE.model_copy(update={"tp_size": 2, "hardware": "NVIDIA L4"}))
    assert "tp_size 2, not 1" in warning
    assert "hardware NVIDIA L4, not NVIDIA H200" in warning
    assert "\n" not in warning
    path.write_text(table(None).model_dump_json())
    assert table_warning(str(path), HERE) is None, "nobody wrote down what it was measured for"
