"""Int8 models in files: exact, whole or not at all, and readable without torch."""

import copy
import dataclasses
import errno
import itertools
import json
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.errors import ConfigError
from socflower.precision import NITI, EngineSettings, Int8Model
from socflower.precision.algorithm import (
    HANDED_OUT_GRADIENTS,
    BackwardRule,
    IntegerUpdate,
    Rounding,
)
from tests.one_line import refused
from tests.precision.int8.test_steps import assert_same_parameters
from tests.precision.networks import (
    ALGORITHMS,
    ALWAYS,
    CLASSES,
    FURTHER_ALGORITHMS,
    NETWORKS,
    REACH,
    SELDOM,
    assert_same,
    batches,
    int8,
    train,
)
from tests.seeded import built

ALL = {
    **ALGORITHMS,
    "own": dataclasses.replace(
        NITI, name="own", backward=BackwardRule(rounding=Rounding.NEAREST, loss="fp32"),
        update=IntegerUpdate(bits=(6,), starts=(0.0,), rounding=Rounding.NEAREST),
    ),
}  # fmt: skip


def trained(name="normalised", algorithm=NITI, steps=3):
    model = int8(name, algorithm)
    train(model, batches(steps))
    return model


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        *itertools.product([*NETWORKS, *REACH, "dropped"], ALL),
        *(("normalised", algorithm) for algorithm in FURTHER_ALGORITHMS),
    ],
)
def test_a_loaded_model_goes_on_bit_for_bit(name, algorithm, tmp_path):
    algorithm = (ALL | FURTHER_ALGORITHMS)[algorithm]
    model = trained(name, algorithm)
    path = tmp_path / "model.npz"
    model.save(path)
    loaded = Int8Model.load(path, settings=EngineSettings(rescaling=ALWAYS))
    assert loaded.algorithm == algorithm
    assert loaded.graph == model.graph
    assert_same_parameters(loaded, model)
    data = batches(2, seed=8)
    assert train(loaded, data) == train(model, data)
    assert_same_parameters(loaded, model)
    assert_same(loaded.arrays(), model.arrays())


@pytest.fixture(scope="module")
def file_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.npz"
    trained("plain", ALGORITHMS["momentum"]).save(path)
    return Bytes(path.read_bytes())


class Bytes(bytes):
    """Bytes that a failing test does not print."""

    def __repr__(self):
        return f"<{len(self)} bytes>"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # numpy.load's, on a damaged archive
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(file_bytes, share, tmp_path):
    path = tmp_path / "model.npz"
    path.write_bytes(file_bytes[: int(len(file_bytes) * share)])
    refused(lambda: Int8Model.load(path), "model.npz: not an int8 model")


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 255)), min_size=1, max_size=4),
    st.sampled_from([(0, 400), (-1500, None), (0, None), (0, 5000)]),
)
def test_a_damaged_file_is_refused_or_unharmed(file_bytes, tmp_path, flips, bounds):
    path = tmp_path / "model.npz"
    damaged = bytearray(file_bytes)
    region = range(len(damaged))[slice(*bounds)]
    for position, bits in flips:
        damaged[region[position % len(region)]] ^= bits
    path.write_bytes(damaged)
    try:
        model = Int8Model.load(path)
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        model.predict(batches(1)[0][0])


def save_array(path):
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"\x80\x04pickle"),
        save_array,
        lambda path: np.savez(path, a=np.zeros(3)),
        lambda path: np.savez(path, header=np.array("{}")),
        lambda path: np.savez(path, header=np.array({"schema": 1}, dtype=object)),
        lambda path: zipfile.ZipFile(path, "w").writestr("header.npy", b"nothing"),
        lambda path: path.mkdir(),
        lambda path: None,
    ],
)
def test_a_foreign_file_is_refused(make, tmp_path):
    path = tmp_path / "model.npz"
    make(path)
    named = "not an int8 model" if path.exists() else "no such file"
    refused(lambda: Int8Model.load(path), "model.npz: ", named)


def rewritten(file_bytes, path, change):
    """Write the file again after `change(header, arrays)`."""
    path.write_bytes(file_bytes)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(str(arrays.pop("header")))
    change(header, arrays)
    np.savez(path, header=np.array(json.dumps(header)), **arrays)


def put(key, value):
    """Return a change of an array, or of all its values."""

    def change(header, arrays):
        if np.ndim(value) == 0:
            arrays[key][...] = value
        else:
            arrays[key] = value

    return change


SMALL = np.zeros((1, 2), np.float32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda h, a: h.update(schema=2), "schema"),
        (lambda h, a: h.pop("graph"), ""),
        (lambda h, a: h.update(algorithm=[]), ""),
        (lambda h, a: h["graph"]["nodes"][0].update(kind="quantum"), "quantum"),
        (lambda h, a: h["graph"].update(nodes=[]), "no operator"),
        (lambda h, a: h["graph"].update(input_shape=[3, 12, 12]), "(3, 12, 12)"),
        (lambda h, a: h["algorithm"]["update"].update(momentum=9), "momentum"),
        (lambda h, a: h["algorithm"].update(weight="int8"), "weights"),
        (lambda h, a: h["algorithm"]["forward"].update(rounding=5), ""),
        (lambda h, a: h.update(exponents=[1]), ""),
        (lambda h, a: h["exponents"].pop("0.weight"), ""),
        (lambda h, a: h["exponents"].update({"0.weight": 201}), "0.weight: an exponent of 201"),
        (lambda h, a: a.pop("weight/0.weight"), "0.weight: need int8"),
        (put("weight/0.weight", -128), "-128"),
        (put("weight/0.weight", SMALL), "0.weight: need int8"),
        (put("weight/0.weight", np.zeros(4, np.int8)), "0.weight: need int8"),
        (put("weight/0.weight", np.zeros((2, 3, 3, 16), np.int8)), "0.weight: need int8 of shape (3, 3, 3, 16)"),
        (lambda h, a: a.pop("vector/0.bias"), "0.bias: need float32 of shape (16,), got nothing"),
        (put("vector/0.bias", SMALL), "0.bias: need float32 of shape (16,)"),
        (put("vector/0.bias", np.zeros(16)), "0.bias: need float32 of shape (16,), got float64"),
        (put("vector/0.bias", np.nan), "0.bias: element (0,)"),
        (put("velocity/0.bias", SMALL), "0.bias: need float32"),
        (put("velocity/0.bias", np.nan), "0.bias: element (0,)"),
        (lambda h, a: a.pop("master/3.weight"), "master/3.weight: need float32"),
        (put("master/3.weight", SMALL), "3.weight: need float32"),
        (put("master/3.weight", np.inf), "3.weight: element (0, 0, 0, 0)"),
        (put("velocity/3.weight", np.nan), "3.weight: element (0, 0, 0, 0)"),
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused(file_bytes, change, named, tmp_path):
    path = tmp_path / "model.npz"
    rewritten(file_bytes, path, change)
    refused(lambda: Int8Model.load(path), "model.npz: ", named)


def test_a_file_without_the_number_of_batches_of_a_batchnorm_is_refused(tmp_path):
    path = tmp_path / "model.npz"
    trained("normalised", steps=1).save(path)
    rewritten(path.read_bytes(), path, lambda h, a: h["num_batches_tracked"].popitem())
    refused(lambda: Int8Model.load(path), "model.npz: not an int8 model")


@pytest.mark.parametrize("where", ["nowhere/model.npz", "."])
def test_a_place_that_cannot_be_written_is_a_config_error(where, tmp_path):
    path = tmp_path / where
    refused(lambda: int8("plain").save(path), f"{path}: cannot be written")
    assert not list(tmp_path.iterdir())


def test_a_model_whose_weights_a_trainer_holds_is_not_saved(tmp_path):
    refused(lambda: int8("plain", HANDED_OUT_GRADIENTS).save(tmp_path / "model.npz"), "save")
    assert not list(tmp_path.iterdir())


def with_fp32(seed=0):
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.PReLU(8), nn.GroupNorm(2, 8), nn.Tanhshrink(),
            nn.PReLU(8), nn.Flatten(), nn.Linear(8 * 64, CLASSES),
        ), seed
    )  # fmt: skip


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_model_with_fp32_operators_goes_on_bit_for_bit(algorithm, tmp_path):
    path = tmp_path / "model.npz"
    model = int8(with_fp32(), algorithm, options={"unsupported": "fp32"})
    train(model, batches(3))
    model.save(path)
    # Another module of the same layers: its values do not count.
    loaded = Int8Model.load(path, settings=model.settings, module=with_fp32(5))
    data = batches(3, seed=8)
    assert train(loaded, data) == train(model, data)
    assert_same(loaded.arrays(), model.arrays())
    refused(lambda: Int8Model.load(path), path, "module", "3, ")
    other = nn.Sequential(*(nn.ReLU() for _ in range(9)))
    refused(lambda: Int8Model.load(path, module=other), "ReLU", "PReLU", "'3'")
    refused(lambda: Int8Model.load(path, module=nn.ReLU()), "nothing", "PReLU", "'3'")


def test_an_operator_of_several_modules_is_looked_for_in_the_network(tmp_path):
    path = tmp_path / "model.npz"
    int8(with_fp32(), options={"unsupported": "fp32"}).save(path)
    other = with_fp32()
    other[5] = nn.Softsign()
    refused(lambda: Int8Model.load(path, module=other), "Tanhshrink")


def by_file(model, path):
    model.save(path)
    return Int8Model.load(path, settings=model.settings, module=with_fp32())


@pytest.mark.few_cells(3)
@pytest.mark.parametrize(
    "again",
    [lambda model, _: copy.deepcopy(model), lambda model, _: pickle.loads(pickle.dumps(model)), by_file],
    ids=["deepcopy", "pickle", "file"],
)  # fmt: skip
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_exponents_that_are_looked_for_seldom_are_kept(algorithm, again, tmp_path):
    """A copy continues with the same bits, apart from the original."""
    model = int8(with_fp32(), algorithm, rescaling=SELDOM, options={"unsupported": "fp32"})
    train(model, batches(12))
    other = again(model, tmp_path / "model.npz")
    before = {name: np.array(each) for name, each in model.arrays().items()}
    # Larger images: exponents are looked for in the batches in which they would have been.
    data = [(1.4 * images, labels) for images, labels in batches(9, seed=3)]
    losses = train(other, data)
    assert_same(model.arrays(), before)
    assert train(model, data) == losses
    assert_same(model.arrays(), other.arrays())
    assert model.trackers.to_json() == other.trackers.to_json()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt("stop"), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "Disk full"), ConfigError),
    ],
)
def test_an_interrupted_save_leaves_the_old_file(error, raised, tmp_path, monkeypatch):
    path = tmp_path / "model.npz"
    model = trained("plain", steps=1)
    model.save(path)
    before = path.read_bytes()
    train(model, batches(1))

    def fail(file, **arrays):
        file.write(b"half")
        assert len(list(tmp_path.iterdir())) == 2
        raise error

    monkeypatch.setattr(np, "savez", fail)
    refused(lambda: model.save(path), *error.args[1:], error=raised)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    model.save(path)
    assert path.read_bytes() != before


def test_a_saved_model_is_read_and_trained_without_torch(tmp_path):
    path = tmp_path / "model.npz"
    model = trained("residual")
    model.save(path)
    images, labels = batches(1, seed=6)[0]
    np.savez(tmp_path / "batch.npz", images=images, labels=labels)
    program = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, Blocked())
import numpy as np
from socflower.precision import Int8Model
model = Int8Model.load(sys.argv[1])
batch = np.load(sys.argv[2])
result = model.train_step(batch["images"], batch["labels"], progress=0.0)
print(repr(result.loss), float(model.predict(batch["images"]).sum()))
assert "torch" not in sys.modules
"""
    arguments = [sys.executable, "-c", program, str(path), str(tmp_path / "batch.npz")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    expected = (
        model.train_step(images, labels, progress=0.0).loss,
        float(model.predict(images).sum()),
    )
    assert tuple(map(float, done.stdout.split())) == expected
