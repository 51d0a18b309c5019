"""What this project keeps for one request, attached to SGLang's own request object.

It is born at prefill and goes when the request goes: finish, abort and retraction need no list of
ours to be cleaned.
"""

from dataclasses import dataclass, field
from typing import Any

from sdsie_sglang.gears import Policy, RequestGate
from sdsie_sglang.telemetry.request_stats import RequestStats

_ATTRIBUTE = "sdsie_state"


@dataclass(slots=True)
class RequestState:
    """Args:
    gate: the policy's state for this request.
    policy: the policy that made `gate`; another one in force means a new gate.
    covered: leading tokens whose draft KV was valid when prefill began.
    missed: trailing tokens, the pending one included, that the draft has not seen. Exact on the
        host, also with overlap scheduling: a gear-0 cycle adds one, a K-cycle leaves at most two.
    engaged: whether a K-cycle has run since, after which the host learns the length a cycle late.
    prefilled: prompt tokens that the target has seen so far; tells a next chunk from a new start.
    retractions: how often SGLang had taken the request's KV away when the gate was made.
    plain_only: its sampling depends on every token before, which SGLang tells a speculative batch a
        cycle late or not at all: penalties, min_new_tokens and custom logit processors.
    """

    gate: RequestGate
    policy: Policy
    covered: int = 0
    missed: int = 0
    engaged: bool = False
    prefilled: int = 0
    retractions: int = 0
    plain_only: bool = False
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def seq_len(self) -> int | None:
        """Tokens in the target's KV, where the host knows it without waiting for the device."""
        return None if self.engaged else self.covered + self.missed - 1


def state_of(req: Any) -> RequestState:
    """The state of a request that has been prefilled."""
    return getattr(req, _ATTRIBUTE)


def find_state(req: Any) -> RequestState | None:
    return getattr(req, _ATTRIBUTE, None)


def needs_plain(req: Any) -> bool:
    """Whether SGLang's request asks for something that only one token a pass does exactly.

    A custom logit processor may look at all tokens before, and SGLang's verify leaves it out in silence.
    """
    sampling = req.sampling_params
    return (
        sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
        or sampling.repetition_penalty != 1.0
        or sampling.min_new_tokens > 0
        or req.custom_logit_processor is not None
    )


def attach(req: Any, state: RequestState) -> None:
    setattr(req, _ATTRIBUTE, state)
