"""Plans and configurations: what follows from them, and what is refused."""

import re
from collections import Counter

import pytest

from sdsie_sglang.eval import plan, run_plan
from sdsie_sglang.eval.methods import METHODS, MethodError, Models
from sdsie_sglang.eval.plan import Config, ConfigProblem, asks, datapoints, load_config
from sdsie_sglang.eval.prompts import warmup_prompts
from tests.unit.ruler_fakes import config

PRESETS = ("smoke", "short", "full", "batch")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_bracket_every_repetition(name):
    settings = load_config(name)
    points = datapoints(settings)
    for part, methods in settings.parts.items():
        methods = methods.methods
        for repetition in range(settings.repetitions):
            its = [p for p in points if (p.part, p.repetition) == (part, repetition)]
            assert [its[0].role, its[-1].role] == ["open", "close"]
            assert its[0].method == its[-1].method == "plain"
            assert sorted(p.method for p in its[1:-1]) == sorted(methods)
    assert len({p.path(plan.CONFIGS) for p in points}) == len(points)


@pytest.mark.parametrize("name", PRESETS)
def test_no_prompt_twice_in_a_servers_life(name):
    settings = load_config(name)
    for part in settings.parts:
        phases = range(len(settings.phases_of(part)))
        texts = Counter(ask.text for phase in phases for ask in asks(settings, part, phase, 0))
        assert set(texts.values()) == {1}
        assert not set(texts) & {prompt.text for prompt in warmup_prompts()}


def test_short_has_what_it_must_show():
    settings = load_config("short")
    one, sixteen = settings.parts["one"], settings.parts["sixteen"]
    assert {f"draft-k{k}" for k in (3, 5, 7)} <= set(one.methods)
    assert {f"entropy-{p}" for p in ("tuned", "paper", "class")} <= set(one.methods)
    assert {"eagle3-chain3", "eagle3-tree", "ngram-16", "plain"} <= set(one.methods)
    assert [phase.concurrency for phase in (*one.phases, *sixteen.phases)] == [1, 16]
    assert settings.repetitions >= 2


@pytest.mark.parametrize("part", ["one", "sixteen"])
@pytest.mark.parametrize("repetition", [0, 1])
def test_a_repetition_of_short_fits_into_its_minutes_and_its_energy_windows(part, repetition, tmp_path):
    settings = load_config("short")
    text = run_plan.plan_text(settings, datapoints(settings, [part], [repetition]), tmp_path)
    assert float(re.search(r"about ([\d.]+) minutes", text)[1]) <= 8.0
    assert "TOO SHORT" not in text


def test_the_plan_counts_what_is_left_and_says_when_energy_windows_are_too_short(tmp_path):
    settings = config(repetitions=2, tokens=10, start_ahead=2, assume={"start_s": 50, "start_cpu_s": 16, "cores": 16})
    points = datapoints(settings)
    points[0].path(tmp_path).parent.mkdir(parents=True)
    points[0].path(tmp_path).touch()
    text = run_plan.plan_text(settings, points, tmp_path)
    assert "5 of 6 servers to do" in text
    assert f"{52 + 52 + 51} s of starts, 2 side by side" in text  # 2 left of the first repetition, then 2 and 1
    assert "TOO SHORT" in text


def test_the_plan_counts_a_methods_first_start_once(tmp_path):
    assume = {"start_s": 50, "start_cpu_s": 0, "first_start_s": {"draft-k5": 100}}
    settings = config(repetitions=2, start_ahead=3, assume=assume)
    text = run_plan.plan_text(settings, datapoints(settings), tmp_path)
    assert "200 s of starts" in text  # 150 and 50
    assert "100 s more for the first draft-k5" in text


def test_servers_start_side_by_side_within_a_repetition_only():
    settings = config(repetitions=2, start_ahead=2)
    sizes = [[p.position for p in window] for window in plan.windows(settings, datapoints(settings))]
    assert sizes == [[0, 1], [2], [0, 1], [2]]
    settings = config(repetitions=2, start_ahead=12)
    assert [len(window) for window in plan.windows(settings, datapoints(settings))] == [3, 3]


def test_how_many_start_ahead_is_not_part_of_what_is_measured():
    assert config(start_ahead=5, assume={"cores": 2}).digest() == config().digest()


def test_a_part_may_have_phases_and_flags_of_its_own():
    part = {"methods": ["draft-k5"], "phases": [{"concurrency": 4, "variants": 2}], "sglang": ["--x"]}
    settings = config(parts={"own": part, "all": ["draft-k5"]})
    assert len(asks(settings, "own", 0, 0)) == 2 * len(asks(settings, "all", 0, 0))
    assert settings.phases_of("all") == settings.phases
    assert Config(**settings.model_dump()) == settings


def test_order_is_shuffled_by_the_stored_seed():
    many = {"parts": {"all": tuple(n for n in METHODS)}, "repetitions": 3}
    orders = [[p.method for p in datapoints(config(seed=s, **many))] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    third = len(orders[0]) // 3
    assert orders[0][:third] != orders[0][third : 2 * third]


def test_prompts_rotate_and_stay_the_same():
    settings = config(repetitions=2)
    first, second = (asks(settings, "all", 0, repetition) for repetition in (0, 1))
    assert first[7:] + first[:7] == second


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: x\nparts: {a: [draft-k9]}", "draft-k9"),
        ("name: x\nparts: {a: [draft-k5, draft-k5]}", "once"),
        ("name: x\nparts: {a: [draft-k5]}\ncategories: [poetry]", "poetry"),
        ("name: x\nparts: {a: [draft-k5]}\nphases: [{concurrency: 1, variants: 99}]", "99 forms"),
        ("name: x\nparts: {a: [draft-k5]}\ntokns: 3", "tokns"),
        ("name: x\nparts: {a: [draft-k5]}\nwarm_up: {min_s: 9, max_s: 3}", "below min_s"),
        ("- 1", "names and values"),
        ("{", "not YAML"),
    ],
)
def test_bad_configurations_are_refused_in_one_line(tmp_path, text, says):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigProblem, match=says) as caught:
        load_config(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "A"])
def test_a_part_names_a_folder(name):
    with pytest.raises(ValueError, match="a name has small letters"):
        config(parts={name: ("draft-k5",)})


def test_unknown_preset_names_the_presets():
    with pytest.raises(ConfigProblem, match="smoke"):
        load_config("nosuch")


def test_digest_follows_the_configuration():
    assert config().digest() == config().digest() != config(tokens=99).digest()
    assert Config(**config().model_dump()).digest() == config().digest()


# -- methods -------------------------------------------------------------------------------------

MODELS = Models("T", "D", "E3", "E1", "D2")


def test_arguments():
    def line(name):
        return " ".join(METHODS[name].arguments(MODELS))

    assert line("plain") == "--model-path T --sdsie-off"
    assert line("draft-k3") == "--model-path T --speculative-draft-model-path D --sdsie-policy fixed --sdsie-k 3"
    assert line("other-draft-k3") == line("draft-k3").replace(" D ", " D2 ")
    assert "--sdsie-policy entropy --sdsie-preset paper" in line("entropy-paper")
    tree = line("eagle3-tree")
    assert "--speculative-draft-model-path E3 --sdsie-off --speculative-algorithm EAGLE3" in tree
    assert "--speculative-eagle-topk 8 --speculative-num-draft-tokens 32" in tree
    assert "--speculative-num-draft-tokens 6" in line("eagle3-chain5")
    assert line("ngram-16") == (
        "--model-path T --sdsie-off --speculative-algorithm NGRAM --speculative-num-draft-tokens 16"
    )


def test_a_missing_checkpoint_is_named():
    with pytest.raises(MethodError, match="eagle-k5 needs a checkpoint for eagle"):
        METHODS["eagle-k5"].arguments(Models("T"))


def server_info(**changes):
    info = {"model_path": "T", "disable_radix_cache": True, "speculative_algorithm": None, "internal_states": [{}]}
    return {**info, **changes}


def ours(**policy):
    live = {"hooks": ["a"], "gate": {"policy": {"policy": "fixed", "k": 5, **policy}}}
    return server_info(
        speculative_algorithm="SDSIE", speculative_draft_model_path="D", internal_states=[{"sdsie": live}]
    )


def test_the_right_servers_are_recognised():
    assert METHODS["plain"].mismatches(server_info(), MODELS) == []
    assert METHODS["draft-k5"].mismatches(ours(), MODELS) == []
    eagle = {"speculative_num_steps": 5, "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 32,
             "speculative_draft_model_path": "E3"}  # fmt: skip
    assert METHODS["eagle3-tree"].mismatches(server_info(speculative_algorithm="EAGLE3", **eagle), MODELS) == []


@pytest.mark.parametrize(
    ("name", "info", "says"),
    [
        ("plain", ours(), "hooks of sdsie are live"),
        ("plain", server_info(speculative_algorithm="NGRAM"), "speculative_algorithm is 'NGRAM'"),
        ("plain", server_info(model_path="other"), "model_path is 'other'"),
        ("plain", server_info(disable_radix_cache=False), "disable_radix_cache is False"),
        ("draft-k5", server_info(speculative_algorithm="SDSIE"), "no hooks of sdsie are live"),
        ("draft-k5", ours(k=3), "policy's k is 3, not 5"),
        ("other-draft-k5", ours(), "speculative_draft_model_path is 'D', not 'D2'"),
        ("draft-k5", ours(policy="entropy"), "policy's policy is 'entropy'"),
        (
            "eagle3-tree",
            server_info(speculative_algorithm="EAGLE3", speculative_num_steps=5, speculative_eagle_topk=1),
            "speculative_eagle_topk is 1, not 8",
        ),
    ],
)
def test_wrong_servers_are_caught(name, info, says):
    assert any(says in problem for problem in METHODS[name].mismatches(info, MODELS))
