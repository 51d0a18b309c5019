"""Attention in one launch, its glue without a GPU: which layers and batches take it, what it is given."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sdsie_sglang.cpu_engine import enable

enable()

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.models.llama import LlamaAttention  # noqa: E402

from sdsie_sglang import fused_attention  # noqa: E402
from sdsie_sglang.config import parse_config  # noqa: E402
from sdsie_sglang.gears.limits import MAX_K  # noqa: E402
from sdsie_sglang.kernels.skinny_attention import attention  # noqa: E402
from sdsie_sglang.kernels.skinny_attention.attention import MARGIN  # noqa: E402
from sdsie_sglang.kernels.skinny_attention.reference import attention_reference  # noqa: E402

from .skinny_attention_cases import Case, make_case  # noqa: E402

GROUPS, HEADS, SIZE, WIDTH = 2, 2, 32, 6
MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)


def _hollow(kind: type, **attributes: Any) -> Any:
    """An instance of SGLang's class with these attributes only."""
    made = kind.__new__(kind)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class FlashAttentionBackend:
    """In place of SGLang's, whose module can be imported with a GPU only."""


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def _attention(case: Case) -> Any:
    layer = _hollow(
        RadixAttention, attn_type=AttentionType.DECODER, logit_cap=0.0, is_cross_attention=False, use_irope=False,
        sliding_window_size=-1, xai_temperature_len=-1, quant_method=None, k_scale=None, v_scale=None, head_dim=SIZE,
        v_head_dim=SIZE, scaling=case.scale, layer_id=0,
    )  # fmt: skip
    rope = _hollow(RotaryEmbedding, is_neox_style=True, rotary_dim=SIZE, head_size=SIZE, cos_sin_cache=case.cos_sin)
    return _hollow(
        LlamaAttention, attn=layer, rotary_emb=rope, head_dim=SIZE, q_size=GROUPS * HEADS * SIZE, kv_size=HEADS * SIZE,
        qkv_proj=lambda x: (x, None), o_proj=lambda x: (x, None),
    )  # fmt: skip


def _backend(case: Case) -> Any:
    pool = _hollow(MHATokenToKVPool)
    pool.get_kv_buffer = lambda layer_id: (case.k_cache, case.v_cache)
    return _hollow(
        FlashAttentionBackend, page_size=1, topk=1, use_mla=False, num_splits=0, local_attn_builder=None,
        token_to_kv_pool=pool, kv_index_translator=SimpleNamespace(is_translating=False),
        forward_metadata=SimpleNamespace(page_table=case.table, cache_seqlens_int32=case.lengths),
    )  # fmt: skip


class _Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.case = make_case([20, 9], WIDTH, GROUPS, HEADS, SIZE)
        self.attention, self.backend = _attention(self.case), _backend(self.case)
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, spec_info=None, out_cache_loc=self.case.slots,
            global_num_token_non_padded_cpu=None,
        )  # fmt: skip
        self.positions = self.case.positions.as_subclass(_OnGpu)
        monkeypatch.setitem(
            sys.modules,
            "sglang.srt.layers.attention.flashattention_backend",
            SimpleNamespace(FlashAttentionBackend=FlashAttentionBackend),
        )
        monkeypatch.setattr(fused_attention, "_backend", lambda: self.backend)
        monkeypatch.setattr(fused_attention, "wanted", lambda: True)
        monkeypatch.setattr(fused_attention, "measured", lambda device: True)

    @property
    def applies(self) -> bool:
        return fused_attention.applies(self.attention, self.positions, self.batch)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> _Scene:
    return _Scene(monkeypatch)


def test_one_launch_of_the_batchs_own_metadata(scene: _Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    own, launches = scene.case.fresh(), []
    monkeypatch.setattr(
        fused_attention, "skinny_attention",
        lambda *a: (launches.append(a[-1]), attention_reference(*a[:2], a[2].as_subclass(torch.Tensor), *a[3:-1]))[1],
    )  # fmt: skip
    refused = lambda *a: pytest.fail("went to SGLang")  # noqa: E731
    for _ in range(2):
        got = fused_attention.forward(refused, scene.attention, scene.positions, own.qkv, scene.batch)
    assert torch.equal(got, attention_reference(*own))
    assert torch.equal(scene.case.k_cache, own.k_cache), "keys are in the cache that SGLang's attention reads"
    assert launches[0] is launches[1], "a layer's counters stay its own"


def test_sglangs_own_way_where_the_kernel_does_not_serve(scene: _Scene) -> None:
    scene.attention.rotary_emb.forward = lambda positions, q, k: (q + 1, k)
    scene.attention.attn.forward = lambda q, k, v, batch: q
    q = scene.case.qkv[:, : GROUPS * HEADS * SIZE]
    got = fused_attention.attend(scene.attention, scene.case.positions, scene.case.qkv, scene.batch)
    assert torch.equal(got, q + 1)


@pytest.mark.parametrize("mode", list(ForwardMode), ids=lambda mode: mode.name)
def test_only_rows_that_end_their_request(scene: _Scene, mode: ForwardMode) -> None:
    scene.batch.forward_mode = mode
    assert scene.applies is (mode in MODES)


CHANGES = {
    "soft capping": lambda s: setattr(s.attention.attn, "logit_cap", 30.0),
    "a sliding window": lambda s: setattr(s.attention.attn, "sliding_window_size", 4096),
    "an encoder": lambda s: setattr(s.attention.attn, "attn_type", AttentionType.ENCODER_ONLY),
    "a scaled cache": lambda s: setattr(s.attention.attn, "k_scale", torch.ones(1)),
    "another rotary embedding": lambda s: setattr(
        s.attention.rotary_emb, "__class__", type("Yarn", (RotaryEmbedding,), {})
    ),
    "GPT-J's rotation": lambda s: setattr(s.attention.rotary_emb, "is_neox_style", False),
    "part of a head rotated": lambda s: setattr(s.attention.rotary_emb, "rotary_dim", 16),
    "frequencies in bf16": lambda s: setattr(s.attention.rotary_emb, "cos_sin_cache", s.case.cos_sin.bfloat16()),
    "a subclass": lambda s: setattr(s.attention, "__class__", type("Other", (LlamaAttention,), {})),
    "a hook": lambda s: s.attention.attn.register_forward_hook(lambda *a: None),
    "another backend": lambda s: setattr(s, "backend", object()),
    "no metadata": lambda s: setattr(s.backend, "forward_metadata", None),
    "pages": lambda s: setattr(s.backend, "page_size", 16),
    "a tree": lambda s: setattr(s.backend, "topk", 4),
    "deterministic sums": lambda s: setattr(s.backend, "num_splits", 1),
    "a translated cache": lambda s: setattr(s.backend.kv_index_translator, "is_translating", True),
    "another pool": lambda s: setattr(s.backend, "token_to_kv_pool", object()),
    "slots in int32": lambda s: setattr(s.batch, "out_cache_loc", s.case.slots.int()),
    "lengths in int64": lambda s: setattr(s.backend.forward_metadata, "cache_seqlens_int32", s.case.lengths.long()),
    "rows left out": lambda s: setattr(s.batch, "out_cache_loc", s.case.slots[:-1]),
    "rows of several lengths": lambda s: setattr(s.batch, "spec_info", SimpleNamespace(ragged_verify_layout=object())),
    "a processor": lambda s: setattr(s, "positions", s.case.positions),
}


@pytest.mark.parametrize("name", CHANGES)
def test_anything_else_is_left_to_sglang(scene: _Scene, name: str) -> None:
    assert scene.applies
    CHANGES[name](scene)
    assert not scene.applies
    expected = object()
    got = fused_attention.forward(lambda *a: expected, scene.attention, scene.positions, scene.case.qkv, scene.batch)
    assert got is expected


def test_a_gpu_on_which_it_was_not_measured(scene: _Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "measured", attention.measured)
    assert not scene.applies


def test_too_many_rows_go_to_sglang(scene: _Scene) -> None:
    got = fused_attention.forward(lambda *a: "SGLang's", scene.attention, None, torch.zeros(17, 8), scene.batch)
    assert got == "SGLang's"


def test_a_setting_turns_it_off() -> None:
    assert not parse_config({}).no_fused_attention
    assert parse_config({"no_fused_attention": True}).no_fused_attention


def test_one_graph_writes_less_than_is_left_to_the_wait() -> None:
    assert MAX_K < MARGIN
    assert MAX_K + 1 < MARGIN, "a draft graph: two tokens of catch-up and K - 1 drafted ones"


def test_rows_that_say_where_they_are_need_no_plan(scene: _Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the batch looks like: the passes of a draft graph were looked at once, at start."""
    runner = SimpleNamespace(token_to_kv_pool=scene.backend.token_to_kv_pool, req_to_token_pool=None)
    metadata = scene.backend.forward_metadata
    rows = fused_attention.Rows(runner, metadata.page_table, metadata.cache_seqlens_int32)
    CHANGES["a processor"](scene)
    assert not scene.applies
    monkeypatch.setattr(fused_attention, "_backend", lambda: rows)
    assert scene.applies
