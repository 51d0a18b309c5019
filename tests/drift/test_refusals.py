"""What the algorithm refuses at start, on SGLang's own fields; the command line's way is in tests/e2e."""

import json

import pytest

from sdsie_sglang.config import ConfigError
from sdsie_sglang.cpu_engine import enable

enable()

from sglang.srt.arg_groups.overrides import field_names  # noqa: E402 (after the CPU engine was chosen)
from sglang.srt.server_args import ServerArgs  # noqa: E402

from sdsie_sglang.algorithm import check_draft, check_server_args  # noqa: E402


class Args:
    """Fields of a server that would be accepted, with some changed; an unknown name is an error."""

    def __init__(self, folder, **changed):
        good = {
            "model_path": str(folder),
            "speculative_draft_model_path": str(folder),
            "speculative_eagle_topk": None,
            "speculative_num_steps": None,
            "speculative_adaptive": False,
            "speculative_use_rejection_sampling": False,
            "speculative_accept_threshold_single": 1.0,
            "speculative_accept_threshold_acc": 1.0,
            "tp_size": 1,
            "pp_size": 1,
            "attn_dp_size": 1,
            "enable_lora": None,
            "lora_paths": None,
            "disaggregation_mode": "null",
            "enable_pdmux": False,
            "device": "cuda",
            "disable_cuda_graph": False,
            "cuda_graph_backend_decode": None,
            "page_size": 16,
            "enable_return_hidden_states": False,
            "quantization": None,
            "speculative_draft_model_quantization": None,
            "dtype": "auto",
        }
        self.__dict__.update(good | changed)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return tmp_path


def test_fields_are_sglangs(folder):
    assert set(vars(Args(folder))) <= set(field_names(ServerArgs))


def test_a_good_server_passes(folder):
    check_server_args(Args(folder))
    check_server_args(Args(folder, device="cpu", page_size=1, cuda_graph_backend_decode="disabled"))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"speculative_draft_model_path": None}, "a draft model is missing"),
        ({"speculative_eagle_topk": 4}, "a chain, not a tree"),
        ({"speculative_num_steps": 3}, "use --sdsie-k instead"),
        ({"speculative_adaptive": True}, "--sdsie-policy chooses"),
        ({"speculative_use_rejection_sampling": True}, "verified without it"),
        ({"speculative_accept_threshold_single": 0.9}, "never accept what the target would not have said"),
        ({"speculative_accept_threshold_acc": 0.5}, "leave out --speculative-accept-threshold-single"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"attn_dp_size": 2}, "DP attention"),
        ({"enable_lora": True}, "LoRA"),
        ({"lora_paths": ["a=/adapter"]}, "LoRA"),
        ({"disaggregation_mode": "decode"}, "disaggregation"),
        ({"enable_pdmux": True}, "pdmux"),
        ({"device": "cpu", "page_size": 1}, "--cuda-graph-backend-decode disabled"),
        ({"device": "cpu", "cuda_graph_backend_decode": "disabled"}, "--page-size 1"),
        ({"enable_return_hidden_states": True}, "no hidden states"),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_to_do(folder, changed, says):
    with pytest.raises(ConfigError) as caught:
        check_server_args(Args(folder, **changed))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_self_draft_names_no_draft_model(folder, monkeypatch):
    monkeypatch.setenv("SDSIE_CONFIG", '{"draft": "self-int4"}')
    check_server_args(Args(folder, speculative_draft_model_path=None))
    with pytest.raises(ConfigError, match="leave out --speculative-draft-model-path"):
        check_server_args(Args(folder))
    with pytest.raises(ConfigError, match="unquantised target, this one is fp8"):
        check_server_args(Args(folder, speculative_draft_model_path=None, quantization="fp8"))
    with pytest.raises(ConfigError, match="is not a folder"):
        check_server_args(Args(folder, model_path="/nowhere", speculative_draft_model_path=None))


def test_heads_that_do_not_divide_are_refused_on_a_gpu_alone(folder):
    (folder / "config.json").write_text('{"vocab_size": 8, "num_attention_heads": 9, "num_key_value_heads": 3}')
    with pytest.raises(ConfigError, match=r"target's 9 attention heads .* use --tp-size 3"):
        check_server_args(Args(folder, tp_size=4))
    check_server_args(Args(folder, tp_size=3))
    check_server_args(Args(folder, tp_size=2, device="cpu", page_size=1, cuda_graph_backend_decode="disabled"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", '{"vocab_size": 9}', "must match"),
        ("tokenizer.json", '{"model": {"vocab": {"b": 0}}}', "gives other ids"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", "{", "cannot be read"),
    ],
)
def test_drafts_that_do_not_fit(folder, tmp_path_factory, name, content, says):
    other = tmp_path_factory.mktemp("other")
    for file in folder.iterdir():
        (other / file.name).write_text(file.read_text())
    (other / name).write_text(content)
    with pytest.raises(ConfigError, match=says):
        check_draft(str(folder), str(other))


@pytest.mark.parametrize("content", ["{}", json.dumps({"model": None}), json.dumps({"model": []})])
def test_a_tokenizer_without_a_vocabulary_is_left_to_sglang(folder, tmp_path_factory, content):
    other = tmp_path_factory.mktemp("other")
    (other / "config.json").write_text('{"vocab_size": 8}')
    (other / "tokenizer.json").write_text(content)
    check_draft(str(folder), str(other))


def test_groups_of_an_int4_draft_that_ranks_would_cut_are_refused(tmp_path, folder):
    """576 inputs of o_proj on two ranks are 288 each, no whole number of groups of 128; the target is not quantised."""
    draft = tmp_path / "draft"
    draft.mkdir()
    config = {"vocab_size": 8, "num_attention_heads": 18, "head_dim": 32, "hidden_size": 576, "intermediate_size": 1536}
    (draft / "config.json").write_text(json.dumps(config))
    drafted = {"speculative_draft_model_path": str(draft), "speculative_draft_model_quantization": "sdsie_int4"}
    with pytest.raises(ConfigError, match=r"the draft: INT4 groups of 128 do not divide the 288 inputs"):
        check_server_args(Args(folder, tp_size=2, **drafted))
    check_server_args(Args(folder, **drafted))
    check_server_args(Args(folder, tp_size=2, **drafted | {"speculative_draft_model_quantization": None}))
