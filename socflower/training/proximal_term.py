"""The proximal term of FedProx."""

from collections.abc import Iterable

from torch import nn


class ProximalTerm:
    """mu / 2 times the squared distance of weights from those at the start (Li et al., MLSys 2020, Eq. 2)."""

    def __init__(self, mu: float, parameters: Iterable[nn.Parameter]) -> None:
        self._mu = mu
        self._received = [
            (parameter, parameter.detach().clone())
            for parameter in parameters
            if mu and parameter.requires_grad
        ]

    def add_gradients(self) -> None:
        """Add the term's gradient to that of each parameter."""
        for parameter, received in self._received:
            term = self._mu * (parameter.detach() - received)
            # A parameter without a gradient gets that of the term, as in a loss that contains the term.
            parameter.grad = term if parameter.grad is None else parameter.grad + term
