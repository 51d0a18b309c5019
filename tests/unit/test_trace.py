import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sdsie_sglang.demo.llama import HIDDEN, Llama
from sdsie_sglang.demo.replay import ServedText, draft_flags
from sdsie_sglang.eval.draft_chains import draft_chains
from sdsie_sglang.eval.trace import TRACES, Trace, load, run_lengths, save, trace_answer
from sdsie_sglang.kernels.entropy import entropy_bits

VOCABULARY = 60


def model(layers: int, seed: int) -> Llama:
    generator = torch.Generator().manual_seed(seed)
    made = Llama(layers)
    for parameter in made.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.04 * noise if parameter.dim() == 2 else 1 + 0.1 * noise
    made.embedding = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(9))
    return made


@pytest.fixture(scope="module")
def draft() -> Llama:
    return model(2, 1)


def one_by_one(draft: Llama, tokens: list[int], steps: int) -> tuple[list[int], list[float], list[float]]:
    """Greedy continuation, the whole text read anew for every token."""
    named, bits, top = [], [], []
    for _ in range(steps):
        with torch.inference_mode():
            logits = F.linear(draft(torch.tensor([tokens + named]))[0][0, -1:], draft.embedding)
        named.append(int(logits.argmax()))
        bits.append(float(entropy_bits(logits)))
        top.append(float(logits.softmax(-1).max()))
    return named, bits, top


def test_chains_are_what_the_draft_would_write_from_each_position(draft: Llama):
    text = torch.randint(VOCABULARY, (11,), generator=torch.Generator().manual_seed(2))
    chains = draft_chains(draft, text, first=4, steps=5)
    assert chains.tokens.shape == (7, 5)
    for row, position in enumerate(range(4, 11)):
        named, bits, top = one_by_one(draft, text[: position + 1].tolist(), 5)
        assert chains.tokens[row].tolist() == named
        assert chains.entropy_bits[row].tolist() == pytest.approx(bits, abs=1e-3)
        assert chains.top_probability[row].tolist() == pytest.approx(top, abs=1e-4)


def test_run_lengths():
    answer = np.array([7, 1, 2, 3])
    proposals = np.array([[1, 2, 3], [2, 9, 9], [9, 3, 3], [1, 1, 1]])
    # From 7: all three right. From 1: one. From 2: the first is wrong, whatever follows. Nothing follows 3.
    assert run_lengths(proposals, answer).tolist() == [3, 1, 0, 0]


def test_a_proposal_beyond_the_end_is_never_right():
    assert run_lengths(np.array([[5, 0], [0, 0]]), np.array([4, 5])).tolist() == [1, 0]


def test_runs_are_runs_of_the_replay_flags(draft: Llama):
    target = model(3, 5)
    tokens = torch.randint(VOCABULARY, (1, 30), generator=torch.Generator().manual_seed(3))[0].tolist()
    answer = {"id": "a", "category": "math", "is_code": False, "tokens": tokens, "prompt_length": 6}
    for at in (9, 10, 17):  # make the draft right here and there
        tokens[at], _ = one_by_one(draft, tokens[:at], 1)[0][0], None
    trace, strange = trace_answer(target, draft, answer)
    flags = draft_flags(draft, ServedText(tokens, 6))[6:]
    for t in range(24):
        run = next((i for i in range(min(7, 24 - t)) if not flags[t + i]), min(7, 24 - t))
        assert trace.run[t] == run
    assert trace.run.max() >= 2
    assert len(trace) == 24
    assert 0 < strange <= 23  # random tokens are not the target's own
    with torch.inference_mode():
        logits = F.linear(target(torch.tensor([tokens]))[0][0], target.embedding)
    assert trace.entropy_bits == pytest.approx(entropy_bits(logits)[6:].numpy(), abs=1e-3)


def made_up(n: int, name: str) -> Trace:
    rng = np.random.default_rng(n)
    return Trace(
        id=name,
        category="math",
        is_code=False,
        repeated=0.25,
        entropy_bits=rng.random(n, np.float32),
        run=np.minimum(rng.integers(0, 8, n), np.arange(n - 1, -1, -1)).astype(np.uint8),
        draft_entropy_bits=rng.random((n, 7), np.float32),
        draft_top_probability=rng.random((n, 7), np.float32),
    )


def test_files_give_back_what_was_saved(tmp_path):
    traces = [made_up(9, "one"), made_up(4, "two")]
    save(tmp_path / "t.npz", traces, {"draft": "d"})
    loaded = load(tmp_path / "t.npz")
    assert loaded.about == {"draft": "d"}
    for before, after in zip(traces, loaded.traces, strict=True):
        assert (after.id, after.category, after.repeated, len(after)) == (before.id, "math", 0.25, len(before))
        assert np.array_equal(after.run, before.run)
        assert np.array_equal(after.entropy_bits, before.entropy_bits)
        assert after.draft_entropy_bits == pytest.approx(before.draft_entropy_bits, abs=1e-3)


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sdsie_sglang.eval.trace.FORMAT", 99)
    save(tmp_path / "t.npz", [made_up(3, "x")], {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format"):
        load(tmp_path / "t.npz")


def test_a_cut_answer_has_nothing_right_beyond_its_end():
    trace = made_up(12, "x").cut(5)
    assert len(trace) == 5
    assert (trace.run <= np.arange(4, -1, -1)).all()


def test_the_versioned_traces_are_whole():
    traces = load(TRACES)
    assert len(traces.traces) == 27
    assert traces.about["tokens_not_argmax"] == 0
    assert TRACES.stat().st_size < 300_000
    for trace in traces.traces:
        assert np.isfinite(trace.entropy_bits).all()
        assert (trace.entropy_bits >= 0).all()
        assert (trace.run <= np.arange(len(trace) - 1, -1, -1)).all()
