"""Files of trained models for others: npz, safetensors, and ONNX with a free batch size."""

import importlib.util
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from socflower.errors import ConfigError
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.workload import example_inputs, initial_model
from socflower.wire.folders import temporary_folder
from socflower.workloads.transfer import load_weights
from socflower.workloads.weights_file import read_weights

FORMATS = (".npz", ".safetensors", ".onnx")


def require_format(target: Path) -> None:
    """Raise `ConfigError` for a file whose ending names no format, or one that needs a package which is not there."""
    if target.suffix not in FORMATS:
        raise ConfigError(f"--save-model {target}: name a file that ends in {', '.join(FORMATS)}")
    package = target.suffix.removeprefix(".")
    if package != "npz" and importlib.util.find_spec(package) is None:
        raise ConfigError(f"--save-model {target}: needs a package: pip install 'socflower[onnx]'")


def require_exportable(scenario: Scenario, target: Path) -> None:
    """Raise `ConfigError` for a scenario whose model ONNX cannot hold: before its training, whose result would be lost.

    Such a model has several input tensors or two halves, or torch fails to export it, which is tried.
    """
    if target.suffix != ".onnx":
        return
    if scenario.kind.uses_cloud:
        raise ConfigError(
            f"--save-model {target}: {scenario.name} trains two halves; save .npz or .safetensors"
        )
    example = example_inputs(scenario)
    if not (isinstance(example, Tensor) or all(isinstance(each, int) for each in example)):
        raise ConfigError(
            f"--save-model {target}: the model of {scenario.name} reads several tensors; save .npz "
            "or .safetensors"
        )
    with temporary_folder() as folder:
        _export(scenario, initial_model(scenario), target, folder / "trial.onnx")


def write_model(scenario: Scenario, weights: Path, target: Path) -> None:
    """Write a scenario's trained model, whose weights are an npz, in the format that the target's ending names.

    safetensors holds the arrays by the names of the state dict. ONNX holds the network in evaluation mode, in FP32,
    with an input `inputs` of shape (n, …) and an output `outputs`. Raises `ConfigError` if torch cannot export it.
    """
    if target.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file(read_weights(weights), target)
    elif target.suffix == ".onnx":
        model = initial_model(scenario)
        load_weights(model, weights, except_head=False)
        _export(scenario, model, target, target)
    else:
        shutil.copyfile(weights, target)


def _export(scenario: Scenario, model: nn.Module, asked: Path, file: Path) -> None:
    """Write a model as ONNX; `ConfigError`, with the file that was asked for, if torch cannot export it."""
    example = example_inputs(scenario)
    assert isinstance(example, Tensor | tuple)
    inputs = example if isinstance(example, Tensor) else torch.zeros(1, *example)
    with warnings.catch_warnings():
        # Torch's newer exporter needs a further package, and its older one says so at every call.
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                model.eval(),
                (inputs[:1],),
                str(file),
                dynamo=False,
                # BatchNorm stays apart, so that who reads the file can train on.
                do_constant_folding=False,
                input_names=["inputs"],
                output_names=["outputs"],
                dynamic_axes={"inputs": {0: "n"}, "outputs": {0: "n"}},
            )
        except (RuntimeError, torch.onnx.OnnxExporterError) as error:
            why = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"--save-model {asked}: torch cannot export {scenario.model.name} to ONNX ({why}); "
                "save .npz or .safetensors"
            ) from None
