"""Run by test_history.py with TRITON_INTERPRET=1: the kernels against the reference, on random cases."""

import sys

import torch

from sdsie_sglang.kernels.history import kernel, reference

CONTEXT, ROWS = 64, 8


def tables(generator: torch.Generator, with_valid: bool):
    tokens = torch.randint(0, 1000, (ROWS, CONTEXT), generator=generator, dtype=torch.int32)
    slots = torch.randperm(ROWS * CONTEXT, generator=generator).to(torch.int32).view(ROWS, CONTEXT)
    valid = torch.rand(ROWS * CONTEXT, generator=generator) > 0.5 if with_valid else None
    return tokens, slots, valid


def same(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert torch.equal(x, y), f"\n{x}\n{y}"


def main() -> int:
    generator = torch.Generator().manual_seed(0)
    for case in range(12):
        bs = int(torch.randint(1, ROWS + 1, (1,), generator=generator))
        tokens, r2t, valid = tables(generator, with_valid=case % 2 == 0)
        rows = torch.randperm(ROWS, generator=generator)[:bs]
        seq_lens = torch.randint(20, 40, (bs,), generator=generator)
        pending = torch.randint(0, 1000, (bs,), generator=generator, dtype=torch.int32)
        copies = [(tokens.clone(), None if valid is None else valid.clone()) for _ in range(2)]
        outs = [
            place.plain_step(rows, seq_lens, pending, t, r2t, v)
            for place, (t, v) in zip((reference, kernel), copies, strict=True)
        ]
        same(*outs)
        same(*copies)
        for width, drafted in ((1, 5), (2, 1), (2, 5), (2, 7), (16, 3)):
            outs = [
                place.open_window(rows, seq_lens, pending, t, r2t, v, width=width, drafted=drafted)
                for place, (t, v) in zip((reference, kernel), copies, strict=True)
            ]
            same(*outs)
            same(*copies)
        chain = torch.randint(0, 1000, (bs, 6), generator=generator)
        accepted = torch.randint(1, 7, (bs,), generator=generator, dtype=torch.int32)
        numbers = [torch.zeros(2 * bs) for _ in range(2)]
        outs = [
            (place.close_window(rows, seq_lens + accepted, accepted, chain, t, n), n)
            for place, (t, _), n in zip((reference, kernel), copies, numbers, strict=True)
        ]
        same(*outs)
        same(*copies)
    print("same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
