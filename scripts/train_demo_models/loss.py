"""KL divergence from the target's next-token distribution to a draft's, over the whole vocabulary.

Logits are never kept: each chunk of places computes them, its loss, and at once the gradient towards the
hidden states, since the output head is frozen.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK = 4096


def divergence(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(teacher || student) of each row, its gradient towards the student logits, and whether the tops
    agree.

    student, teacher: (n, V) logits. Returns (n,) float32, (n, V) in the student's dtype, (n,) bool.
    """
    teacher_log = torch.log_softmax(teacher.float(), -1)
    student_log = torch.log_softmax(student.float(), -1)
    probabilities = teacher_log.exp()
    loss = (probabilities * (teacher_log - student_log)).sum(-1)
    gradient = (student_log.exp() - probabilities).to(student.dtype)
    return loss, gradient, teacher.argmax(-1) == student.argmax(-1)


class DistillationLoss(torch.autograd.Function):
    """Weighted sum over draft steps of the mean divergence."""

    compiled = staticmethod(divergence)

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, teacher_hidden: Tensor, embedding: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden: (K, n, H) of K draft steps; teacher_hidden: (n, H); embedding: (V, H); weights: (K,).

        n is a multiple of CHUNK, or smaller. Returns the loss and, per step, mean divergence and share of
        agreeing tops.
        """
        steps, count, _ = hidden.shape
        gradient = torch.empty_like(hidden)
        losses = torch.zeros(steps, device=hidden.device)
        agreed = torch.zeros(steps, device=hidden.device)
        for start in range(0, count, CHUNK):
            chunk = slice(start, start + CHUNK)
            teacher = teacher_hidden[chunk] @ embedding.T
            for step in range(steps):
                loss, towards_logits, same = DistillationLoss.compiled(hidden[step, chunk] @ embedding.T, teacher)
                losses[step] += loss.sum() / count
                agreed[step] += same.sum() / count
                gradient[step, chunk] = (towards_logits @ embedding) * (weights[step] / count)
        ctx.save_for_backward(gradient)
        return (losses * weights).sum(), losses, agreed

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient was made with the loss; only the outer factor is missing."""
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None


def compile_divergence() -> None:
    """Fuse the loss on a GPU; falls back to the plain form where the compiler doesn't work."""
    torch._dynamo.config.suppress_errors = True
    DistillationLoss.compiled = staticmethod(torch.compile(divergence, dynamic=False))
