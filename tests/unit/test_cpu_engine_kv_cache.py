import torch

from sdsie_sglang.cpu_engine.ops import kv_cache
from sdsie_sglang.cpu_engine.overlap import gather_spec_extras


def test_store_cache():
    k_cache, v_cache = torch.zeros(10, 2, 4), torch.zeros(10, 2, 4)
    k, v, slots = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.tensor([7, 1, 4])
    kv_cache.store_cache_cpu(k, v, k_cache, v_cache, slots, 8)
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[slots], new)
        assert cache.abs().sum() == new.abs().sum()  # nothing else was written


def test_copy_between_slots_of_every_layer():
    layers = [torch.randn(6, 2, 4), torch.randn(6, 3).bfloat16()]
    before = [layer.clone() for layer in layers]
    target, source = torch.tensor([0, 1, 2]), torch.tensor([2, 1, 5])  # slot 2 is read and written
    addresses = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    strides = torch.tensor([layer[0].numel() * layer.element_size() for layer in layers])
    kv_cache.copy_all_layer_kv_cache_cpu(addresses, strides, target, source)
    for layer, old in zip(layers, before, strict=True):
        old[target] = old[source]
        assert torch.equal(layer, old)


def test_slot_table():
    table = torch.zeros(4, 12, dtype=torch.int32)
    rows, start, end = torch.tensor([3, 1]), torch.tensor([2, 0]), torch.tensor([5, 4])
    slots = torch.tensor([11, 12, 13, 21, 22, 23, 24])
    kv_cache.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 12)
    expected = torch.zeros_like(table)
    expected[3, 2:5] = torch.tensor([11, 12, 13])
    expected[1, 0:4] = torch.tensor([21, 22, 23, 24])
    assert torch.equal(table, expected)

    read = torch.zeros(7, dtype=torch.int64)
    kv_cache.assign_extend_cache_locs_cpu(rows, table, start, end, read, 12)
    assert torch.equal(read, slots)


def test_slots_of_a_draft():
    table = torch.arange(24, dtype=torch.int32).view(2, 12)
    out = torch.zeros(2 * 2 * 3, dtype=torch.int64)
    lengths = torch.tensor([4, 1])
    kv_cache.assign_draft_cache_locs_contiguous_cpu(torch.tensor([1, 0]), table, lengths, out, 12, 2, 3)
    assert out.tolist() == [*range(16, 22), *range(1, 7)]


def test_gather_of_the_overlap_relay():
    p, index, tokens = torch.rand(5, 1), torch.arange(5).view(5, 1), torch.arange(5) * 10
    rows = torch.tensor([4, 0, 4])
    got = gather_spec_extras(rows, p, index, tokens, None)
    assert torch.equal(got[0], p[rows])
    assert got[1].flatten().tolist() == [4, 0, 4]
    assert got[2].tolist() == [40, 0, 40]
    assert got[3] is None
    hidden = torch.randn(5, 8)
    assert torch.equal(gather_spec_extras(rows, p, index, tokens, hidden)[3], hidden[rows])
