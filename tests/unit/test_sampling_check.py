"""The chi-square check itself: it passes draws of the right distribution and rejects others."""

import torch

from sdsie_sglang.eval.sampling_check import CELLS, REJECT_BELOW, cells_of, chi_square, count, filtered


class Constant:
    """A model whose next token has the same distribution everywhere."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def __call__(self, ids: torch.Tensor):
        return type("Out", (), {"logits": self._logits.expand(1, ids.shape[1], -1)})


def test_cells_hold_all_tokens_and_all_probability():
    probabilities = torch.softmax(torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).double() * 2, -1)
    cell, mass = cells_of(probabilities)
    torch.testing.assert_close(mass.sum(1), torch.ones(5, dtype=torch.float64))
    for row in range(5):
        assert torch.allclose(torch.zeros(CELLS).double().scatter_add_(0, cell[row], probabilities[row]), mass[row])


def draws(logits: torch.Tensor, seed: int) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.softmax(logits, -1)
    return [([1, 2], torch.multinomial(probabilities, 40, True, generator=generator).tolist()) for _ in range(100)]


def test_right_draws_pass_and_wrong_ones_are_rejected():
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 2
    model = Constant(logits)
    *right, outside = count(model, draws(logits, seed=2))
    assert outside == 0
    assert right[0].sum() == right[1].sum().round() == 4000
    assert chi_square(*right)[1] > REJECT_BELOW
    *sharper, _ = count(model, draws(logits * 1.3, seed=3))
    assert chi_square(*sharper)[1] < REJECT_BELOW


def test_filters_by_hand():
    row = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    torch.testing.assert_close(filtered(row, 2, 1.0, 0.0), torch.tensor([[0.0, 4 / 7, 3 / 7, 0.0]]))
    torch.testing.assert_close(filtered(row, 0, 0.5, 0.0), torch.tensor([[0.0, 4 / 7, 3 / 7, 0.0]]))
    torch.testing.assert_close(filtered(row, 2, 0.5, 0.0), torch.tensor([[0.0, 4 / 7, 3 / 7, 0.0]]))  # of the whole
    torch.testing.assert_close(filtered(row, 0, 1.0, 0.6), torch.tensor([[0.0, 4 / 7, 3 / 7, 0.0]]))
    torch.testing.assert_close(filtered(row, 0, 1.0, 0.0), row)


def test_draws_that_the_filters_leave_out_and_draws_without_them_are_noticed():
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 2
    kept = logits.masked_fill(filtered(torch.softmax(logits, -1)[None], 20, 0.8, 0.0)[0] == 0, -torch.inf)
    model, filters = Constant(logits), {"top_k": 20, "top_p": 0.8}
    *right, outside = count(model, draws(kept, seed=2), **filters)
    assert outside == 0
    assert chi_square(*right)[1] > REJECT_BELOW
    *_, outside = count(model, draws(logits, seed=3), **filters)
    assert outside > 100
