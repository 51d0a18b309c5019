from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from sdsie_sglang.gears import PolicySettings, build_policy
from sdsie_sglang.worker.draft_history import DraftHistory, passes_of, ragged_positions
from sdsie_sglang.worker.request_state import RequestState

CONTEXT = 32


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=6))
def test_ragged_positions_are_consecutive_and_end_before_their_ends(spans):
    lengths = [n for n, _ in spans]
    ends = [start + n for n, start in spans]
    row, position, last = ragged_positions(lengths, torch.tensor(ends))
    expected = [(i, p) for i, (n, start) in enumerate(spans) for p in range(start, start + n)]
    assert list(zip(row.tolist(), position.tolist(), strict=True)) == expected
    assert position[last].tolist() == [end - 1 for end in ends]


def make_state():
    policy = build_policy(PolicySettings())
    return RequestState(gate=policy.start_request(), policy=policy)


def extend_batch(table, row, ids, prefix, end):
    """What SGLang's scheduler hands over for one request whose tokens [prefix, end) are prefilled."""
    return SimpleNamespace(
        req_pool_indices=torch.tensor([row]),
        seq_lens=torch.tensor([end]),
        extend_lens=[end - prefix],
        prefix_lens=[prefix],
        input_ids=torch.tensor(ids[prefix:end]),
        out_cache_loc=table[row, prefix:end].to(torch.int64),
        reqs=[SimpleNamespace(get_fill_ids=lambda: ids[:end])],
    )


def fresh(kv_slots=256):
    table = torch.arange(4 * CONTEXT, dtype=torch.int32).view(4, CONTEXT)
    return table, DraftHistory(table, kv_slots)


def test_a_new_prompt_is_missed_whole_with_its_pending_token():
    table, history = fresh()
    state = make_state()
    ids = list(range(100, 110))
    history.prefilled(extend_batch(table, 1, ids, 0, 10), [state])
    assert state.missed == 11
    assert history.tokens(torch.tensor([1] * 10), torch.arange(10)).tolist() == ids


def test_chunks_add_up():
    table, history = fresh()
    state = make_state()
    ids = list(range(100, 120))
    for prefix, end in ((0, 8), (8, 16), (16, 20)):
        history.prefilled(extend_batch(table, 0, ids, prefix, end), [state])
        assert state.missed == end + 1
    assert history.tokens(torch.tensor([0] * 20), torch.arange(20)).tolist() == ids


def test_the_host_knows_a_length_until_the_first_k_cycle():
    table, history = fresh()
    state = make_state()
    ids = list(range(100, 120))
    for prefix, end in ((0, 8), (8, 16), (16, 20)):
        history.prefilled(extend_batch(table, 0, ids, prefix, end), [state])
        assert state.seq_len == end
    state.missed += 3  # cycles of gear 0
    assert state.seq_len == 23
    state.missed, state.engaged = 2, True
    assert state.seq_len is None
    state.prefilled = 0  # taken back by the scheduler, and prefilled again
    history.prefilled(extend_batch(table, 0, ids, 0, 20), [state])
    assert state.seq_len == 20


def test_a_radix_hit_is_trusted_as_far_as_the_draft_went():
    table, history = fresh()
    ids = list(range(100, 112))
    first = make_state()
    history.prefilled(extend_batch(table, 0, ids, 0, 8), [first])
    history.mark(table[0, :5].to(torch.int64), valid=True)  # the draft saw five of the eight
    table[2, :8] = table[0, :8]  # another request shares the eight slots
    second = make_state()
    history.prefilled(extend_batch(table, 2, ids, 8, 12), [second])
    assert second.covered == 5
    assert second.missed == 12 + 1 - 5
    assert history.tokens(torch.tensor([2] * 12), torch.arange(12)).tolist() == ids

    history.mark(table[0, :8].to(torch.int64), valid=True)
    third = make_state()
    table[3, :8] = table[0, :8]
    history.prefilled(extend_batch(table, 3, ids, 8, 12), [third])
    assert third.missed == 12 + 1 - 8


def test_without_a_radix_cache_nothing_is_recorded():
    table, history = fresh(kv_slots=0)
    state = make_state()
    history.prefilled(extend_batch(table, 0, list(range(6)), 0, 6), [state])
    history.mark(table[0, :6].to(torch.int64), valid=False)
    assert state.missed == 7


@given(st.integers(1, 200), st.integers(1, 200))
def test_wide_passes_cover_what_was_missed_and_never_more_than_there_is(missed, shortest):
    passes = passes_of(16, missed, shortest, most=4)
    if passes:
        assert (passes - 1) * 16 < missed <= passes * 16 <= shortest
        assert passes <= 4
    else:
        assert missed > 64 or -(-missed // 16) * 16 > shortest
