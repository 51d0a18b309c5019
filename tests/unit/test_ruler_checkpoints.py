"""EAGLE checkpoints that a server loads without complaint and that ruin what it measures."""

import json

import pytest

from sdsie_sglang.eval.checkpoints_check import (
    architecture_problem,
    checkpoint_problems,
    prompt_problems,
    system_prompt_problem,
)
from sdsie_sglang.eval.methods import Models

LLAMA_PLAIN = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
)
HEAD = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"


@pytest.mark.parametrize(
    ("names", "algorithm", "wrong"),
    [
        (["LlamaForCausalLM"], "EAGLE", True),
        (["LlamaForCausalLMEagle"], "EAGLE", False),
        (["LlamaForCausalLMEagle3"], "EAGLE", True),
        (["LlamaForCausalLMEagle3"], "EAGLE3", False),
        (["LlamaForCausalLM"], "EAGLE3", True),
        ([], "EAGLE", True),
    ],
)
def test_architecture(names, algorithm, wrong):
    assert bool(architecture_problem({"architectures": names}, algorithm)) == wrong


def test_the_mend_is_named():
    text = architecture_problem({"architectures": ["LlamaForCausalLM"]}, "EAGLE")
    assert "LlamaForCausalLMEagle " in text


def test_folders_are_checked_for_the_methods_that_use_them(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    models = Models("t", eagle=str(tmp_path), eagle3="a/name")
    [problem] = checkpoint_problems(models, {"eagle-k5", "eagle3-tree", "plain"})
    assert problem.startswith("eagle-k5")
    assert checkpoint_problems(models, {"plain", "eagle3-tree"}) == []


def test_system_prompt():
    assert system_prompt_problem(HEAD, LLAMA_PLAIN)
    assert not system_prompt_problem(HEAD, LLAMA_PLAIN.replace("2024\n\n", "2024\n\nYou are a helpful assistant."))
    assert system_prompt_problem(HEAD, "<|im_start|>user\nHello<|im_end|>")
    assert not system_prompt_problem("my/head", LLAMA_PLAIN)


def test_only_eagle3_methods_are_noted():
    models = Models("t", eagle3=HEAD)
    assert prompt_problems(models, "eagle3-tree", LLAMA_PLAIN)
    assert prompt_problems(models, "draft-k5", LLAMA_PLAIN) == []
