"""Networks of ONNX files as torch modules that train; needs `socflower[onnx]`.

Every operator becomes the torch module or function of its definition (onnx.ai/onnx/operators). What an ONNX graph
computes from shapes is computed here, for a batch of a size that no other dimension has, so that the module takes
batches of any size. Files of TensorFlow and TFLite are not read; tf2onnx converts them, which no test of ours tries.
"""

from __future__ import annotations

from pathlib import Path

from torch import fx

from socflower.errors import ConfigError
from socflower.workloads.models.onnx_graph import OnnxNetwork
from socflower.workloads.models.onnx_operators import TRANSLATIONS


def onnx_model(path: str, *, keep_softmax: bool = False) -> fx.GraphModule:
    """Return the network of an ONNX file, with its weights, in training mode.

    The network has one input of shape (n, …) and one output of shape (n, …); any n will do, whatever the file says.
    A softmax at its end is left out unless `keep_softmax`: losses in torch take logits. Raises `ConfigError` for a
    file that cannot be read, and for operators and attributes that have no translation.
    """
    try:
        import onnx
    except ImportError:
        raise ConfigError(f"{path}: needs a package: pip install 'socflower[onnx]'") from None
    try:
        document = onnx.load(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception:
        # Whatever protobuf raises.
        raise ConfigError(f"{path}: is no ONNX file") from None
    network = OnnxNetwork(
        file=Path(path).name,
        source=document.graph,
        translations=TRANSLATIONS,
        keep_softmax=keep_softmax,
    )
    return network.build()
