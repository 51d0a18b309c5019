"""Faults of EAGLE checkpoints that do not stop a server but ruin what it measures. Named before anything runs.

* Public EAGLE-1 heads say `"architectures": ["LlamaForCausalLM"]`. SGLang then loads the head as a one-layer Llama
  that never sees the target's hidden states, and accepts about 1.0 tokens a cycle. SGLang wants
  `LlamaForCausalLMEagle` (README of lmzheng/sglang-EAGLE-LLaMA3-Instruct-8B).
* EAGLE-3 heads for Llama-3.1-Instruct were trained with a system prompt; without one they accept less
  (sglang pull requests 4247 and 4716).
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sdsie_sglang.eval.methods import METHODS, Models

# Heads whose authors name a system prompt as part of their training format.
NEED_SYSTEM_PROMPT = re.compile(r"eagle3-llama-?3\.[13]-instruct", re.IGNORECASE)


def architecture_problem(config: dict[str, Any], algorithm: str) -> str | None:
    """Why a head's config.json is not one that SGLang drafts with under EAGLE or EAGLE3, or None."""
    ending = {"EAGLE": "Eagle", "EAGLE3": "Eagle3"}[algorithm]
    names = config.get("architectures") or []
    if any(name.lower().endswith(ending.lower()) for name in names):
        return None
    wanted = f"{names[0]}{ending}" if names else f"LlamaForCausalLM{ending}"
    return (
        f"architectures says {', '.join(names) or 'nothing'}: SGLang would not draft with it as a head of {algorithm}; "
        f"write {wanted} into a copy of its config.json"
    )


def system_prompt_problem(head: str, prompt_text: str) -> str | None:
    """Why an EAGLE-3 head would accept less than it can with prompts like this one, or None.

    Args:
        head: the checkpoint's name or folder.
        prompt_text: a whole prompt as the chat template renders it.
    """
    if not NEED_SYSTEM_PROMPT.search(head) or _has_system_text(prompt_text):
        return None
    return f"{Path(head).name} was trained with a system prompt, and the prompts have none"


def _has_system_text(prompt_text: str) -> bool:
    """Whether the system turn says more than the dates that Llama's template writes by itself."""
    found = re.search(r"system(?:<\|end_header_id\|>)?\s*(.*?)(?:<\|eot_id\|>|<\|im_end\|>|$)", prompt_text, re.DOTALL)
    if found is None:
        return False
    own = re.sub(r"(Cutting Knowledge Date|Today Date):[^\n]*\n?", "", found[1])
    return bool(own.strip())


def checkpoint_problems(models: Models, methods: Iterable[str]) -> list[str]:
    """One line for each head that SGLang would load as something else. Reads folders; names are left to SGLang."""
    problems = []
    for name in sorted(methods):
        method = METHODS[name]
        if method.algorithm not in ("EAGLE", "EAGLE3"):
            continue
        head = getattr(models, str(method.drafter))
        config = Path(head) / "config.json"
        if config.is_file():
            problem = architecture_problem(json.loads(config.read_text()), method.algorithm)
            if problem is not None:
                problems.append(f"{name}: {head}: {problem}")
    return problems


def prompt_problems(models: Models, method: str, prompt_text: str) -> list[str]:
    """What a record must say of how this method's head is asked."""
    if METHODS[method].algorithm != "EAGLE3":
        return []
    problem = system_prompt_problem(str(models.eagle3), prompt_text)
    return [problem] if problem else []
