"""Each request's gears in its `meta_info`, under the key `sdsie`."""

from collections.abc import Callable
from typing import Any

from sdsie_sglang.config import ALGORITHM
from sdsie_sglang.live import live_status
from sdsie_sglang.patches.hook import Hook, Kind

KEY = "sdsie"


def add_streamer(original: Callable[[Any], Any], scheduler: Any) -> Any:
    """SGLang's output streamer, extended by a field that SGLang leaves to subclasses."""
    base = original(scheduler)
    if getattr(scheduler.spec_algorithm, "name", None) != ALGORITHM:
        return base

    from sdsie_sglang.worker.request_state import find_state

    def build(self: Any, reqs: list[Any]) -> dict[str, list[Any]]:
        fields = base.build_additional_customized_info(self, reqs)
        finished = [find_state(req) if req.finished() else None for req in reqs]
        name = live_status().get("replica")
        who = {} if name is None else {"replica": name}
        return {**fields, KEY: [[] if state is None else [{**who, **state.stats.summary()}] for state in finished]}

    return type(
        "SdsieOutputStreamer",
        (base,),
        {"__slots__": (), "has_additional_customized_info": True, "build_additional_customized_info": build},
    )


def unwrap_summary(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list[Any]],
    index: int,
    finish_reason: Any,
) -> None:
    """SGLang collects such fields token by token into a list; ours is one object a request."""
    ours = customized_info.get(KEY)
    rest = {key: values for key, values in customized_info.items() if key != KEY}
    original(manager, meta_info, state, rest, index, finish_reason)
    if ours is not None and ours[index]:
        meta_info[KEY] = ours[index][0]


STREAMER = Hook(
    target="sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
    kind=Kind.AROUND,
    function=add_streamer,
    parameters=("self",),
    why="sends each finished request's cycles per gear to the process that answers it",
    upstream="none",
    remove_when="a speculative worker may add fields to meta_info",
)
META_INFO = Hook(
    target="sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
    kind=Kind.AROUND,
    function=unwrap_summary,
    parameters=("self", "meta_info", "state", "customized_info", "index", "finish_reason"),
    why="puts that field into meta_info as one object, not as a list a token",
    upstream="none",
    remove_when="SGLang has request-level custom fields",
)
