"""What INT4 cannot serve is said before any weight is loaded."""

import pytest

from sdsie_sglang.int4.checks import find_problem, row_parallel_inputs
from sdsie_sglang.int4.settings import Int4Settings

LLAMA = {"num_attention_heads": 32, "hidden_size": 4096, "intermediate_size": 14336}
SAVED = {**LLAMA, "quantization_config": {"quant_method": "sdsie_int4", "calibration": "awq"}}


def problem(model=LLAMA, int4=None, **changed):
    good = {"quantization": None, "drafts_itself": False, "tp_size": 1, "device": "cuda", "dtype": "auto"}
    return find_problem(Int4Settings(**(int4 or {})), model, **(good | changed))


def test_what_can_be_served():
    assert problem() is None
    assert problem(quantization="sdsie_int4") is None
    assert problem(drafts_itself=True, tp_size=2) is None
    assert problem(drafts_itself=True, quantization="unquant") is None
    assert problem(SAVED) is None
    assert problem(quantization="fp8", dtype="float32", int4={"calibration": "awq"}) is None, "INT4 is not asked for"
    assert problem(drafts_itself=True, device="cpu", dtype="float32") is None
    assert problem({}, drafts_itself=True, tp_size=8) is None, "a model that is not at hand is looked at when loaded"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"drafts_itself": True, "quantization": "fp8"}, "unquantised target, this one is fp8"),
        ({"drafts_itself": True, "model": SAVED}, "unquantised target, this one is sdsie_int4"),
        ({"quantization": "sdsie_int4", "int4": {"calibration": "awq"}}, "int4.quantize"),
        ({"drafts_itself": True, "int4": {"calibration": "awq"}}, "choose another"),
        ({"drafts_itself": True, "dtype": "float32"}, "bf16 or fp16"),
        ({"quantization": "sdsie_int4", "tp_size": 32, "int4": {"calibration": "g128"}}, "the 448 inputs of mlp.down"),
        ({"model": {**LLAMA, "quantization_config": {"quant_method": "sdsie_int4", "calibration": "x"}}}, "'x'"),
    ],
)
def test_what_cannot(changed, says):
    found = problem(**changed)
    assert found is not None
    assert says in found
    assert "\n" not in found


def test_excluded_layers_may_be_cut_anywhere():
    assert problem(quantization="sdsie_int4", tp_size=32, int4={"exclude": "down_proj"}) is None


KNOWN = {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 12}


@pytest.mark.parametrize(
    ("exclude", "says"),
    [
        ("proj", "leaves no linear layer"),
        ("layers.0.,layers.12.", "layers.12.: no linear layer's name"),
        ("dwon_proj", "dwon_proj: no linear layer's name"),
        ("down_proj,layers.3.,q_proj,lm_head", None),
    ],
)
def test_names_to_exclude_are_looked_at_before_loading(exclude, says):
    for asked in ({"drafts_itself": True}, {"quantization": "sdsie_int4"}):
        found = problem(KNOWN, {"exclude": exclude}, **asked)
        assert found is None if says is None else says in found
    assert problem(LLAMA, {"exclude": exclude}, drafts_itself=True) is None, "of other families they are not known yet"
    assert problem(KNOWN, {"exclude": exclude}) is None, "INT4 is not asked for"


def test_a_draft_model_is_looked_at_as_the_target_is(tmp_path, monkeypatch):
    import json
    from types import SimpleNamespace

    from sdsie_sglang.algorithm import check_int4
    from sdsie_sglang.config import ConfigError, parse_config

    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(KNOWN))
    args = SimpleNamespace(
        model_path=str(tmp_path / "target"), speculative_draft_model_path=str(tmp_path / "draft"), quantization=None,
        speculative_draft_model_quantization="sdsie_int4", tp_size=1, device="cuda", dtype="auto",
    )  # fmt: skip
    check_int4(args, parse_config({"policy": "fixed"}))
    with pytest.raises(ConfigError, match="cannot be done while loading"):
        check_int4(args, parse_config({"policy": "fixed", "int4_calibration": "awq"}))
    args.tp_size = 32
    with pytest.raises(ConfigError, match="groups of 128 do not divide the 448 inputs"):
        check_int4(args, parse_config({"policy": "fixed"}))
    args.speculative_draft_model_quantization = "unquant"
    check_int4(args, parse_config({"policy": "fixed"}))


def test_inputs_of_split_layers():
    assert row_parallel_inputs(LLAMA) == {"self_attn.o_proj": 4096, "mlp.down_proj": 14336}
    assert row_parallel_inputs({"num_attention_heads": 9, "head_dim": 64, "intermediate_size": 8}) == {
        "self_attn.o_proj": 576,
        "mlp.down_proj": 8,
    }
    assert row_parallel_inputs({"model_type": "other"}) == {}
