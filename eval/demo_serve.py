"""Serves the 27 prompts with one way of decoding and records token ids and verify counts.

`python -m sdsie_sglang.eval.demo_serve eagle3-chain5` writes `eval/results/demo/served-eagle3-chain5.json`.
Greedy, float32 and no prefix cache, one request at a time. `eval/demo_table.py` compares these records with
the replay.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sdsie_sglang.demo import DemoCheckpoints, DemoError, compose
from sdsie_sglang.eval import headline
from sdsie_sglang.eval.chat import chat_ids
from sdsie_sglang.eval.machine import describe, where
from sdsie_sglang.eval.prompts import timed_prompts
from sdsie_sglang.eval.record import portable
from sdsie_sglang.eval.server import Server

RESULTS = Path(__file__).resolve().with_name("results") / "demo"
TREE_TOKENS = 32


@dataclass(frozen=True)
class Method:
    """A way of decoding.

    model: what drafts ("draft", "eagle3", None); drafted: draft steps a cycle; topk: 1 is a chain; shifted:
    SGLang's own STANDALONE, which feeds the draft without the first token.
    """

    model: str | None = None
    drafted: int = 0
    topk: int = 1
    shifted: bool = False

    def checkpoints(self, models: DemoCheckpoints) -> list[str]:
        """Where its models lie, as a record names them."""
        folders = [models.target, *([getattr(models, self.model)] if self.model else [])]
        return [portable(str(folder)) for folder in folders]

    def arguments(self, models: DemoCheckpoints, dtype: str = "float32") -> list[str]:
        """The server's arguments."""
        arguments = ["--model-path", str(models.target), "--disable-radix-cache", "--dtype", dtype]
        arguments += ["--context-length", "2048", "--max-total-tokens", "8192"]
        if self.model is None:
            return [*arguments, "--sdsie-off"]
        drafter = getattr(models, self.model)
        if drafter is None:
            raise DemoError(f"the weights of {self.model} are not shipped with this checkout")
        arguments += ["--speculative-draft-model-path", str(drafter)]
        if self.model == "draft" and not self.shifted:
            return [*arguments, "--sdsie-policy", "fixed", "--sdsie-k", str(self.drafted)]
        verified = self.drafted + 1 if self.topk == 1 else TREE_TOKENS
        return [
            *arguments,
            "--sdsie-off",
            "--speculative-algorithm", "EAGLE3" if self.model == "eagle3" else "STANDALONE",
            "--speculative-num-steps", str(self.drafted),
            "--speculative-eagle-topk", str(self.topk),
            "--speculative-num-draft-tokens", str(verified),
        ]  # fmt: skip


METHODS = {
    "plain": Method(),
    **{f"draft-k{k}": Method("draft", k) for k in (3, 5, 7)},
    **{f"standalone-k{k}": Method("draft", k, shifted=True) for k in (3, 5, 7)},
    **{f"eagle3-chain{k}": Method("eagle3", k) for k in (3, 5)},
    "eagle3-tree": Method("eagle3", 5, topk=8),
}
"""`draft-k…` is this project's fixed gear; `standalone-k…` is SGLang as shipped with the same draft."""


def serve(
    name: str,
    models: DemoCheckpoints,
    new_tokens: int,
    limit: int | None = None,
    dtype: str = "float32",
    sglang: Sequence[str] = (),
) -> dict[str, Any]:
    """Answers of one method to the first `limit` timed prompts (all by default).

    sglang: further flags of the server.
    """
    method = METHODS[name]
    answers = []
    with Server.start([*method.arguments(models, dtype), *sglang]) as server:
        for prompt in tqdm(timed_prompts()[:limit], desc=name):
            ids = chat_ids(str(models.target), prompt.text)
            done = server.generate(ids, max_new_tokens=new_tokens)
            answers.append(
                {
                    "id": prompt.id,
                    "category": prompt.category,
                    "is_code": prompt.is_code,
                    "prompt_length": len(ids),
                    "tokens": ids + done["output_ids"],
                    "verify_count": done["meta_info"].get("spec_verify_ct"),
                }
            )
    return {
        "method": name,
        **asdict(method),
        "checkpoints": method.checkpoints(models),
        "dtype": dtype,
        "new_tokens": new_tokens,
        "sglang": list(sglang),
        "command": headline.this_command(),
        "date": headline.today(),
        "where": where(),
        "machine": describe(),
        "answers": answers,
    }


def write(record: dict[str, Any], folder: Path) -> Path:
    """Writes a method's record into a folder of such records."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"served-{record['method']}.json"
    path.write_text(json.dumps(record) + "\n")
    return path


def main() -> None:
    """Serve and write one record a method."""
    parser = argparse.ArgumentParser(prog="python -m sdsie_sglang.eval.demo_serve", description=__doc__)
    parser.add_argument("methods", nargs="+", choices=sorted(METHODS))
    parser.add_argument("--new-tokens", type=int, default=250)
    parser.add_argument("--limit", type=int, help="serve only the first prompts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in options.methods:
        print(write(serve(name, compose(), options.new_tokens, options.limit), options.out))


if __name__ == "__main__":
    main()
