"""The ways of decoding that are compared, what starts each, and how a server proves that it is one of them.

Policies are fixed at a server's start, so that every method pays for its own set-up and nothing else.
"""

from dataclasses import dataclass, field
from typing import Any

from sdsie_sglang.gears.settings import PRESETS


@dataclass(frozen=True)
class Models:
    """Folders or names of checkpoints; a method whose drafter is None cannot be measured."""

    target: str
    draft: str | None = None
    eagle3: str | None = None
    eagle: str | None = None
    other_draft: str | None = None


class MethodError(ValueError):
    """A method that cannot run with these models; one line."""


@dataclass(frozen=True)
class Method:
    """One way of decoding.

    Args:
        family: methods of one family are configurations of one idea: the best of them is chosen.
        drafter: which of `Models` drafts; "ngram" needs none; None is plain decoding.
        policy: settings of this project's launcher; None serves with SGLang as shipped.
        algorithm, steps, topk, verified: SGLang's speculative flags; verified counts the root.
    """

    name: str
    family: str
    drafter: str | None = None
    policy: dict[str, Any] | None = None
    algorithm: str | None = None
    steps: int | None = None
    topk: int | None = None
    verified: int | None = None
    extra: tuple[str, ...] = field(default=())

    @property
    def speculates(self) -> bool:
        return self.drafter is not None

    @property
    def gates(self) -> bool:
        """Whether it may rightly choose not to speculate."""
        return self.policy is not None and self.policy.get("policy") == "entropy"

    def checkpoint(self, models: Models) -> str | None:
        """What drafts; None if nothing is loaded for it. Raises MethodError."""
        if self.drafter in (None, "ngram"):
            return None
        checkpoint: str | None = getattr(models, str(self.drafter))
        if checkpoint is None:
            raise MethodError(f"{self.name} needs a checkpoint for {self.drafter}, and none is given")
        return checkpoint

    def arguments(self, models: Models) -> list[str]:
        """The server's arguments. Raises MethodError."""
        arguments = ["--model-path", models.target]
        checkpoint = self.checkpoint(models)
        if checkpoint is not None:
            arguments += ["--speculative-draft-model-path", checkpoint]
        if self.policy is not None:
            for name, value in self.policy.items():
                arguments += [f"--sdsie-{name.replace('_', '-')}", str(value)]
            return [*arguments, *self.extra]
        arguments.append("--sdsie-off")
        if self.algorithm is not None:
            arguments += ["--speculative-algorithm", self.algorithm]
        for flag, value in (("num-steps", self.steps), ("eagle-topk", self.topk), ("num-draft-tokens", self.verified)):
            if value is not None:
                arguments += [f"--speculative-{flag}", str(value)]
        return [*arguments, *self.extra]

    def mismatches(self, info: dict[str, Any], models: Models) -> list[str]:
        """What /server_info says that this method should not be; empty if it is the right server."""
        live = info["internal_states"][0].get("sdsie")
        wanted: dict[str, Any] = {
            "model_path": models.target,
            "disable_radix_cache": True,
            "speculative_draft_model_path": self.checkpoint(models),
            "speculative_algorithm": "SDSIE" if self.policy is not None else self.algorithm,
        }
        if self.policy is None:
            if live:
                return ["hooks of sdsie are live in a server that should be SGLang as shipped"]
            for name, value in (
                ("speculative_num_steps", self.steps),
                ("speculative_eagle_topk", self.topk),
                ("speculative_num_draft_tokens", self.verified),
            ):
                if value is not None:
                    wanted[name] = value
        found = [
            f"{name} is {info.get(name)!r}, not {value!r}" for name, value in wanted.items() if info.get(name) != value
        ]
        return found + (self._policy_mismatches(live) if self.policy is not None else [])

    def _policy_mismatches(self, live: dict[str, Any] | None) -> list[str]:
        if not live or not live.get("hooks") or not live.get("gate"):
            return ["no hooks of sdsie are live"]
        running = live["gate"]["policy"]
        return [
            f"policy's {name} is {running.get(name)!r}, not {value!r}"
            for name, value in (self.policy or {}).items()
            if running.get(name) != value
        ]


def _draft(k: int, which: str = "draft") -> Method:
    family = which.replace("_", "-")
    return Method(f"{family}-k{k}", family, which, policy={"policy": "fixed", "k": k})


def _standalone(k: int) -> Method:
    return Method(f"standalone-k{k}", "standalone", "draft", None, "STANDALONE", k, 1, k + 1)


def _entropy(preset: str) -> Method:
    return Method(f"entropy-{preset}", "entropy", "draft", policy={"policy": "entropy", "preset": preset})


def _chain(k: int) -> Method:
    return Method(f"eagle3-chain{k}", "eagle3", "eagle3", None, "EAGLE3", k, 1, k + 1)


PLAIN = Method("plain", "plain")
METHODS = {
    method.name: method
    for method in (
        PLAIN,
        *(_draft(k) for k in (3, 5, 7)),
        *(_draft(k, "other_draft") for k in (3, 5, 7)),
        *(_standalone(k) for k in (3, 5, 7)),
        *(_entropy(preset) for preset in PRESETS),
        *(_chain(k) for k in (3, 5)),
        Method("eagle3-tree", "eagle3", "eagle3", None, "EAGLE3", 5, 8, 32),
        Method("eagle-k5", "eagle", "eagle", None, "EAGLE", 5, 1, 6),
        Method("ngram-16", "ngram", "ngram", None, "NGRAM", verified=16),
    )
}
"""`draft-k…` and `entropy-…` are this project's gears; `standalone-k…` is SGLang's own use of the same draft;
`other-draft-k…` are the gears with a second draft, to compare two."""
