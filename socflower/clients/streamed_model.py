"""A group's model that stays at its client between rounds, of which each round sends and gets a fragment."""

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from socflower.clients.node_training import NodeTraining
from socflower.errors import ConfigError
from socflower.training.model_state import load_trainable_state, trainable_state
from socflower.training.trainer import arithmetic_of
from socflower.wire.message_keys import ARRAYS, StreamTask
from socflower.wire.saved_state import from_bytes, to_bytes

_KIND = "model of a group whose fragments are synchronised"
# No tensor has this name.
_OPTIMIZER = "/optimizer"


class StreamedModel:
    """A group's model in a round: loaded from what the client kept, with a fragment to mix in after some steps."""

    def __init__(self, training: NodeTraining, stream: StreamTask, saved: bytes | None) -> None:
        if arithmetic := arithmetic_of(training.trainer):
            raise ConfigError(
                f"streaming: fragments change in a round, which training in {arithmetic} does not see; use FP32Trainer"
            )
        self._training, self._stream = training, stream
        self._received: dict[str, Tensor] = {}
        self.optimizer: bytes | None = None
        arrays = from_bytes(_KIND, saved)[1] if saved is not None else None
        if arrays is not None:
            self.optimizer = arrays.pop(_OPTIMIZER).tobytes()
        if stream.is_whole:
            training.load()
            return
        if arrays is None:
            raise ConfigError(
                "streaming: this client was sent a fragment, and has not kept the model of the last round; keep its "
                "state_folder, or start a new training (--fresh)"
            )
        load_trainable_state(
            training.model, {name: torch.from_numpy(array) for name, array in arrays.items()}
        )
        self._received = training.message.content.array_records[ARRAYS].to_torch_state_dict()

    def mix(self, num_steps: int) -> None:
        """Mix the received fragment into the model, once so many steps of the round are done."""
        if not self._received or num_steps < self._stream.delay_steps:
            return
        alpha, own = self._stream.mixing, self._training.model.state_dict()
        for name, received in self._received.items():
            if alpha and own[name].is_floating_point():
                own[name].mul_(alpha).add_(received.to(own[name].device), alpha=1.0 - alpha)
            else:
                own[name].copy_(received)
        self._received = {}

    def state(self, optimizer: bytes) -> bytes:
        """Return model and optimiser as the next round needs them."""
        self.mix(self._stream.delay_steps)
        arrays = {
            name: tensor.detach().cpu().contiguous().numpy()
            for name, tensor in trainable_state(self._training.model).items()
        }
        return to_bytes(_KIND, {}, {_OPTIMIZER: np.frombuffer(optimizer, np.uint8), **arrays})

    def fragment(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return what the hub gets of the model."""
        return ArrayRecord({name: arrays[name] for name in self._stream.names})
