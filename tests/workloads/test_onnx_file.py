"""Networks of ONNX files: what they compute, that they train and take any batch, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional

from socflower.precision import NITI
from socflower.training.int8 import Int8Trainer
from socflower.training.int8_module import int8_
from socflower.training.trainer import TrainingSpan
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.models.onnx_file import onnx_model
from tests.one_line import refused


class Attention(nn.Module):
    """Self-attention with an MLP behind it, in few words and as many people write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.inner_norm(x))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 5, 16))
        self.block, self.head = Attention(16, 2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.block(x)[:, 0])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(11, 16), Attention(16, 4)
        self.head = nn.Linear(16, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)).mean(1))


IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).sin().reshape(2, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 2 * 3 * 17).cos().reshape(2, 3, 17)
CASES: dict[str, tuple[Any, Tensor]] = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, stride=2),
            nn.BatchNorm2d(8, momentum=0.2),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8, bias=False),
            nn.GroupNorm(2, 8),
            nn.Hardswish(),
            nn.ConvTranspose2d(8, 4, 2, 2),
            nn.InstanceNorm2d(4, affine=True),
            nn.PReLU(4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        IMAGES,
    ),
    "pools and activations": (
        lambda: nn.Sequential(
            nn.MaxPool2d(3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(3, 4, 1),
            nn.SiLU(),
            nn.AvgPool2d(2, padding=1, count_include_pad=False),
            nn.ELU(),
            nn.ConstantPad2d((1, 0, 2, 1), 0.5),
            nn.Hardsigmoid(),
            nn.Softplus(),
            nn.Hardtanh(-0.5, 0.75),
            nn.Flatten(),
            nn.Linear(96, 5),
            nn.Tanh(),
        ),
        IMAGES,
    ),
    "one dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 8, 3),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.MaxPool1d(2, ceil_mode=True),
            nn.Dropout(0.5),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        ),
        ROWS,
    ),
    "transformer": (Vit, IMAGES),
    "language model": (Words, torch.arange(12).reshape(2, 6) % 11),
}


def exported(
    folder: Path, module: nn.Module, inputs: Tensor, *, opset: int = 17, free: bool = True
) -> Path:
    """Write a module in evaluation mode as an ONNX file."""
    path = folder / "net.onnx"
    torch.onnx.export(
        module.eval(),
        (inputs,),
        str(path),
        dynamo=False,
        opset_version=opset,
        do_constant_folding=False,
        input_names=["inputs"],
        **({"dynamic_axes": {"inputs": {0: "n"}}} if free else {}),
    )
    return path


pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*Exporting:UserWarning"
)


@pytest.mark.few_cells(3)
@pytest.mark.parametrize("opset", [13, 17, 20])
@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_network_does_for_any_batch(
    name: str, opset: int, tmp_path: Path
) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(1)
    module = make()
    path = exported(tmp_path, module, inputs, opset=opset)
    found = onnx_model(str(path))
    assert found.training
    # In a file the weights of layers are turned round, and those that torch's exporter splits have other names.
    assert sum(each.numel() for each in found.parameters()) == sum(
        each.numel() for each in module.parameters()
    )
    found.eval()
    for batch in (inputs, torch.cat([inputs, inputs.flip(0), inputs])):
        assert torch.allclose(found(batch), module(batch), atol=2e-6)
    if opset == 13:
        # There, onnx's evaluator normalises with the batch's own statistics.
        return
    reference = ReferenceEvaluator(str(path)).run(None, {"inputs": inputs.numpy()})[0]
    assert np.allclose(found(inputs).detach().numpy(), reference, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_one_batch_size_takes_any(name: str, tmp_path: Path) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(2)
    module = make()
    found = onnx_model(str(exported(tmp_path, module, inputs, free=False))).eval()
    batch = torch.cat([inputs, inputs.flip(0), inputs])[:5]
    assert torch.allclose(found(batch), module(batch), atol=2e-6)


def test_gradients_and_statistics_are_those_of_the_network(tmp_path: Path) -> None:
    module = build_model("resnet8", in_channels=3, image_size=32, num_classes=10, seed=1)
    inputs = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    found = onnx_model(str(exported(tmp_path, module, inputs)))
    module.train()
    for each in (module, found):
        each(inputs).square().sum().backward()
    gradients = [[p.grad for p in each.parameters()] for each in (module, found)]
    largest = max(float(each.abs().max()) for each in gradients[0])
    for expected, got in zip(*gradients, strict=True):
        assert torch.allclose(expected, got, atol=1e-5 * largest)
    for expected, got in zip(module.buffers(), found.buffers(), strict=False):
        assert torch.allclose(expected.float(), got.float(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet5", "resnet8", "mobilenet-v2"])
def test_a_file_trains_in_int8_without_parts_in_fp32(name: str, tmp_path: Path) -> None:
    channels, size = (1, 28) if name == "lenet5" else (3, 32)
    module = build_model(name, in_channels=channels, image_size=size, num_classes=10, seed=1)
    inputs = torch.rand(2, channels, size, size, generator=torch.Generator().manual_seed(1))
    network = int8_(onnx_model(str(exported(tmp_path, module, inputs))), unsupported="refuse")
    network(inputs).sum().backward()
    assert all(each.grad is not None for each in network.parameters())


def test_a_softmax_at_the_end_is_left_out(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(17, 4), nn.Softmax(-1))
    path = str(exported(tmp_path, module, ROWS))
    assert torch.allclose(onnx_model(path)(ROWS), module[0](ROWS), atol=1e-6)
    assert torch.allclose(onnx_model(path, keep_softmax=True)(ROWS), module(ROWS), atol=1e-6)


def _file(
    folder: Path, nodes: list[Any], shape: list[Any], weights: dict[str, Any] | None = None
) -> str:
    """Write a file of these operators by hand."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            onnx.numpy_helper.from_array(np.asarray(values), name)
            for name, values in (weights or {}).items()
        ],
    )
    path = folder / "hand.onnx"
    onnx.save(helper.make_model(graph), path)
    return str(path)


@pytest.mark.parametrize("automatic", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("kind", ["Conv", "MaxPool"])
def test_padding_that_other_frameworks_write(kind: str, automatic: str, tmp_path: Path) -> None:
    given = ["x", "w"] if kind == "Conv" else ["x"]
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": automatic}
    weights = {"w": np.linspace(-1, 1, 54, dtype=np.float32).reshape(2, 3, 3, 3)}
    path = _file(
        tmp_path,
        [helper.make_node(kind, given, ["y"], **attributes)],
        ["n", 3, 8, 8],
        weights if kind == "Conv" else {},
    )
    ends = (0, 1, 0, 1) if automatic == "SAME_UPPER" else (1, 0, 1, 0)
    if kind == "Conv":
        padded, weight = functional.pad(IMAGES, ends), torch.from_numpy(weights["w"])
        expected = functional.conv2d(padded, weight, stride=2)
    else:
        padded = functional.pad(IMAGES, ends, value=float("-inf"))
        expected = functional.max_pool2d(padded, 3, 2)
    assert torch.allclose(onnx_model(path)(IMAGES), expected, atol=1e-6)


def test_operators_that_other_frameworks_write(tmp_path: Path) -> None:
    """Caffe2 writes the additions of ResNet as Sum, and GoogLeNet has LRN."""
    norm = helper.make_node("LRN", ["x"], ["n"], size=3, alpha=0.3, beta=0.6, bias=1.5)
    nodes = [norm, helper.make_node("Sum", ["x", "n", "w"], ["y"])]
    weights = {"w": np.linspace(-1, 1, 3, dtype=np.float32).reshape(3, 1, 1)}
    path = _file(tmp_path, nodes, ["n", 3, 8, 8], weights)
    squares = functional.pad(IMAGES.square(), (0, 0, 0, 0, 1, 1))
    # Of a channel and its neighbours.
    in_window = squares[:, :-2] + squares[:, 1:-1] + squares[:, 2:]
    normed = IMAGES / (1.5 + 0.3 / 3 * in_window) ** 0.6
    expected = IMAGES + normed + torch.from_numpy(weights["w"])
    assert torch.allclose(onnx_model(path)(IMAGES), expected, atol=1e-6)
    even = [helper.make_node("LRN", ["x"], ["y"], size=2)]
    refused(lambda: onnx_model(_file(tmp_path, even, ["n", 3, 8, 8])), "size = 2")


@pytest.mark.slow
def test_a_network_of_caffe2_trains_in_int8() -> None:
    """SqueezeNet, as the ONNX package brings it: no part of it runs in FP32, and a step of a group moves it."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    network = onnx_model(str(folder / "light_squeezenet.onnx"))
    before = [each.detach().clone() for each in network.parameters()]
    trainer = Int8Trainer(algorithm=NITI, unsupported="refuse")
    session = trainer.start(network, TrainingSpan(num_members=2, seed=(1,)))
    images = torch.rand(3, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([1, 999, 30])
    session.step([(images[:2], labels[:2]), (images[2:], labels[2:])])
    session.finish()
    pairs = zip(before, network.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    refused(lambda: onnx_model(str(tmp_path / "none.onnx")), "none.onnx")
    (tmp_path / "text.onnx").write_text("this is no network")
    refused(lambda: onnx_model(str(tmp_path / "text.onnx")), "text.onnx")
    sort = [helper.make_node("TopK", ["x", "k"], ["y", "i"])]
    refused(
        lambda: onnx_model(_file(tmp_path, sort, ["n", 4], {"k": np.array([1])})),
        "hand.onnx",
        "TopK",
    )
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    refused(lambda: onnx_model(_file(tmp_path, relu, ["n", "width"])), "hand.onnx", "'x'")
    # Flattened with the batch: a network whose samples depend on each other.
    mixed = [helper.make_node("Reshape", ["x", "s"], ["y"])]
    refused(
        lambda: onnx_model(_file(tmp_path, mixed, ["n", 4], {"s": np.array([2, -1, 2])})),
        "hand.onnx",
    )
