"""Writes the demo's table of draft depths: the shipped draft and one of other depth that was trained as long.

`python -m sdsie_sglang.eval.demo_depth` reads what training wrote (`weights/training.json`, `eval/results/demo/depth`)
and writes its section of `sdsie_sglang/demo/README.md`.
"""

import json
from dataclasses import dataclass
from typing import Any, Self

from sdsie_sglang.demo.checkpoints import WEIGHTS
from sdsie_sglang.eval.compare import PhaseSummary
from sdsie_sglang.eval.demo_table import PAGE, RESULTS, markdown, served_on_a_gpu, write_section

RECORDS = RESULTS / "depth"
FAMILIES = ("draft", "other-draft")
HOST_MS = 1.4
"""Assumed host time of a cycle."""
BEGIN, END = "<!-- written by demo_depth -->", "<!-- end of what demo_depth writes -->"
SECTION = """\
## Depth of the draft

The shipped draft has {shipped_layers} layers. One of {other_layers} was trained since on the same corpus for the
same time, to see whether fewer layers are faster; other work shared its GPU for a part of that time, so it made
fewer steps than it would have alone. Accept lengths are by replay at K = 5, on held-out answers and on the prompts. A
step is a CUDA graph's replay on one H200 at batch 1, a cycle one step of the target and five of the draft. Both runs
measured the target's step, so both drafts are set against both.

{depth}

{other_layers} layers win by {lead} on held-out answers by replayed step times alone, and by {lead_served} if a cycle
also has {host_ms} ms of host time, which is assumed here. Served side by side on one H200 (`eval/README.md`, "Two
drafts"; the table above), {other_layers} layers make so many times the tokens/s of {shipped_layers}: {served}.
On the prompts that did not choose the best K, {best}, so {verdict}. Records:
`weights/training.json`, `eval/results/demo/depth` and `eval/results/ruler/short`.
"""


@dataclass(frozen=True)
class Depth:
    """A finished draft: accept lengths at K = 5 by text, training steps, ms of a step of its own and the target's."""

    layers: int
    steps: int
    accept_lengths: dict[str, float]
    draft_ms: float
    target_ms: float

    @classmethod
    def of(cls, draft: dict[str, Any], curve: dict[str, Any]) -> Self:
        """From `draft.json` and the curve that training wrote."""
        trial = draft["trials"][draft["chosen"]]
        lengths = {text: draft["final"][text]["all"]["5"] for text in ("held out", "prompts")}
        return cls(len(trial["layers"]), curve["step"], lengths, trial["draft_step_ms"], trial["target_step_ms"])

    def tokens_per_ms(self, target_ms: float, host_ms: float = 0.0) -> float:
        """At K = 5 on held-out answers."""
        return self.accept_lengths["held out"] / (target_ms + 5 * self.draft_ms + host_ms)


def depths() -> tuple[Depth, Depth]:
    """The shipped draft and the one that is compared with it."""
    training = json.loads((WEIGHTS / "training.json").read_text())
    shipped = Depth.of(training["draft"], training["curves"][training["draft"]["chosen"]])
    draft, curve = (json.loads((RECORDS / name).read_text()) for name in ("draft4.json", "draft4.curve.json"))
    return shipped, Depth.of(draft, curve)


def served(phase: PhaseSummary) -> str:
    """The other draft's speed over the shipped one's at each K, in words."""
    speeds = {method.method: 1 + method.change.speed.value for method in phase.methods if method.change is not None}
    others = [name for name in speeds if name.startswith("other-draft-k")]
    return ", ".join(
        f"{speeds[name] / speeds[name.removeprefix('other-')]:.2f} at K = {name.removeprefix('other-draft-k')}"
        for name in others
    )


def verdict(phase: PhaseSummary) -> tuple[str, str]:
    """Best K against best K, and what follows from it."""
    pair = next(h for h in phase.head_to_head if {h.over.split("-k")[0], h.under.split("-k")[0]} == set(FAMILIES))
    low, value, high = (
        1 + (x or 0.0) for x in (pair.change.speed.low, pair.change.speed.value, pair.change.speed.high)
    )
    sign = 1 if pair.over.startswith("other") else -1
    low, value, high = sorted(x**sign for x in (low, value, high))
    said = f"the best of the other over the best of the shipped draft is {value:.2f} ({low:.2f} to {high:.2f})"
    return (
        said,
        "it should be replaced" if low > 1 else "it stays" if high < 1 else "none is shown to be faster and it stays",
    )


def section(shipped: Depth, other: Depth, phase: PhaseSummary) -> str:
    """The section of the page."""
    best, follows = verdict(phase)
    times = sorted({shipped.target_ms, other.target_ms})
    head = ["layers", "steps", "held out", "prompts", "ms a draft step"]
    head += [f"tokens/ms, target {ms:.2f} ms" for ms in times]
    rows = [
        [
            str(d.layers), f"{d.steps:,}", *(f"{d.accept_lengths[text]:.2f}" for text in ("held out", "prompts")),
            f"{d.draft_ms:.3f}", *(f"{d.tokens_per_ms(ms):.3f}" for ms in times),
        ]
        for d in (other, shipped)
    ]  # fmt: skip

    def lead(host_ms: float) -> str:
        shares = [100 * (other.tokens_per_ms(ms, host_ms) / shipped.tokens_per_ms(ms, host_ms) - 1) for ms in times]
        return " to ".join(dict.fromkeys(f"{share:.0f}" for share in sorted(shares))) + " %"

    return SECTION.format(
        shipped_layers=shipped.layers,
        other_layers=other.layers,
        depth=markdown(head, rows),
        lead=lead(0.0),
        lead_served=lead(HOST_MS),
        host_ms=HOST_MS,
        served=served(phase),
        best=best,
        verdict=follows,
    )


def main() -> None:
    """Write the section."""
    text = section(*depths(), served_on_a_gpu()[2])
    write_section(PAGE, text, BEGIN, END)
    print(text)


if __name__ == "__main__":
    main()
