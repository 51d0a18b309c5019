"""Every hook of this project, in the order in which README.md lists them."""

from sdsie_sglang.patches import internal_state, meta_info, raw_logits
from sdsie_sglang.patches.hook import Hook

HOOKS: tuple[Hook, ...] = (
    raw_logits.HOOK,
    meta_info.STREAMER,
    meta_info.META_INFO,
    internal_state.REPORT,
    internal_state.CHANGE,
    internal_state.REFUSE,
)
