"""Gradients sent as products of two small matrices (PowerSGD)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from socflower.hierarchy.exchange.coding_bytes import Matrix, PowerSGD
from socflower.training.exchange.compression import GradientCompression, Script, seeded


class PowerSGDCompression(GradientCompression):
    """Members sum the factors of each matrix M ≈ P·Qᵀ; what that leaves of their own is added to their next gradient.

    With the member's M = gradient + what was left, and the orthonormal columns Q of the step before:

        P = Σ M·Q, orthonormalised;  Q' = Σ Mᵀ·P;  all get P·Q'ᵀ;  what is left is M - P·(Mᵀ·P)ᵀ

    (Vogels et al., NeurIPS 2019, algorithms 1 and 2.) There and in torch's `powerSGD_hook` a member keeps M less the
    mean that all get. Over all members that is the same sum, but each one's part grows with the difference of its
    gradients from the others', and would be lost with it.
    """

    def __init__(self, coding: PowerSGD, seed: int) -> None:
        super().__init__(coding)
        self._low_rank, self._seed = coding, seed

    def _exchange(
        self, rank: int, size: int, bucket: int, gradient: Tensor
    ) -> Script[tuple[Tensor, ...]]:
        if not self._low_rank.compresses(self._step):
            yield gradient
            return ()
        forms = self._low_rank.matrices(self._shapes[bucket])
        if bucket in self._kept:
            bases, unsent = self._residuals(bucket, gradient, 2)
            gradient += unsent
        else:
            bases = self._first_bases(bucket, forms)
        unsent = torch.zeros_like(gradient)
        if size == 1:
            return bases, unsent
        lengths = [form.num_rows * form.num_columns for form in forms]
        parts = list(zip(gradient.split(lengths), unsent.split(lengths), forms, strict=True))
        yield from _sum_joined([part for part, _, form in parts if not form.rank])
        small = [
            (part.view(form.num_rows, -1), rest.view(form.num_rows, -1))
            for part, rest, form in parts
            if form.rank
        ]
        lengths = [form.num_columns * form.rank for form in forms if form.rank]
        ranks = [form.rank for form in forms if form.rank]
        before = [base.view(-1, low) for base, low in zip(bases.split(lengths), ranks, strict=True)]
        left = [own @ orthonormal(base) for (own, _), base in zip(small, before, strict=True)]
        yield from _sum_joined(left)
        left = [orthonormal(each) for each in left]
        right = [own.T @ each for (own, _), each in zip(small, left, strict=True)]
        for (own, rest), p, q in zip(small, left, right, strict=True):
            torch.sub(own, p @ q.T, out=rest)
        yield from _sum_joined(right)
        for (own, _), p, q in zip(small, left, right, strict=True):
            torch.mm(p, q.T, out=own)
        if not torch.isfinite(gradient).all():
            return ()
        # A column of zeros, as of a layer that gets no gradient, would stay so for good.
        following = [
            torch.where(q.any(0), q, base).flatten() for q, base in zip(right, before, strict=True)
        ]
        return torch.cat([torch.zeros(0), *following]), unsent

    def _first_bases(self, bucket: int, forms: Sequence[Matrix]) -> Tensor:
        """Return random bases, the same at all members."""
        generator = seeded(self._seed, bucket)
        drawn = [
            torch.randn(form.num_columns, form.rank, generator=generator).flatten()
            for form in forms
        ]
        return torch.cat([torch.zeros(0), *drawn])


# A column that others nearly span is the rounding errors of its elements.
_SPANNED = 1e-5


def orthonormal(matrix: Tensor) -> Tensor:
    """Return a matrix with orthonormal columns, by Gram and Schmidt; columns that earlier ones span become zeros."""
    columns: list[Tensor] = []
    for column in matrix.T:
        rest = column
        for other in columns:
            rest = rest - (other @ rest) * other
        norm, limit = torch.linalg.vector_norm(rest), _SPANNED * torch.linalg.vector_norm(column)
        columns.append(torch.zeros_like(rest) if norm <= limit else rest / norm)
    return torch.stack(columns, dim=1)


def _sum_joined(tensors: Sequence[Tensor]) -> Script[None]:
    """Replace tensors by their sums over all members, in one sum of all."""
    if not tensors:
        return
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    yield joined
    for tensor, part in zip(tensors, joined.split([each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
