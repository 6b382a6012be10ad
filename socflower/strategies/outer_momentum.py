"""An outer step by SGD: the mean change of the groups' models is the gradient of the global model.

    g = sent - mean by samples,    then torch.optim.SGD:  m = mu m + g,  w = w - eta m  or, Nesterov, w - eta (g + mu m)

With eta = 1 and mu = 0 it is the mean itself, so local SGD. With Nesterov momentum it is the outer step of DiLoCo
(Douillard et al., 2023), with heavy-ball momentum that of SlowMo (Wang et al., 2020).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from socflower.errors import require_range, require_type
from socflower.plain_numbers import plain_numbers
from socflower.strategies.records import aggregate_records, array_views, to_array_record
from socflower.strategies.replies import num_examples_of
from socflower.wire.message_keys import ARRAYS

OUTER_LEARNING_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""DiLoCo's, for its Nesterov momentum."""


@plain_numbers
class OuterSGD(FedAvg):
    """`torch.optim.SGD` on the mean change of the models; `settings` are those of `FedAvg`.

    Raises `ConfigError` for a learning rate that is not above 0, and a momentum outside [0, 1).
    """

    def __init__(
        self,
        learning_rate: float = 1.0,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        **settings: Any,
    ) -> None:
        name = type(self).__name__
        for key, value in {"learning_rate": learning_rate, "momentum": momentum}.items():
            require_type(name, (int, float), "a number", **{key: value})
        require_range(name, above=0, learning_rate=learning_rate)
        require_range(name, least=0, below=1, momentum=momentum)
        super().__init__(**settings)
        self.learning_rate, self.momentum = learning_rate, momentum
        # torch refuses Nesterov's step without momentum, where it is that of SGD.
        self.nesterov = bool(nesterov and momentum)
        self.moments: dict[str, NDArray[Any]] = {}
        self._sent: dict[str, NDArray[Any]] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember the model that clients begin with."""
        self._sent = array_views(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model after the step; none without replies."""
        replies = list(replies)
        made, metrics = super().aggregate_train(server_round, replies)
        if made is None:
            return None, metrics
        usable = [reply for reply in replies if not reply.has_error()]
        # Flower's sum rounds at every term.
        mean = aggregate_records(
            [reply.content.array_records[ARRAYS] for reply in usable],
            [num_examples_of(reply) for reply in usable],
        )
        if (self.learning_rate, self.momentum) == (1.0, 0.0):
            # w - (w - mean), without rounding.
            return mean, metrics
        return to_array_record(self._stepped(array_views(mean))), metrics

    def _stepped(self, mean: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        weights = {name: torch.from_numpy(np.array(self._sent[name])) for name in mean}
        step = torch.optim.SGD(
            list(weights.values()),
            lr=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
        )
        for name, weight in weights.items():
            weight.grad = weight - torch.from_numpy(np.array(mean[name]))
            if name in self.moments:
                step.state[weight]["momentum_buffer"] = torch.from_numpy(
                    np.array(self.moments[name])
                )
        step.step()
        if self.momentum:
            # A round may step on a fragment of the model.
            self.moments |= {
                name: step.state[weight]["momentum_buffer"].numpy()
                for name, weight in weights.items()
            }
        return {name: weight.numpy() for name, weight in weights.items()}


@plain_numbers
def nesterov(
    learning_rate: float = OUTER_LEARNING_RATE, momentum: float = OUTER_MOMENTUM, **settings: Any
) -> OuterSGD:
    """Return the outer step of DiLoCo."""
    return OuterSGD(learning_rate, momentum, nesterov=True, **settings)
