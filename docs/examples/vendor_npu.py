"""A second accelerator for mixed-precision training: what a vendor's NPU runtime has to implement, and its use.

    python docs/examples/vendor_npu.py

The "NPU" here is torch with weights rounded to 8 bits, so that the example runs anywhere. Replace the bodies of the
methods by calls of the runtime; the signatures stay.
"""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from socflower import (
    FP32Trainer,
    Int8Backend,
    MixedPrecisionTrainer,
    StepResult,
    TrainingSpan,
    build_model,
    evaluate,
    load_data,
    sgd,
)


class RoundedTorch(Int8Backend):
    """Trains a copy of the network whose weights are multiples of a quantum, 127 of them in either direction."""

    def __init__(self) -> None:
        self._module = nn.Module()

    @property
    def name(self) -> str:
        return "torch with weights of 8 bits"

    def build(self, module: nn.Module, input_shape: tuple[int, int, int]) -> None:
        # A runtime compiles its graph here, and raises ConfigError for a layer that it does not have.
        self._module = copy.deepcopy(module).train()

    def load_weights(self, weights, *, seed: int) -> None:
        random = np.random.default_rng(seed)
        state = {}
        for name, values in weights.items():
            largest = (
                float(np.abs(values).max())
                if values.dtype == np.float32 and values.ndim > 1
                else 0.0
            )
            # Round down or up at random, without bias; vectors stay unchanged.
            if largest:
                quantum = largest / 127
                values = (
                    np.floor(values / quantum + random.random(values.shape)).astype(np.float32)
                    * quantum
                )
            state[name] = torch.tensor(values)
        # Running statistics that the state lacks stay unchanged.
        self._module.load_state_dict(state, strict=False)

    def train_step(self, images, labels, *, learning_rate: float, progress: float) -> StepResult:
        targets = torch.tensor(labels, dtype=torch.int64)
        logits = self._module(torch.tensor(images))
        loss = functional.cross_entropy(logits, targets)
        self._module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in self._module.parameters():
                parameter -= learning_rate * parameter.grad
        return StepResult(
            loss=float(loss.detach()),
            num_correct=int((logits.argmax(1) == targets).sum()),
            num_samples=len(targets),
        )

    def weights(self):
        return {name: value.detach().numpy() for name, value in self._module.state_dict().items()}

    def predict(self, images):
        self._module.eval()
        with torch.no_grad():
            logits = self._module(torch.tensor(images)).double().numpy()
        self._module.train()
        return logits


def main() -> None:
    torch.set_num_threads(1)
    digits = load_data("digits")
    model = build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=1)
    # Plain SGD: this backend returns a difference of weights, whose rounding momentum would add up. A backend that
    # can return its gradient overrides pseudo_gradient and may have momentum.
    trainer = MixedPrecisionTrainer(
        fp32=FP32Trainer(optimizer=sgd(0.05, momentum=0.0)), rule="half", backend=RoundedTorch
    )
    epochs, steps = 4, len(digits.train) // 32
    session = trainer.start(model, TrainingSpan(total_steps=epochs * steps, steps_per_epoch=steps))
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(digits.train))
        for indices in np.array_split(order, steps):
            session.step([digits.train.batch(indices)])
    end = session.finish()
    print(
        f"accuracy {evaluate(model, digits.test).accuracy:.3f}, "
        f"the CPU had {100 * end.metrics['cpu-share']:.0f} % of the samples, events: {list(end.events)}"
    )


if __name__ == "__main__":
    main()
