"""The policy of a running server, read and changed through SGLang's own internal-state route."""

from collections.abc import Callable
from typing import Any

from sdsie_sglang.config import ConfigError, parse_policy
from sdsie_sglang.gears import PolicySettings
from sdsie_sglang.patches.hook import Hook, Kind

KEY = "sdsie"


def _gate_of(scheduler: Any) -> Any | None:
    return getattr(scheduler.draft_worker, "gate", None)


def report(result: Any, controller: Any, recv_req: Any) -> Any:
    """Adds what is live, and the policy in force, to the state that /server_info shows."""
    from sdsie_sglang.plugin import live_status

    gate = _gate_of(controller.scheduler)
    result.internal_state[KEY] = {**live_status(), "gate": gate.snapshot() if gate is not None else None}
    return result


class PolicyUpdate:
    """SGLang's two-step update handler: validate everything first, then apply."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def validate(self, key: str, value: Any) -> None:
        from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

        gate = _gate_of(self._scheduler)
        if gate is None:
            raise UpdateRejected("this server does not run the SDSIE algorithm")
        try:
            problem = gate.check(parse_policy(value))
        except ConfigError as error:
            problem = str(error)
        if problem is not None:
            raise UpdateRejected(f"sdsie: {problem}")

    def apply(self, key: str, value: Any) -> None:
        _gate_of(self._scheduler).change(parse_policy(value))  # type: ignore[union-attr]


def add_handler(result: dict[str, Any], controller: Any) -> dict[str, Any]:
    return {**result, KEY: PolicyUpdate(controller.scheduler)}


async def refuse_bad_policy(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """Answers a bad change with a 400 that says why; SGLang alone would answer 200 and [false]."""
    from fastapi import HTTPException

    requested = (obj.server_args or {}).get(KEY)
    if requested is not None:
        problem = await _problem_with(manager, requested)
        if problem is not None:
            raise HTTPException(status_code=400, detail=f"sdsie: {problem}")
    updated = await original(manager, obj)
    if requested is not None and not all(updated):
        raise HTTPException(status_code=400, detail="sdsie: rejected, nothing was changed; see the server's log")
    return updated


async def _problem_with(manager: Any, requested: Any) -> str | None:
    try:
        settings: PolicySettings = parse_policy(requested)
    except ConfigError as error:
        return str(error)
    for state in await manager.get_internal_state():
        gate = (state.get(KEY) or {}).get("gate")
        if gate is None:
            return "this server does not run the SDSIE algorithm"
        missing = sorted(set(settings.gears) - set(gate["gears"]))
        if missing:
            return f"gears {missing} were not prepared at start (there are {gate['gears']}); see --sdsie-gears"
    return None


_CONTROLLER = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"

REPORT = Hook(
    target=f"{_CONTROLLER}.get_internal_state",
    kind=Kind.AFTER,
    function=report,
    parameters=("self", "recv_req"),
    why="/server_info shows the live hooks and the policy in force, so that a benchmark can refuse a wrong server",
    upstream="none",
    remove_when="a speculative worker may contribute to internal_states",
)
HANDLERS = Hook(
    target=f"{_CONTROLLER}._update_handlers",
    kind=Kind.AFTER,
    function=add_handler,
    parameters=("self",),
    why="/set_internal_state changes the policy of a running server",
    upstream="none",
    remove_when="update handlers can be registered",
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
