"""The policy of a running server, read and changed through SGLang's own internal-state route.

That route carries names with numbers. A setting that is a number is `sdsie.k: 3`; one that is a
word carries it in its name, `sdsie.policy=entropy: 1`. A change is a whole new policy: settings
that it does not name have their defaults.
"""

import logging
from collections.abc import Callable
from typing import Any

from sdsie_sglang.config import parse_policy
from sdsie_sglang.gears import PolicySettings
from sdsie_sglang.gears.settings import unprepared
from sdsie_sglang.live import live_status
from sdsie_sglang.lossless import relaxed_thresholds
from sdsie_sglang.patches.hook import Hook, Kind

logger = logging.getLogger(__name__)

KEY = "sdsie"
PREFIX = "sdsie."


def encode_update(settings: dict[str, Any]) -> dict[str, float]:
    """Policy settings as the route carries them."""
    return {
        f"{PREFIX}{name}={value}" if isinstance(value, str) else f"{PREFIX}{name}": 1
        if isinstance(value, str)
        else value
        for name, value in settings.items()
    }


def split_update(server_args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our settings by their own names, and what is left for SGLang."""
    ours: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in server_args.items():
        if not key.startswith(PREFIX):
            rest[key] = value
            continue
        name, has_text, text = key.removeprefix(PREFIX).partition("=")
        ours[name] = text if has_text else value
    return ours, rest


def _gate_of(scheduler: Any) -> Any | None:
    return getattr(scheduler.draft_worker, "gate", None)


def report(result: Any, controller: Any, recv_req: Any) -> Any:
    """Adds what is live, and the policy in force, to the state that /server_info shows."""
    gate = _gate_of(controller.scheduler)
    result.internal_state[KEY] = {**live_status(), "gate": gate.snapshot() if gate is not None else None}
    return result


def change_policy(original: Callable[..., Any], controller: Any, recv_req: Any) -> Any:
    """Takes our settings out of the request; all of it is applied, or nothing."""
    from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput

    ours, rest = split_update(recv_req.server_args)
    if not ours:
        return original(controller, recv_req)
    gate = _gate_of(controller.scheduler)
    try:
        problem = "this server does not run the SDSIE algorithm" if gate is None else None
        settings = parse_policy(ours)
        problem = problem or gate.check(settings)  # type: ignore[union-attr]
    except (ValueError, OSError) as error:
        problem = str(error)
    if problem is not None:
        logger.warning("sdsie: policy not changed: %s", problem)
        return SetInternalStateReqOutput(updated=False)
    if rest and not original(controller, SetInternalStateReq(server_args=rest)).updated:
        return SetInternalStateReqOutput(updated=False)
    try:
        gate.change(settings)  # type: ignore[union-attr]
    except (ValueError, OSError) as error:  # a cost table that went away just now
        logger.warning("sdsie: policy not changed: %s", error)
        return SetInternalStateReqOutput(updated=False)
    return SetInternalStateReqOutput(updated=True)


async def refuse_bad_policy(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """Answers a bad change with a 400 that says why; SGLang alone would answer 200 and [false]."""
    from fastapi import HTTPException

    ours, rest = split_update(obj.server_args)
    problem = await _problem_with(manager, ours) if ours else None
    if (relaxed := relaxed_thresholds(rest)) and await _runs_gears(manager):
        problem = f"{relaxed[0]}: gears never accept what the target would not have said"
    if problem is not None:
        raise HTTPException(status_code=400, detail=f"sdsie: {problem}")
    updated = await original(manager, obj)
    if ours and not all(updated):
        raise HTTPException(status_code=400, detail="sdsie: rejected, nothing was changed; see the server's log")
    return updated


async def _runs_gears(manager: Any) -> bool:
    return any((state.get(KEY) or {}).get("gate") is not None for state in await manager.get_internal_state())


async def _problem_with(manager: Any, ours: dict[str, Any]) -> str | None:
    try:
        settings: PolicySettings = parse_policy(ours)
        for state in await manager.get_internal_state():
            gate = (state.get(KEY) or {}).get("gate")
            if gate is None:
                return "this server does not run the SDSIE algorithm"
            if problem := unprepared(settings, gate["gears"]):
                return problem
    except (ValueError, OSError) as error:
        return str(error)
    return None


_CONTROLLER = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"

REPORT = Hook(
    target=f"{_CONTROLLER}.get_internal_state",
    kind=Kind.AFTER,
    function=report,
    parameters=("self", "recv_req"),
    why="/server_info shows live hooks and policy, so that a benchmark can refuse a wrong server",
    upstream="none",
    remove_when="a speculative worker may contribute to internal_states",
)
CHANGE = Hook(
    target=f"{_CONTROLLER}.set_internal_state",
    kind=Kind.AROUND,
    function=change_policy,
    parameters=("self", "recv_req"),
    why="/set_internal_state changes the policy of a running server",
    upstream="none",
    remove_when="update handlers can be registered and take more than numbers",
)
REFUSE = Hook(
    target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.set_internal_state",
    kind=Kind.AROUND,
    function=refuse_bad_policy,
    parameters=("self", "obj"),
    why="a bad change is a 400 with a reason and changes nothing",
    upstream="none",
    remove_when="set_internal_state reports rejections",
)
