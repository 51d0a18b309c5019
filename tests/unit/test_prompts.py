"""The prompt set keeps its promised composition."""

from collections import Counter

from sdsie_sglang.eval.prompts import CATEGORIES, all_prompts, timed_prompts, warmup_prompts


def test_three_prompts_in_each_of_nine_categories():
    counts = Counter(prompt.category for prompt in timed_prompts())
    assert counts == dict.fromkeys(CATEGORIES, 3)


def test_warmup_prompts_are_apart():
    assert len(warmup_prompts()) == 3
    assert not {prompt.text for prompt in warmup_prompts()} & {prompt.text for prompt in timed_prompts()}


def test_ids_and_texts_are_unique():
    for values in ([prompt.id for prompt in all_prompts()], [prompt.text for prompt in all_prompts()]):
        assert len(set(values)) == 30


def test_reference_prompts_are_the_originals():
    assert [prompt.text for prompt in timed_prompts(["reference"])] == [
        "Write an original Chant Royal poem in English celebrating mathematics.",
        "Explain the physics of semiconductor memory bandwidth and the memory wall.",
        "Write a Python implementation of a binary search tree with type annotations.",
    ]


def test_code_prompts():
    assert [prompt.id for prompt in timed_prompts() if prompt.is_code] == [
        "reference-code",
        "coding-1",
        "coding-2",
        "coding-3",
    ]
