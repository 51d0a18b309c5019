"""The Resolution Gear's study: rows decode as if alone, gates keep the lag, the sentence follows the figures."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from sdsie_sglang.demo.llama import Llama
from sdsie_sglang.eval import resolution_fidelity as study
from sdsie_sglang.eval.intervals import Estimate
from sdsie_sglang.eval.resolution_decode import Gates, Low, force, generate, generate_recomputing, padded, read
from sdsie_sglang.eval.resolution_fidelity import compare, cut, settings_of
from sdsie_sglang.eval.resolution_record import Part, Row, Setting
from sdsie_sglang.eval.resolution_report import (
    Figures,
    answer,
    layers_within,
    open_question,
    relative_kl,
    safe_layers,
)
from sdsie_sglang.gears import PolicySettings

PROMPTS = [[5, 9, 11], [7, 3, 2, 8, 4]]
NEW = 6
ALWAYS = PolicySettings(policy="fixed")


@pytest.fixture(scope="module")
def model():
    generator = torch.Generator().manual_seed(1)
    model = Llama(2)
    model.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.06)
    model.embedding = torch.randn(model.embedding.shape, generator=generator) * 0.1
    return model


def start(model):
    tokens, lengths = padded(PROMPTS, torch.device("cpu"))
    logits, cache = read(model, tokens, lengths)
    return logits.argmax(-1), cache


def low_of(model, noise, layers):
    """Rows: the control, then one setting with these layers."""
    generator = torch.Generator().manual_seed(2)
    weights = [b.down + noise * torch.randn(b.down.shape, generator=generator) for b in model.blocks]
    mask = torch.zeros(2 * len(PROMPTS), len(model.blocks), dtype=torch.bool)
    mask[len(PROMPTS) :, list(layers)] = True
    return Low(weights, mask)


def gates(policy=ALWAYS, lag=1, **more):
    return Gates([None] * len(PROMPTS) + [policy] * len(PROMPTS), lag, **more)


def test_a_cached_step_says_what_reading_everything_says(model):
    first, cache = start(model)
    low = low_of(model, 0.0, [])
    cached = generate(model, cache, first, low, gates(), NEW)
    whole = generate_recomputing(model, PROMPTS * 2, low, gates(), NEW)
    assert cached.tokens.tolist() == whole.tokens.tolist()
    alone = read(model, *padded(PROMPTS[:1], torch.device("cpu")))[0].argmax(-1)
    assert alone == cached.tokens[0, 0], "padding of a shorter prompt is not read"


def test_equal_weights_change_nothing_and_others_do_where_they_are_gated(model):
    first, cache = start(model)
    answers = torch.from_numpy(generate(model, cache, first, low_of(model, 0.0, []), gates(), NEW).tokens[:2])
    lengths = torch.tensor([NEW, NEW - 2])
    same = force(model, cache, answers, lengths, low_of(model, 0.0, [0, 1]), gates())
    assert same.kl == pytest.approx(np.zeros(4), abs=1e-6)
    assert same.top1.tolist() == [1.0] * 4
    assert same.nll[2:] == pytest.approx(same.nll[:2])
    for layers in ([0], [1], [0, 1]):
        other = force(model, cache, answers, lengths, low_of(model, 0.05, layers), gates())
        assert other.kl[:2] == pytest.approx(np.zeros(2), abs=1e-6)
        assert (other.kl[2:] > 1e-4).all()
    never = force(model, cache, answers, lengths, low_of(model, 0.05, [0, 1]), gates(PolicySettings(policy="plain")))
    assert never.kl == pytest.approx(np.zeros(4), abs=1e-6)


def test_forced_figures_are_those_of_the_definition(model):
    first, cache = start(model)
    answers = torch.from_numpy(generate(model, cache, first, low_of(model, 0.0, []), gates(), NEW).tokens[:2])
    found = force(model, cache, answers, torch.tensor([NEW, NEW]), low_of(model, 0.0, []), gates())
    text = [*PROMPTS[0], *answers[0].tolist()]
    nll = []
    for end in range(len(PROMPTS[0]) + 1, len(text)):
        logits, _ = read(model, *padded([text[:end]], torch.device("cpu")))
        nll.append(-float(logits[0].log_softmax(-1)[text[end]]))
    assert found.nll[0] == pytest.approx(np.mean(nll), rel=1e-4)


def test_the_gate_hears_of_a_step_a_lag_later():
    clutch = PolicySettings.model_validate({"policy": "entropy", "preset": "tuned", "alpha": 1.0})
    for lag in (1, 2):
        watched = Gates([clutch, None], lag)
        decided = []
        for bits in (5.0, 5.0, 0.0, 0.0, 5.0):
            decided.append(watched.step().tolist())
            watched.saw(torch.tensor([bits, bits]))
        on = [row[0] for row in decided]
        assert on == ([True, False, False, True, True] if lag == 1 else [True, True, False, False, True])
        assert not any(row[1] for row in decided), "the control never engages"


def test_the_original_begins_in_full_precision():
    watched = Gates([ALWAYS], 1, waits=True)
    assert not watched.step()[0]
    watched.saw(torch.tensor([0.0]))
    assert watched.step()[0]


def test_settings_are_every_place_and_all_layers_once():
    made = settings_of([1, 2, 40], 30, ["always", "class"], ["first", "spread"])
    assert len(made) == len(set(made)) == 2 * (2 * 2 + 1)
    assert [s.layers(30) for s in made if s.place == "all"] == [tuple(range(30))] * 2
    assert Setting(place="spread", count=2, gate="always").layers(30) == (7, 22)


def test_match_is_counted_as_the_original_did():
    assert compare([1, 2, 3, 4], [1, 9, 3, 4]) == (0.75, 1)
    assert compare([1, 2, 3], [1, 2]) == (1.0, 2)
    assert compare([1, 2], [1, 2]) == (1.0, -1)
    assert cut(np.array([4, 2, 5, 2])) == [4, 2]


def setting_figures(count, place, kl, match=0.9, gate="always"):
    return Figures(
        setting=Setting(place=place, count=count, gate=gate),
        match=Estimate(value=match),
        reference=[match],
        identical=0.5,
        first=3.0,
        int4_share=1.0,
        kl_nats=Estimate(value=kl / 2, low=0.0, high=kl),
        top1=Estimate(value=0.99, low=0.985, high=1.0),
        perplexity=None,
    )


def test_safe_is_up_to_the_first_count_that_is_not_at_every_place():
    found = [
        setting_figures(1, "first", 0.001),
        setting_figures(1, "last", 0.002),
        setting_figures(2, "first", 0.003),
        setting_figures(2, "last", 0.5),
        setting_figures(4, "first", 0.004),
        setting_figures(30, "all", 0.001),
    ]
    assert safe_layers(found, "always") == 1
    assert safe_layers(found[:3], "always") == 2
    assert safe_layers(found[3:], "always") == 0


def test_the_sentence_follows_the_figures():
    coarse = [setting_figures(1, "first", 0.001), setting_figures(30, "all", 0.4, match=0.1)]
    fine = [setting_figures(1, "first", 0.001), setting_figures(30, "all", 0.002)]
    original = [setting_figures(1, "first", 0.1, 0.8, "class"), setting_figures(2, "first", 0.1, 0.3, "class")]
    said = answer({"channel": coarse, "g64": coarse, "g32": fine, "awq": fine}, original, 30)
    assert "80 % at 1, 30 % at 2 gated layers" in said
    assert "The largest step here is 50 points, from 1 to 2 layers." in said
    assert "match is 10 %, yet KL is 0.2000 (0.0000 to 0.4000) nats" in said
    assert "under gate `always` from 1 of 30 layers with channel to 30 with g32 and awq, 1 with g64." in said
    no = "No calibration tried widens the safe range: `always`, where at most 1 of 30 layers are safe"
    assert no in answer({"channel": coarse, "g32": coarse}, None, 30)
    worse = [setting_figures(1, "first", 0.5), setting_figures(30, "all", 0.6)]
    assert "where none is safe with any calibration." in answer({"channel": worse, "g32": worse}, None, 30)


def test_each_gate_is_judged_by_itself():
    def under(gate, kl):
        return [setting_figures(1, "first", kl, gate=gate), setting_figures(30, "all", 0.5, gate=gate)]

    summary = {
        "channel": under("always", 0.5) + under("tuned", 0.5),
        "g32": under("always", 0.5) + under("tuned", 0.001),
    }
    said = open_question(summary, 30)
    assert "under gate `tuned` from 0 of 30 layers with channel to 1 with g32" in said
    assert "it does not under gate `always`, where none is safe" in said


def row(count, kl, place="first"):
    return Row(
        setting=Setting(place=place, count=count, gate="always"),
        match=[1.0] * len(kl),
        first=[-1] * len(kl),
        int4_share=[1.0] * len(kl),
        kl_nats=kl,
    )


def test_layers_within_a_limit_are_read_between_the_counts():
    rows = [row(2, [0.006, 0.002]), row(8, [0.06, 0.02]), row(30, [0.5, 0.5], "all")]
    found = layers_within(rows, 0.0126491)  # KL of 0.004 and 0.04: half way in logarithms
    assert found.value == pytest.approx(4.0, rel=1e-4)
    assert found.low < 3.5
    assert found.high > 4.5
    assert layers_within(rows, 0.001).value == 0.0
    assert layers_within(rows, 1.0).value == pytest.approx(30.0)
    falling = [row(1, [0.02, 0.02]), row(2, [0.005, 0.005])]
    assert layers_within(falling, 0.01).value == 0.0, "nothing is within where one layer is not"


def test_relative_kl_is_paired_by_prompt():
    under = row(1, [0.1, 0.01, 0.2])
    found = relative_kl(row(1, [0.05, 0.005, 0.1]), under)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_part_that_is_there_is_not_measured_again(tmp_path, monkeypatch):
    measured = []

    class FakeStudy:
        total, ids = 30, ["reference-poem"]

        def __init__(self, options):
            self.options = options

        def digest(self, calibration, settings, recomputing):
            return f"{calibration}{self.options.tokens}"

        def part(self, calibration, settings, *, recomputing):
            measured.append(calibration)
            rows = [Row(setting=s, match=[1.0], first=[-1], int4_share=[1.0]) for s in settings]
            return Part(
                digest=self.digest(calibration, settings, recomputing), calibration=calibration, prompts=self.ids,
                recomputing=recomputing, new_tokens=2, layers=30, lag=2, dtype="float32", control_nll=[0.1], rows=rows,
                wall_s=0.0, machine={"gpus": [], "cores": 1, "cpu": "x"}, command="c", date="d",
            )  # fmt: skip

    monkeypatch.setattr(study, "Study", FakeStudy)
    arguments = ["--out", str(tmp_path), "--calibrations", "channel", "g64", "--no-original", "--tokens"]
    for tokens, more in (("2", ["channel", "g64"]), ("2", []), ("3", ["channel", "g64"])):
        measured.clear()
        assert study.main([*arguments, tokens]) == 0
        assert measured == more
    measured.clear()
    monkeypatch.setattr(study, "Study", None)
    (tmp_path / "fidelity.md").unlink()
    assert study.main(["--out", str(tmp_path), "--summarise"]) == 0
    assert measured == []
    page = (tmp_path / "fidelity.md").read_text()
    assert page.startswith("# The Resolution Gear's fidelity")
    assert page.count("<details>") == 2
    assert (tmp_path / "fidelity.png").stat().st_size > 1000


def test_nothing_to_summarise_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        study.main(["--out", str(tmp_path), "--summarise"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith("holds no calibration's record to summarise")


def test_it_needs_neither_sglang_nor_a_tokenizer():
    program = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('sglang', 'transformers', 'yaml', 'gguf', 'requests'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import sdsie_sglang.eval.resolution_fidelity, sdsie_sglang.eval.resolution_figure\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_warm_up_prompts_are_those_of_every_measurement():
    from sdsie_sglang.demo import compose
    from sdsie_sglang.eval.chat import chat_ids
    from sdsie_sglang.eval.prompts import warmup_prompts

    target = str(compose().target)
    ids = {prompt.id: chat_ids(target, prompt.text) for prompt in warmup_prompts()}
    assert json.loads(study.WARMUP_IDS.read_text()) == ids
