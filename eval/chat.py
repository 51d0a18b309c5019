"""Prompts as token ids, through the target's own chat template: the same ids for every method."""

from functools import cache
from typing import Any


@cache
def _tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def chat_ids(model_path: str, *turns: str) -> list[int]:
    """Ids of a conversation (user, assistant, user, ...) that the assistant is to answer next."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    encoded = _tokenizer(model_path).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    return list(encoded["input_ids"])


def decode(model_path: str, ids: list[int]) -> str:
    return str(_tokenizer(model_path).decode(ids))
