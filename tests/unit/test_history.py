"""The cycle's book-keeping: the reference by hand-made cases, the kernels against it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdsie_sglang.kernels.history import close_window, open_window, plain_step

CONTEXT = 16


@pytest.fixture
def tables():
    tokens = torch.zeros((3, CONTEXT), dtype=torch.int32)
    tokens[1, :6] = torch.tensor([10, 11, 12, 13, 14, 15])
    req_to_token = torch.arange(3 * CONTEXT, dtype=torch.int32).view(3, CONTEXT)
    return tokens, req_to_token, torch.zeros(3 * CONTEXT, dtype=torch.bool)


ROWS, LENGTH, PENDING = torch.tensor([1]), torch.tensor([6]), torch.tensor([77], dtype=torch.int32)


def test_a_plain_step_books_a_token_that_the_draft_has_not_seen(tables):
    tokens, req_to_token, valid = tables
    valid[:] = True
    ids, slots, new = plain_step(ROWS, LENGTH, PENDING, tokens, req_to_token, valid)
    assert (ids.tolist(), slots.tolist(), new.tolist()) == ([77], [CONTEXT + 6], [7])
    assert tokens[1, 6] == 77
    assert not valid[CONTEXT + 6]
    assert valid.sum() == 3 * CONTEXT - 1


def test_a_window_ends_with_the_pending_token_and_leaves_the_last_drafted_one_to_the_next(tables):
    tokens, req_to_token, valid = tables
    ids, slots = open_window(ROWS, LENGTH, PENDING, tokens, req_to_token, valid, width=4, drafted=3)
    assert ids.tolist() == [13, 14, 15, 77]
    assert slots.tolist() == [CONTEXT + p for p in (3, 4, 5, 6)]
    assert valid.nonzero().flatten().tolist() == [CONTEXT + p for p in (3, 4, 5, 6, 7, 8)]


def test_accepted_tokens_are_remembered_and_no_others(tables):
    tokens, *_ = tables
    chain, numbers = torch.tensor([[77, 78, 79, 80]]), torch.zeros(2)
    accepted = torch.tensor([3], dtype=torch.int32)
    last = close_window(ROWS, LENGTH + 3, accepted, chain, tokens, numbers)
    assert tokens[1].tolist() == [10, 11, 12, 13, 14, 15, 77, 78, 79] + [0] * 7
    assert last.tolist() == [2]
    assert numbers.tolist() == [3.0, 0.0]


def test_the_triton_kernels_agree_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("history_interpreted.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_triton_kernels_compile_for_a_gpu():
    pytest.importorskip("triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sdsie_sglang.kernels.history import kernel

    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter doesn't compile")
    wide = {"rows", "seq_lens", "ids", "slots", "chain", "last", "new_seq_lens"}
    for function, constants in (
        (kernel._plain_step_kernel, {"HAS_VALID": True}),
        (kernel._open_window_kernel, {"WIDTH": 16, "DRAFTED": 5, "BLOCK": 32, "HAS_VALID": True}),
        (kernel._close_window_kernel, {"WIDTH": 6, "BLOCK": 8}),
    ):
        names = [parameter.name for parameter in function.params]
        types = {name: "*i64" if name in wide else "*i32" for name in names}
        types |= {"valid": "*i8", "numbers": "*fp32", "row_stride": "i32", **dict.fromkeys(constants, "constexpr")}
        signature = {name: types[name] for name in names}
        source = ASTSource(function, signature, {(names.index(n),): v for n, v in constants.items()}, {})
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
