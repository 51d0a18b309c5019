"""The Resolution Gear: which layers a SPEC means, what is refused, what is counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdsie_sglang.config import ConfigError, flat, parse_config
from sdsie_sglang.cpu_engine import enable
from sdsie_sglang.default_policy import completed, leaves_open
from sdsie_sglang.int4.checks import find_problem
from sdsie_sglang.int4.resolution import BadLayers, layers_problem, parse_layers, pick
from sdsie_sglang.int4.settings import Int4Settings

enable()

from sdsie_sglang.int4.method import ATTRIBUTE, DualLinearMethod, Int4Unsupported  # noqa: E402
from sdsie_sglang.int4.precision import int4_products, running_int4  # noqa: E402
from sdsie_sglang.worker.resolution import NotCaptured, ResolutionGear, find_layers  # noqa: E402
from tests.unit.test_int4_method import ranks, row_layer, unpatched_product, weights  # noqa: E402, F401 (two fixtures)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
}


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ("mlp.down_proj@all", range(8)),
        ("mlp.down_proj@0,7", (0, 7)),
        (" mlp.down_proj @ 5-7, 2 ", (2, 5, 6, 7)),
        ("mlp.down_proj@4", (4,)),
        ("mlp.down_proj@first:3", (0, 1, 2)),
        ("mlp.down_proj@middle:2", (3, 4)),
        ("mlp.down_proj@last:2", (6, 7)),
        ("mlp.down_proj@spread:2", (2, 6)),
        ("mlp.down_proj@1;mlp.down_proj@1,3;", (1, 3)),
    ],
)
def test_layers_of_a_spec(spec, layers):
    assert parse_layers(spec).names(8) == {f"layers.{i}.mlp.down_proj" for i in layers}


def test_several_modules():
    found = parse_layers("mlp.down_proj@last:1;self_attn.o_proj@0").names(4)
    assert found == {"layers.3.mlp.down_proj", "layers.0.self_attn.o_proj"}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "no layer is named"),
        ("mlp.down_proj", "must look like"),
        ("mlp.down_proj@", "must look like"),
        ("mlp.down_proj@some", "must look like"),
        ("mlp.down_proj@first:0", "must look like"),
        ("mlp.down_proj@-1", "must look like"),
        ("@all", "must look like"),
        ("mlp.*@all", "must look like"),
        ("mlp.down_proj@7-3", "ends before it begins"),
        ("mlp.up_proj@all", "as a part of mlp.gate_up_proj"),
    ],
)
def test_bad_specs(spec, says):
    with pytest.raises(BadLayers, match=says):
        parse_layers(spec)
    with pytest.raises(ConfigError, match=says):
        parse_config({"resolution_layers": spec})


@given(st.integers(1, 80).flatmap(lambda total: st.tuples(st.integers(1, total), st.just(total))))
def test_a_count_is_that_many_layers_wherever(sizes):
    count, total = sizes
    for place in ("first", "middle", "last", "spread"):
        layers = pick(place, count, total)
        assert len(set(layers)) == count
        assert list(layers) == sorted(layers)
        assert 0 <= layers[0] <= layers[-1] < total


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mlp.down_proj@32", "layer 32 of mlp.down_proj@32 is not there: the model has 0 to 31"),
        ("mlp.down_proj@spread:33", "asks for 33 layers, the model has 32"),
        ("mlp.w2@all", "no linear layer mlp.w2: self_attn.qkv_proj"),
    ],
)
def test_what_config_json_tells_is_said_before_weights_are_loaded(spec, says):
    assert says in (layers_problem(spec, LLAMA) or "")
    assert layers_problem("mlp.down_proj@31;self_attn.o_proj@all", LLAMA) is None
    assert layers_problem("mlp.w2@99", {}) is None, "a model that is not at hand is looked at when loaded"


def problem(model=LLAMA, int4=None, **changed):
    good = {"quantization": None, "drafts_itself": False, "tp_size": 1, "device": "cuda", "dtype": "auto"}
    spec = {"resolution_layers": "mlp.down_proj@all"}
    return find_problem(Int4Settings(**(int4 or {})), model, **(good | spec | changed))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"quantization": "fp8"}, "--sdsie-resolution-layers needs an unquantised target, this one is fp8"),
        ({"model": {**LLAMA, "quantization_config": {"quant_method": "awq"}}}, "this one is awq"),
        ({"int4": {"calibration": "awq"}}, "choose another"),
        ({"dtype": "float32"}, "bf16 or fp16"),
        ({"tp_size": 32}, "the 448 inputs of mlp.down_proj on each of 32 ranks"),
        ({"resolution_layers": "mlp.down_proj@40"}, "layer 40"),
    ],
)
def test_what_cannot_be_served(changed, says):
    assert says in (problem(**changed) or "")


def test_what_can():
    assert problem() is None
    assert problem(tp_size=2) is None
    assert problem(tp_size=32, resolution_layers="self_attn.o_proj@all") is None, "its shards hold whole groups"
    assert problem(device="cpu", dtype="float32") is None


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"draft": "self-int4"}, "leave out --sdsie-draft self-int4"),
        ({"gears": "0,5"}, "leave out --sdsie-gears"),
        ({"int4_exclude": "layers.0."}, "leave out int4_exclude"),
        ({"int4_lm_head": True}, "leave out int4_exclude and int4_lm_head"),
    ],
)
def test_what_does_not_go_with_it(more, says):
    with pytest.raises(ConfigError, match=says):
        parse_config({"resolution_layers": "mlp.down_proj@all", **more})


def test_the_clutch_decides_unless_told_otherwise_and_nothing_is_measured():
    settings = {"resolution_layers": "mlp.down_proj@all"}
    config = parse_config(settings)
    assert config.policy.policy == "entropy"
    assert not config.needs_draft_model
    assert not leaves_open(completed(settings, []))
    assert parse_config({**settings, "policy": "fixed"}).policy.policy == "fixed"
    assert parse_config(flat(config)) == config
    assert config.built_gears(graphs=True) == tuple(range(8)), "any K above 0 is gear R and costs nothing"
    assert parse_config({}).resolution_layers is None
    assert parse_config({}).needs_draft_model


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.down_proj = row_layer(None, k=256)
        self.mlp.down_proj.weight.data = weights(64)[0]


@pytest.fixture
def model(ranks):  # noqa: F811
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList(Block() for _ in range(4))
    return model


def run(model, x):
    return [block.mlp.down_proj.quant_method.apply(block.mlp.down_proj, x) for block in model.model.layers]


def test_only_the_named_layers_change_and_only_while_engaged(model):
    x = torch.randn(3, 256)
    plain = run(model, x)
    gear = ResolutionGear(model, "mlp.down_proj@1,3", Int4Settings(calibration="g64"))
    assert gear.names == {"model.layers.1.mlp.down_proj", "model.layers.3.mlp.down_proj"}
    for k in (0, 5):
        before = gear.executed
        with gear.running(k):
            now = run(model, x)
        assert gear.executed - before == gear.expected(k) == (2 if k else 0)
        same = [torch.equal(a, b) for a, b in zip(plain, now, strict=True)]
        assert same == ([True, False, True, False] if k else [True] * 4)
    assert "NOT LOSSLESS" in gear.warning()
    assert "self-int4" in gear.warning()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mlp.gate_up_proj@0", "no linear layer layers.0.mlp.gate_up_proj: mlp.down_proj"),
        ("mlp.down_proj@4", "the model has 0 to 3"),
    ],
)
def test_layers_that_a_loaded_model_lacks(model, spec, says):
    with pytest.raises(Int4Unsupported, match=says):
        find_layers(model, spec)


def test_a_layer_that_is_quantised_already(model):
    layer = model.model.layers[2].mlp.down_proj
    layer.quant_method = DualLinearMethod(layer.quant_method, "g64")
    with pytest.raises(Int4Unsupported, match=r"layers\.2\.mlp\.down_proj is quantised already"):
        ResolutionGear(model, "mlp.down_proj@1-3", Int4Settings())
    ResolutionGear(model, "mlp.down_proj@0", Int4Settings())
    assert not hasattr(model.model.layers[3].mlp.down_proj, ATTRIBUTE)


class Bundle:
    """What stands for a captured decode graph: it remembers what it ran while it was captured."""

    def __init__(self, model, x):
        run(model, x)
        run(model, x)  # SGLang warms up before it captures
        self.target_graph_runner = self
        self.replays = 0

    def execute(self):
        self.replays += 1


def test_replays_count_as_their_graph_was_captured(model):
    x = torch.randn(1, 256)
    gear = ResolutionGear(model, "mlp.down_proj@all", Int4Settings())
    bundles = {k: gear.build(lambda: Bundle(model, x), k) for k in (0, 1)}
    for k, ran in ((0, 0), (1, 4)):
        before, products = gear.executed, int4_products()
        bundles[k].target_graph_runner.execute()
        assert gear.executed - before == ran
        assert int4_products() == products, "nothing ran eagerly"
        assert bundles[k].replays == 1


def test_a_graph_of_the_wrong_precision_is_refused(model):
    x = torch.randn(1, 256)
    gear = ResolutionGear(model, "mlp.down_proj@all", Int4Settings())

    def in_int4():
        with running_int4():
            return Bundle(model, x)

    with pytest.raises(NotCaptured, match="8 INT4 products were captured for gear 0"):
        gear.build(in_int4, 0)
    for block in model.model.layers:
        block.mlp.down_proj.quant_method = block.mlp.down_proj.quant_method._plain
    with pytest.raises(NotCaptured, match="0 INT4 products were captured for gear R"):
        gear.build(lambda: Bundle(model, x), 1)
