"""The other two ways in: SGLang's own launcher, and its Engine in a program."""

import json
import os
import subprocess
import sys

import pytest

from sdsie_sglang.eval.server import Server
from tests.e2e.conftest import CONTEXT

ENGINE = """
import json, sys
import sglang

def main():
    target, draft, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    engine = sglang.Engine(
        model_path=target, speculative_draft_model_path=draft, speculative_algorithm="SDSIE",
        device="cpu", dtype="float32", disable_cuda_graph=True, context_length=2048, max_total_tokens=4096,
        log_level="warning",
    )
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    done = engine.generate(input_ids=prompt, sampling_params=sampling)
    print("RESULT", json.dumps({"ids": done["output_ids"], "sdsie": done["meta_info"]["sdsie"]}))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def test_sglangs_own_launcher(baseline, models, draft, prompts):
    arguments = ["--model-path", str(models.target), "--speculative-draft-model-path", draft, *CONTEXT]
    arguments += [
        "--speculative-algorithm",
        "SDSIE",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--disable-cuda-graph",
    ]
    config = json.dumps({"policy": "fixed", "k": 3})
    with Server.start(arguments, module="sglang.launch_server", env={"SDSIE_CONFIG": config}) as server:
        assert server.sdsie()["gate"]["policy"]["k"] == 3
        done = server.generate(prompts[0], max_new_tokens=12, ignore_eos=True)
        assert done["output_ids"] == baseline.ids[0][:12]
        assert set(done["meta_info"]["sdsie"]["cycles"]) == {"3"}


def test_engine(baseline, models, draft, prompts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ENGINE)
    done = subprocess.run(
        [sys.executable, str(program), str(models.target), draft, json.dumps(prompts[0])],
        env={**os.environ, "SDSIE_CONFIG": json.dumps({"policy": "entropy"})},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert result, done.stderr[-3000:]
    answer = json.loads(result[0].removeprefix("RESULT "))
    assert answer["ids"] == baseline.ids[0][:12]
    assert answer["sdsie"]["cycles"]


DRAFTED = ["--speculative-draft-model-path", "{draft}"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--sdsie-draft", "model"], "a draft model is missing"),
        (
            ["--quantization", "gptq"],
            "needs an unquantised target, this one is gptq; leave out --sdsie-draft and name a draft",
        ),
        (["--speculative-draft-model-path", "/nowhere/draft"], "is not a folder"),
        (["--speculative-draft-model-path", "{other}"], "the draft's vocabulary has 7 tokens"),
        ([*DRAFTED, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], "DP attention"),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_are_loaded(models, draft, tmp_path, flags, says):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(
        '{"vocab_size": 7, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    )
    flags = [flag.format(draft=draft, other=other) for flag in flags]
    done = subprocess.run(
        [sys.executable, "-m", "sdsie_sglang.launch_server", "--model-path", str(models.target), *flags],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-3000:]
    assert says in done.stderr.splitlines()[-1]
    assert "Load weight" not in done.stdout + done.stderr
