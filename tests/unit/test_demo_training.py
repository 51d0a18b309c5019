"""Parts of the demo's training against plainer forms of the same thing."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sdsie_sglang.demo.digest import sha256_of
from sdsie_sglang.demo.llama import HIDDEN, Llama

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "train_demo_models"))

from corpus import build, repeated_share
from features import Batch
from loss import DistillationLoss
from main import generate, recorded
from sampler import Conversations, KeyValueCache, decode
from seeds import CATEGORIES, Seed, make_seeds
from ship import ship_draft
from training import Plan, answer_places, save_shards


@pytest.fixture(scope="module")
def llama() -> Llama:
    generator = torch.Generator().manual_seed(1)
    model = Llama(2)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.04 * noise if parameter.dim() == 2 else 1 + 0.1 * noise
    model.embedding = torch.randn(200, HIDDEN, generator=generator)
    return model


def test_decoding_slot_by_slot_equals_a_whole_pass(llama: Llama):
    tokens = torch.randint(200, (3, 10), generator=torch.Generator().manual_seed(2))
    cache = KeyValueCache(2, 3, 16, torch.device("cpu"), torch.float32)
    delays = torch.tensor([0, 1, 3])  # each slot is at a place of its own
    with torch.no_grad():
        whole, _ = llama(tokens)
        for step in range(10):
            places = (step - delays).clamp(min=0)
            stepped = decode(llama, tokens.gather(1, places[:, None])[:, 0], places, cache)
            wanted = whole[torch.arange(3), places]
            torch.testing.assert_close(stepped, wanted, rtol=1e-4, atol=1e-4)


def test_loss_and_gradient_equal_autograd():
    generator = torch.Generator().manual_seed(3)
    embedding = 0.3 * torch.randn(50, 8, generator=generator)
    teacher = torch.randn(6, 8, generator=generator)
    hidden = torch.randn(2, 6, 8, generator=generator, requires_grad=True)
    weights = torch.tensor([1.0, 0.5])
    loss, losses, _ = DistillationLoss.apply(hidden, teacher, embedding, weights)
    loss.backward()
    fresh = hidden.detach().clone().requires_grad_()
    student_log = F.log_softmax(fresh @ embedding.T, -1)
    teacher_log = F.log_softmax(teacher @ embedding.T, -1).expand_as(student_log)
    wanted = F.kl_div(student_log, teacher_log, reduction="none", log_target=True).sum(-1).mean(-1)
    (wanted * weights).sum().backward()
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad, fresh.grad, rtol=1e-4, atol=1e-6)


def test_places_lie_inside_answers():
    batch = Batch(torch.zeros(2, 9), torch.zeros(2, 9), np.array([9, 5]), np.array([4, 4]), np.array([0, 1]))
    rows, places = answer_places(batch, 40, np.random.default_rng(0))
    assert set(zip(rows.tolist(), places.tolist(), strict=True)) == {(0, 4), (0, 5), (0, 6), (0, 7)}


def conversation(user: list[int], answer: list[int]) -> list[int]:
    """A row: two tokens of frame, the user's words, end of turn, one token of frame, the answer."""
    return [90, 91, *user, 2, 92, *answer]


def test_corpus_drops_loops_duplicates_and_evaluation_prompts():
    answer = list(range(100, 130))
    users = {
        "kept": [5, 6, 7, 8],
        "loop": [9, 10, 11],
        "evaluation": [40, 41, 42],
        "short": [12, 13, 14],
    }
    rows = [
        conversation(users["kept"], answer),
        conversation(users["kept"], answer),
        conversation(users["loop"], [7] * 30),
        conversation(users["evaluation"], answer),
        conversation(users["short"], answer[:5]),
    ]
    width = max(map(len, rows))
    conversations = Conversations(
        torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32),
        torch.tensor([len(row) for row in rows]),
        torch.tensor([row.index(92) + 1 for row in rows]),
        torch.zeros(len(rows), dtype=torch.long),
    )
    seeds = [Seed("coding", "", 0.8, 0.0)]
    corpus, counts = build(conversations, seeds, user_start=2, between=1, evaluation=[users["evaluation"]])
    assert counts == {"kept": 1, "duplicate": 1, "loop": 1, "evaluation prompt": 1, "short answer": 1}
    assert corpus.tokens.tolist() == rows[0]
    assert corpus.answer_starts.tolist() == [8]
    assert corpus.greedy.tolist() == [True]
    assert CATEGORIES[corpus.categories[0]] == "coding"


def test_repeated_share_counts_4grams():
    assert repeated_share(np.arange(10, dtype=np.uint16)) == 0
    assert repeated_share(np.array([60000] * 10, dtype=np.uint16)) == pytest.approx(6 / 7)


def test_seeds_cover_every_category_in_a_fixed_order():
    seeds = make_seeds(400, 1)
    assert seeds == make_seeds(400, 1)
    assert {seed.category for seed in seeds} == set(CATEGORIES)
    assert not any("{t}" in seed.opening for seed in seeds)


def test_learning_rate_rises_holds_and_falls_to_zero():
    plan = Plan(seconds=100, learning_rate=1.0, warmup_steps=10, decay=0.4)
    rates = [plan.rate(step, seconds) for step, seconds in ((0, 0), (50, 30), (90, 80), (99, 100))]
    assert rates == pytest.approx([0.1, 1.0, 0.5, 0.0])


def test_shards_stay_small_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from safetensors.torch import load_file

    monkeypatch.setattr("training.SHARD_BYTES", 100)
    weights = {f"w{n}": torch.full((20,), float(n)) for n in range(5)}  # 40 bytes each in bfloat16
    paths = save_shards(weights, tmp_path, "draft")
    assert [path.name for path in paths] == [f"draft-{n}.safetensors" for n in (1, 2, 3)]
    merged = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert {name: float(tensor[0]) for name, tensor in merged.items()} == {f"w{n}": float(n) for n in range(5)}


def test_every_run_of_a_stage_is_noted_however_it_ends(tmp_path: Path):
    options = argparse.Namespace(stage="draft", run=tmp_path, seconds=5.0)
    with recorded(options):
        pass
    with pytest.raises(KeyboardInterrupt), recorded(options):
        raise KeyboardInterrupt
    runs = json.loads((tmp_path / "draft.runs.json").read_text())
    assert [run["finished"] for run in runs] == [True, False]
    assert runs[0]["options"] == {"stage": "draft", "run": tmp_path.name, "seconds": 5.0}
    assert runs[0]["machine"]["packages"]["torch"]
    assert runs[0]["total_seconds"] >= 0


def test_a_finished_corpus_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "corpus.json").write_text("{}")
    generate(argparse.Namespace(run=tmp_path))  # with a target it would fail: there is none
    assert "finished corpus" in capsys.readouterr().out
    assert (tmp_path / "corpus.json").read_text() == "{}"


def test_a_draft_ships_alone_with_its_manifest(tmp_path: Path):
    run, folder = tmp_path / "run", tmp_path / "out" / "weights"
    run.mkdir()
    trials = {"draft4": {"layers": [0, 1, 28, 29]}, "draft2": {"layers": [0, 29]}}
    (run / "draft.json").write_text(json.dumps({"chosen": "draft4", "trials": trials}))
    for name in ("draft4-1", "draft4-2", "draft2-1"):
        (run / f"{name}.safetensors").write_text(name)
    ship_draft(run, folder)
    draft = json.loads((folder / "manifest.json").read_text())["draft"]
    assert draft["layers"] == 4
    assert draft["files"] == {f"draft-{n}.safetensors": sha256_of(run / f"draft4-{n}.safetensors") for n in (1, 2)}
    assert sorted(path.name for path in folder.iterdir()) == [*draft["files"], "manifest.json"]
