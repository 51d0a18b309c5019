"""Teacher-forced judgement of answers that differ, by a tiny random model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sdsie_sglang.eval import chat, fidelity, plan, record
from sdsie_sglang.eval.fidelity import Judge, Parting, main, served_dtype
from sdsie_sglang.eval.methods import Models
from tests.unit.ruler_fakes import fake_record

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(shape).save_pretrained(folder)
    return str(folder)


def greedy(target, tokens):
    judge, ids = Judge(target, "float32"), list(PROMPT)
    for _ in range(tokens):
        ids.append(int(judge.log_probs([*ids, 0], len(ids))[0].argmax()))
    return ids[len(PROMPT) :]


def test_the_targets_own_answer_beats_another(target):
    plain = greedy(target, 6)
    other = [*plain[:3], (plain[3] + 1) % 32, *plain[4:]]
    found = Judge(target, "float32").part("m", "k", PROMPT, plain, other)
    assert found.index == 3
    assert found.margin > 0
    assert found.rounding_kl == 0.0
    assert found.method_nll > found.plain_nll
    model = LlamaForCausalLM.from_pretrained(target).eval()
    with torch.inference_mode():
        ids = torch.tensor([PROMPT + plain])
        loss = model(ids, labels=torch.tensor([[-100] * len(PROMPT) + plain])).loss
    assert found.plain_nll == pytest.approx(float(loss), rel=1e-4)


def test_the_served_precision_is_that_of_the_checkpoint_where_no_dtype_was_given(target, tmp_path):
    """`auto` is what a server without --dtype says; measured as float32, rounding would be none at all."""
    folder = tmp_path / "bf16"
    LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16).save_pretrained(folder)
    assert served_dtype(str(folder), "auto") == torch.bfloat16
    assert served_dtype(target, "auto") == torch.float16
    assert served_dtype(target, "float32") == torch.float32
    plain = greedy(target, 6)
    assert Judge(str(folder), "auto").part("m", "k", PROMPT, plain, [(plain[0] + 1) % 32, *plain[1:]]).rounding_kl > 0


def test_a_folder_without_records_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"fidelity: {tmp_path} holds no records\n"


def test_rounding_is_measured_by_the_served_precision(target):
    plain = greedy(target, 6)
    other = [*plain[:2], (plain[2] + 1) % 32, *plain[3:]]
    found = Judge(target, "bfloat16").part("m", "k", PROMPT, plain, other)
    assert 0 < found.rounding_kl < 0.1


def test_a_large_margin_is_no_rounding(target):
    plain = greedy(target, 4)
    judge = Judge(target, "float32")
    worst = int(judge.log_probs(PROMPT + plain, len(PROMPT))[0].argmin())
    assert not judge.part("m", "k", PROMPT, plain, [worst, *plain[1:]]).is_rounding


def test_nothing_to_judge(target):
    judge = Judge(target, "float32")
    assert judge.part("m", "k", PROMPT, [4, 5], [4, 5]) is None
    assert judge.part("m", "k", PROMPT, [4, 5], [4]) is None


def test_every_differing_answer_is_judged_counted_or_over_the_limit(monkeypatch, tmp_path, capsys):
    class Stub(Judge):
        def __init__(self, target, dtype):
            assert (target, dtype) == ("T", "bfloat16")

        def part(self, method, key, prompt, plain, other):
            if plain[: len(other)] == other:
                return None
            return Parting(
                method=method, key=key, index=0, margin=0.0, rounding_kl=0.0, plain_nll=0.0, method_nll=0.0
            )  # fmt: skip

    monkeypatch.setattr(fidelity, "Judge", Stub)
    monkeypatch.setattr(plan, "resolve_models", lambda config: Models("T", "D"))
    monkeypatch.setattr(chat, "chat_ids", lambda target, text: [1])
    other = fake_record("method", position=1, server_info={"dtype": "bfloat16"})
    other.requests[0].output_ids = other.requests[0].output_ids[:-1]
    for request in other.requests[1:4]:
        request.output_ids = [0, 0]
    for made in (fake_record("open", "plain", position=0), other, fake_record("close", "plain", position=2)):
        record.write(made, made.datapoint.path(tmp_path))
    assert main([str(tmp_path), "--limit", "2"]) == 0
    found = fidelity.Fidelity.model_validate_json((tmp_path / "fidelity.json").read_text())
    assert found.judged == ["all/rep0/01-draft-k5.json", "all/rep0/02-plain-close.json"]
    assert (len(found.partings), found.cut, found.limit) == (2, 1, 2)
    assert "2 differing answers judged" in capsys.readouterr().out
