"""top-k, top-p and min-p of a GPU's verify against SGLang's own plain sampler, in PyTorch."""

from types import SimpleNamespace

import pytest
import torch

from sdsie_sglang.cpu_engine import enable

enable()

from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch  # noqa: E402 (the CPU engine first)

from sdsie_sglang.config import ALGORITHM  # noqa: E402
from sdsie_sglang.worker import sampling_filters  # noqa: E402

VOCABULARY = 50
CASES = {
    "top-k and top-p": ([5, 20, VOCABULARY], [0.6, 0.8, 0.5], [0.0, 0.0, 0.0]),
    "min-p": ([VOCABULARY] * 3, [1.0] * 3, [0.3, 0.05, 0.0]),
    "all": ([4, 10, 1], [0.9, 0.3, 0.5], [0.2, 0.0, 0.1]),
}


def info_of(case, **changes):
    top_k, top_p, min_p = CASES[case]
    values = {
        "top_ks": torch.tensor(top_k, dtype=torch.int32),
        "top_ps": torch.tensor(top_p),
        "min_ps": torch.tensor(min_p),
        "need_top_k_sampling": min(top_k) < VOCABULARY,
        "need_top_p_sampling": min(top_p) < 1.0,
        "need_min_p_sampling": max(min_p) > 0,
        "is_all_greedy": False,
        "max_top_k": max(top_k),
    }
    return SimpleNamespace(**{**values, **changes})


def distributions(rows=6):
    torch.manual_seed(3)
    return torch.softmax(2 * torch.randn(rows, VOCABULARY), -1)


@pytest.mark.parametrize("whole", [False, True], ids=["the likeliest sorted", "all sorted"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_left_is_what_the_plain_sampler_draws_from(case, whole):
    info, probs = info_of(case, **({"max_top_k": None} if whole else {})), distributions()
    nodes = [each.repeat_interleave(2) for each in (info.top_ks, info.top_ps, info.min_ps)]
    _, weights, tokens, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), *nodes, info.need_min_p_sampling, None, torch.zeros(6), return_filtered_probs=True
    )
    wanted = torch.zeros_like(probs).scatter_(-1, tokens, weights / weights.sum(-1, keepdim=True))
    found = sampling_filters.filtered(probs, info, in_turn=False)
    torch.testing.assert_close(found, wanted)
    assert (wanted == 0).any()


def test_in_turn_top_p_is_of_what_top_k_left():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1] + [0.0] * (VOCABULARY - 4)])
    info = info_of("all", top_ks=torch.tensor([2]), top_ps=torch.tensor([0.5]), min_ps=torch.tensor([0.0]))
    # 0.4 / 0.7 is over a half: nothing comes after it. Of the whole it is under a half, and 0.3 is kept.
    assert sampling_filters.filtered(probs, info, in_turn=True)[0, :2].tolist() == [1.0, 0.0]
    joint = sampling_filters.filtered(probs, info, in_turn=False)[0, :2]
    torch.testing.assert_close(joint, torch.tensor([4 / 7, 3 / 7]))


def verify(info, algorithm=ALGORITHM):
    """What eagle_sample's own steps make of the distributions, and whether they were told to filter."""
    seen, probs = {}, distributions(3)

    def original(verify_input, batch, logits_output):
        seen["needs"] = batch.sampling_info.need_top_k_sampling, batch.sampling_info.need_top_p_sampling
        seen["probs"] = sampling_filters.around_softmax(lambda logits, temperatures: logits, logits_output, None)
        return "result"

    batch = SimpleNamespace(
        sampling_info=info,
        spec_algorithm=SimpleNamespace(name=algorithm),
        forward_mode=SimpleNamespace(is_idle=lambda: False),
    )
    before = info.need_top_k_sampling, info.need_top_p_sampling
    assert sampling_filters.around_eagle_sample(original, None, batch, probs) == "result"
    assert (info.need_top_k_sampling, info.need_top_p_sampling) == before
    assert sampling_filters.around_softmax(lambda logits: logits, probs) is probs, (
        "outside a verify nothing is filtered"
    )
    return seen["needs"], seen["probs"], probs


@pytest.mark.parametrize("case", CASES)
def test_such_a_batch_is_filtered_once_and_here(case, monkeypatch):
    monkeypatch.setattr(sampling_filters, "_sampling_backend", lambda: "flashinfer")
    info = info_of(case)
    needs, found, probs = verify(info)
    assert needs == (False, False)
    torch.testing.assert_close(found, sampling_filters.filtered(probs, info, in_turn=info.need_min_p_sampling))


@pytest.mark.parametrize(
    "info",
    [
        info_of("all", is_all_greedy=True),
        info_of("top-k and top-p", need_top_p_sampling=False),
        info_of("top-k and top-p", need_top_k_sampling=False),
    ],
    ids=["greedy", "top-k alone", "top-p alone"],
)
def test_other_batches_are_left_to_sglang(info):
    needs, found, probs = verify(info)
    assert needs == (info.need_top_k_sampling, info.need_top_p_sampling)
    assert found is probs


def test_other_algorithms_are_left_alone():
    needs, found, probs = verify(info_of("all"), algorithm="EAGLE")
    assert needs == (True, True)
    assert found is probs
