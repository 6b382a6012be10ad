"""Int8 models in files: exact, whole or not at all, and readable without torch."""

import dataclasses
import errno
import io
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.precision import (
    ADAPTIVE_FIXED_POINT,
    NITI,
    EngineSettings,
    Int8Model,
    RescalingPolicy,
)
from socflower.precision.algorithm import BackwardRule, Fp32Update, IntegerUpdate, Rounding
from tests.precision.int8.test_steps import assert_same_parameters, train
from tests.precision.networks import IMAGE, NETWORKS, batches, build

ALWAYS = EngineSettings(rescaling=RescalingPolicy(adaptive=False))
ALGORITHMS = {
    "niti": NITI,
    "adaptive-fixed-point": ADAPTIVE_FIXED_POINT,
    "momentum": dataclasses.replace(ADAPTIVE_FIXED_POINT, update=Fp32Update(momentum=0.9)),
    "own": dataclasses.replace(
        NITI, name="own", backward=BackwardRule(rounding=Rounding.NEAREST, loss="fp32"),
        update=IntegerUpdate(bits=(6,), starts=(0.0,), rounding=Rounding.NEAREST),
    ),
}  # fmt: skip


def trained(name="normalised", algorithm=NITI, steps=3):
    model = Int8Model.from_module(
        build(name), input_shape=IMAGE, algorithm=algorithm, settings=ALWAYS
    )
    train(model, batches(steps))
    return model


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_loaded_model_goes_on_bit_for_bit(name, algorithm, tmp_path):
    model, path = trained(name, algorithm), tmp_path / "model.npz"
    model.save(path)
    loaded = Int8Model.load(path, settings=ALWAYS)
    assert loaded.algorithm == algorithm
    assert loaded.graph == model.graph
    assert_same_parameters(loaded, model)
    data = batches(2, seed=8)
    assert train(loaded, data) == train(model, data)
    assert_same_parameters(loaded, model)
    for key, array in model.arrays().items():
        np.testing.assert_array_equal(loaded.arrays()[key], array)


@pytest.fixture(scope="module")
def file_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.npz"
    trained("plain").save(path)
    return Bytes(path.read_bytes())


@pytest.fixture(scope="module")
def momentum_file_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.npz"
    trained("plain", ALGORITHMS["momentum"]).save(path)
    return Bytes(path.read_bytes())


class Bytes(bytes):
    """Bytes that a failing test does not print."""

    def __repr__(self):
        return f"<{len(self)} bytes>"


def assert_loads_or_refuses(path):
    try:
        model = Int8Model.load(path)
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        model.predict(batches(1)[0][0])


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # numpy.load's, on a damaged archive
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(file_bytes, share, tmp_path):
    path = tmp_path / "model.npz"
    path.write_bytes(file_bytes[: int(len(file_bytes) * share)])
    with pytest.raises(
        ConfigError, match=r"model.npz: not an int8 model that this version can read"
    ):
        Int8Model.load(path)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 255)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_a_damaged_file_is_refused_or_unharmed(file_bytes, tmp_path, flips, where):
    damaged = bytearray(file_bytes)
    regions = [
        range(0, 400),
        range(len(damaged) - 1500, len(damaged)),
        range(len(damaged)),
        range(0, 5000),
    ]
    for position, bits in flips:
        damaged[regions[where][position % len(regions[where])]] ^= bits
    path = tmp_path / "model.npz"
    path.write_bytes(damaged)
    assert_loads_or_refuses(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"this is no archive"),
        lambda path: path.write_bytes(b"\x80\x04pickle"),
        lambda path: path.write_bytes(numpy_file(np.save, np.zeros(3))),
        lambda path: np.savez(path, a=np.zeros(3)),
        lambda path: np.savez(path, header=np.zeros(3)),
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
    with pytest.raises(ConfigError, match=r"model.npz: (not an int8 model|there is no such file)"):
        Int8Model.load(path)


def numpy_file(save, array):
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def rewritten(file_bytes, path, change):
    """Write the file again after `change(header, arrays)`."""
    path.write_bytes(file_bytes)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(str(arrays.pop("header")))
    change(header, arrays)
    np.savez(path, header=np.array(json.dumps(header)), **arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda h, a: h.update(schema=2),
        lambda h, a: h.pop("graph"),
        lambda h, a: h.update(algorithm=[]),
        lambda h, a: h["graph"]["nodes"][0].update(kind="quantum"),
        lambda h, a: h["graph"].update(nodes=[]),
        lambda h, a: h["algorithm"]["update"].update(bits=[9]),
        lambda h, a: h["algorithm"].update(weight="fp32"),
        lambda h, a: h["algorithm"]["forward"].update(rounding=5),
        lambda h, a: a.pop("weight/0.weight"),
        lambda h, a: a["weight/0.weight"].fill(-128),
        lambda h, a: a.update({"weight/0.weight": a["weight/0.weight"].astype(np.float32)}),
        lambda h, a: a.update({"weight/0.weight": a["weight/0.weight"].reshape(-1)}),
    ],
)
def test_a_file_that_says_something_else_is_refused(file_bytes, change, tmp_path):
    path = tmp_path / "model.npz"
    rewritten(file_bytes, path, change)
    with pytest.raises(ConfigError, match=r"model.npz: "):
        Int8Model.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, a: h.update(exponents=[1]), "not an int8 model"),
        (lambda h, a: h["exponents"].pop("0.weight"), "0.weight: need int8 of shape .* got nothing"),
        (lambda h, a: h["exponents"].update({"0.weight": 10**9}), r"0.weight: an exponent of 1000000000 is beyond"),
        (lambda h, a: a.pop("vector/0.bias"), r"0.bias: need float32 of shape \(16,\), got nothing"),
        (lambda h, a: a.update({"vector/0.bias": a["vector/0.bias"][:4]}), r"0.bias: .* got float32 of shape \(4,\)"),
        (lambda h, a: a.update({"vector/0.bias": a["vector/0.bias"].astype(np.float64)}), "0.bias: .* got float64"),
        (lambda h, a: a["vector/0.bias"].fill(np.nan), r"0.bias: element \(0,\) is nan"),
        (
            lambda h, a: a.update({"weight/0.weight": a["weight/0.weight"][:2].copy()}),
            r"0.weight: need int8 of shape \(3, 3, 3, 16\), got int8 of shape \(2, 3, 3, 16\)",
        ),
        (lambda h, a: a["master/3.weight"].fill(np.inf), r"3.weight: element \(0, 0, 0, 0\) is inf"),
        (lambda h, a: a.update({"master/3.weight": np.zeros((1, 2))}), "3.weight: need float32 of shape"),
        (lambda h, a: a["velocity/3.weight"].fill(np.nan), r"3.weight: element \(0, 0, 0, 0\) is nan"),
        (lambda h, a: a.pop("master/3.weight"), "3.weight: its FP32 master is missing"),
        (lambda h, a: a.update({"velocity/0.bias": np.zeros(3, np.float32)}), "0.bias: need float32 of shape"),
        (lambda h, a: h["graph"].update(input_shape=[3, 12, 12]), r"0 does not make \(8, 10, 10\) of \(3, 12, 12\)"),
    ],
)  # fmt: skip
def test_parameters_that_do_not_fit_the_graph_are_refused(
    momentum_file_bytes, change, message, tmp_path
):
    path = tmp_path / "model.npz"
    rewritten(momentum_file_bytes, path, change)
    with pytest.raises(ConfigError, match=rf"model.npz: .*{message}"):
        Int8Model.load(path)


@pytest.mark.parametrize("where", ["nowhere/model.npz", "."])
def test_a_place_that_cannot_be_written_is_a_config_error(where, tmp_path):
    path = tmp_path / where
    with pytest.raises(ConfigError, match=rf"{path}: cannot be written \(\w"):
        trained("plain", steps=1).save(path)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path, model = tmp_path / "model.npz", trained("plain", steps=1)
    model.save(path)
    before = path.read_bytes()
    train(model, batches(1))
    for error, raised, message in (
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (
            OSError(errno.ENOSPC, "Disk full"),
            ConfigError,
            r"model.npz: cannot be written \(Disk full\)",
        ),
    ):

        def fail(file, error=error, **arrays):
            file.write(b"half")
            assert len(list(tmp_path.iterdir())) == 2
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(np, "savez", fail)
            with pytest.raises(raised, match=message):
                model.save(path)
        assert path.read_bytes() == before
        assert [entry.name for entry in tmp_path.iterdir()] == ["model.npz"]
    model.save(path)
    assert path.read_bytes() != before


def test_a_saved_model_is_read_and_trained_without_torch(tmp_path):
    path, model = tmp_path / "model.npz", trained("residual")
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
