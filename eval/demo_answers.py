"""Greedy float32 answers of the demo's target to the 27 prompts, on which drafts and heads are replayed.

`python -m sdsie_sglang.eval.demo_answers` writes `eval/results/demo/answers.json` (minutes on two cores).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from sdsie_sglang.demo import compose
from sdsie_sglang.demo.replay import repeated_share
from sdsie_sglang.eval.prompts import Prompt, timed_prompts

RECORD = Path(__file__).resolve().with_name("results") / "demo" / "answers.json"
NEW_TOKENS = 250


def answer_all(target: Path, prompts: list[Prompt], new_tokens: int) -> list[dict[str, Any]]:
    """One greedy answer per prompt, with its token ids; all prompts are decoded as one padded batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    batch = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        written = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False)
    answers = []
    for prompt, row, mask in zip(prompts, written, batch.attention_mask, strict=True):
        asked = row[: len(mask)][mask.bool()].tolist()
        answered = row[len(mask) :].tolist()
        if tokenizer.eos_token_id in answered:
            answered = answered[: answered.index(tokenizer.eos_token_id) + 1]
        answers.append(
            {
                "id": prompt.id,
                "category": prompt.category,
                "is_code": prompt.is_code,
                "prompt_length": len(asked),
                "tokens": asked + answered,
                "repeated_4gram_share": round(repeated_share(answered), 4),
                "text": tokenizer.decode(answered),
            }
        )
    return answers


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(prog="python -m sdsie_sglang.eval.demo_answers", description=__doc__)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    options = parser.parse_args()
    answers = answer_all(compose().target, timed_prompts(), options.new_tokens)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"dtype": "float32", "new_tokens": options.new_tokens, "answers": answers}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(options.out)


if __name__ == "__main__":
    main()
