"""The table of draft depths: its arithmetic by hand, and that it replaces only its own section."""

import pytest

from sdsie_sglang.eval import demo_depth
from sdsie_sglang.eval.compare import Change, HeadToHead, MethodSummary, PhaseSummary
from sdsie_sglang.eval.demo_depth import Depth
from sdsie_sglang.eval.demo_table import write_section
from sdsie_sglang.eval.intervals import Estimate


def depth(layers: int, length: float, draft_ms: float, target_ms: float) -> Depth:
    return Depth(layers, 1000, {"held out": length, "prompts": length + 0.1}, draft_ms, target_ms)


def phase(gains: dict[str, float]) -> PhaseSummary:
    """Of methods that are so much faster than plain."""

    def method(name: str, gain: float) -> MethodSummary:
        change = Change(speed=Estimate(value=gain, low=gain, high=gain))
        return MethodSummary(
            method=name, family=name, prompts=1, repetitions=1, tok_per_s=1.0, decode_tok_per_s=1.0, first_token_ms=1.0,
            throughput_tok_per_s=1.0, mean_tokens=1.0, change=change,
        )  # fmt: skip

    methods = [method(name, gain) for name, gain in gains.items()]
    better = Change(speed=Estimate(value=0.03, low=0.01, high=0.05))
    pair = HeadToHead(over="other-draft-k3", under="draft-k5", change=better, wins=1, prompts=1)
    return PhaseSummary.model_construct(concurrency=1, methods=methods, head_to_head=[pair])


SIX, FOUR = depth(6, 3.0, 0.4, 2.0), depth(4, 2.7, 0.3, 1.5)


def test_tokens_a_ms():
    assert SIX.tokens_per_ms(2.0) == pytest.approx(3.0 / 4.0)
    assert SIX.tokens_per_ms(2.0, host_ms=1.0) == pytest.approx(3.0 / 5.0)


def test_both_drafts_are_set_against_both_times_of_the_target():
    text = demo_depth.section(
        SIX, FOUR, phase({"draft-k3": 0.5, "draft-k5": 0.6, "other-draft-k3": 0.65, "other-draft-k5": 0.2})
    )
    assert "| 4 | 1,000 | 2.70 | 2.80 | 0.300 | 0.900 | 0.771 |" in text
    assert "| 6 | 1,000 | 3.00 | 3.10 | 0.400 | 0.857 | 0.750 |" in text
    assert "win by 3 to 5 % on held-out" in text  # 0.771/0.750 and 0.900/0.857
    assert "by -1 to 0 % if" in text  # with 1.4 ms more a cycle: 2.7/4.9 over 3/5.4, 2.7/4.4 over 3/4.9
    assert "1.10 at K = 3, 0.75 at K = 5" in text
    assert "is 1.03 (1.01 to 1.05), so it should be replaced" in text


def test_the_records_are_of_two_depths():
    shipped, other = demo_depth.depths()
    assert (shipped.layers, other.layers) == (6, 4)
    assert shipped.accept_lengths["held out"] > other.accept_lengths["held out"]


def test_only_its_own_section_is_replaced(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{demo_depth.BEGIN}\nold\n{demo_depth.END}\nafter\n")
    write_section(page, "new\n", demo_depth.BEGIN, demo_depth.END)
    assert page.read_text() == f"before\n{demo_depth.BEGIN}\nnew\n{demo_depth.END}\nafter\n"
