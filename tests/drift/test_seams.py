"""Every place of SGLang that this project patches, overrides or calls: fails with its name when it moves.

What this does not guard: that a place still means the same. The end-to-end tests do.
"""

import dataclasses
import inspect

import pytest

from sdsie_sglang.cpu_engine import enable
from sdsie_sglang.patches.hook import Kind, SeamMoved, check_callable, check_hooks
from sdsie_sglang.patches.seams import SEAMS

enable()

from sdsie_sglang.patches.registry import CPU_HOOKS, GPU_HOOKS, HOOKS  # noqa: E402 (after the CPU engine was chosen)
from sdsie_sglang.plugin import pinned_sglang  # noqa: E402


def test_installed_sglang_is_the_pinned_one():
    import sglang

    assert sglang.__version__ == pinned_sglang()


@pytest.mark.parametrize("hook", [*HOOKS, *GPU_HOOKS, *CPU_HOOKS], ids=lambda hook: hook.target)
def test_patched_place_is_there(hook):
    check_callable(hook.target, hook.parameters)


@pytest.mark.parametrize("seam", list(SEAMS), ids=lambda seam: seam.path)
def test_used_place_is_there(seam):
    check_callable(seam.path, seam.parameters)


def test_a_moved_target_is_named():
    moved = dataclasses.replace(HOOKS[0], target=HOOKS[0].target + "_v3")
    with pytest.raises(SeamMoved, match="eagle_sample_v3 is gone"):
        check_hooks([HOOKS[1], moved])
    renamed = dataclasses.replace(HOOKS[0], parameters=("verify_input", "the_batch"))
    with pytest.raises(SeamMoved, match=r"eagle_sample now takes \(verify_input, batch"):
        check_hooks([renamed])


def test_hook_kinds_are_sglangs():
    from sglang.srt.plugins.hook_registry import HookType

    assert {kind.value for kind in Kind} <= {kind.value for kind in HookType}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            "sglang.srt.managers.utils.GenerationBatchResult",
            ["accept_lens", "accept_index", "new_seq_lens", "next_draft_input", "speculative_num_draft_tokens"],
        ),
        ("sglang.srt.speculative.eagle_info.EagleDraftInput", ["bonus_tokens", "topk_p", "topk_index"]),
        (
            "sglang.srt.speculative.adaptive_runtime_state.SpecRuntimeState",
            [
                "speculative_num_steps", "speculative_num_draft_tokens", "draft_attn_backend", "cuda_graph_runner",
                "target_attn_backend", "target_graph_runner", "draft_extend_attn_backend",
                "cuda_graph_runner_for_draft_extend",
            ],
        ),
    ],
)  # fmt: skip
def test_fields_are_there(path, names):
    import pkgutil

    fields = {field.name for field in dataclasses.fields(pkgutil.resolve_name(path))}
    assert set(names) <= fields, path


def test_requests_count_their_retractions_and_know_their_tokens():
    from sglang.srt.managers.schedule_batch import Req

    source = inspect.getsource(Req)
    for name in ("self.retraction_count = 0", "def get_fill_ids", "self.rid = "):
        assert name in source, f"Req: {name}"


def test_streamer_leaves_room_for_fields_of_ours():
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    assert SchedulerOutputStreamer.has_additional_customized_info is False
    assert SchedulerOutputStreamer.build_additional_customized_info(None, []) == {}


def test_internal_state_route_still_carries_numbers_by_name():
    from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput

    assert SetInternalStateReq(server_args={"sdsie.k": 3}).server_args == {"sdsie.k": 3}
    assert SetInternalStateReqOutput(updated=True).updated


def test_plugin_exceptions_are_still_swallowed_so_that_systemexit_is_needed():
    from sglang.srt.plugins import load_plugins

    source = inspect.getsource(load_plugins)
    assert "except Exception" in source
    assert "SystemExit" not in source
