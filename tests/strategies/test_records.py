"""ArrayRecords read and written in place: the same arrays and bytes as Flower's own way."""

import tracemalloc
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from socflower.hierarchy.averaging import weighted_average
from socflower.strategies.records import aggregate_records, array_views, to_array_record
from tests.one_line import refused


def state_dict(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "z.weight": torch.randn(4, 3, 3, 3, generator=generator),
        "a.bias": torch.randn(1, generator=generator),
        "half": torch.randn(5, generator=generator).half(),
        "double": torch.randn(2, 2, generator=generator).double(),
        "bn.num_batches_tracked": torch.tensor(41 + seed),
        "scalar": torch.tensor(0.5 + seed),
        "empty": torch.zeros(0, 3),
        "mask": torch.tensor([True, False]),
        "bytes": torch.arange(6, dtype=torch.uint8),
    }


def assert_same_arrays(left, right):
    assert list(left) == list(right)
    for name, array in left.items():
        assert array.dtype == right[name].dtype
        np.testing.assert_array_equal(array, right[name], strict=True)


def test_views_equal_flowers_arrays_in_order():
    record = ArrayRecord(state_dict())
    views = array_views(record)
    assert list(views) == list(state_dict())
    assert_same_arrays(views, {name: array.numpy() for name, array in record.items()})


def test_views_share_memory_and_are_read_only():
    record = ArrayRecord(state_dict())
    for name, view in array_views(record).items():
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
        if view.size:
            assert np.shares_memory(view, np.frombuffer(record[name].data, np.uint8))


@pytest.mark.parametrize("version", [(2, 0), (3, 0)])
def test_other_npy_versions_fall_back_to_flower(version):
    file = BytesIO()
    np.lib.format.write_array(file, np.arange(3.0), version=version)
    array = Array(dtype="float64", shape=(3,), stype="numpy.ndarray", data=file.getvalue())
    view = array_views(ArrayRecord({"w": array}))["w"]
    np.testing.assert_array_equal(view, np.arange(3.0))
    assert not view.flags.writeable


def test_fortran_order_falls_back_to_flower():
    original = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    view = array_views(ArrayRecord({"w": Array(original)}))["w"]
    np.testing.assert_array_equal(view, original)
    assert not view.flags.writeable


@pytest.mark.parametrize(
    ("stype", "data", "error"),
    [
        ("custom", b"anything", TypeError),
        ("numpy.ndarray", b"not a .npy file at all", ValueError),
        ("numpy.ndarray", Array(np.arange(100.0)).data[:-8], ValueError),
        ("numpy.ndarray", Array(np.arange(100.0)).data[:40], ValueError),
        ("numpy.ndarray", b"", EOFError),
    ],
)
def test_broken_arrays_fail_as_they_do_in_flower(stype, data, error):
    array = Array(dtype="float64", shape=(100,), stype=stype, data=data)
    with pytest.raises(error):
        array.numpy()
    with pytest.raises(error):
        array_views(ArrayRecord({"w": array}))


def test_python_objects_are_never_unpickled():
    file = BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    array = Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=file.getvalue())
    with pytest.raises(ValueError, match="allow_pickle"):
        array_views(ArrayRecord({"w": array}))


ARRAYS = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((3, 0), np.float32),
    "big-endian": np.arange(3, dtype=">f8"),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(10, dtype=np.int16)[::3],
    "complex": np.array([1 + 2j], np.complex64),
    "dates": np.array(["2025-01-01"], "datetime64[D]"),
    "fields": np.zeros(2, [("a", "i4"), ("b", "f8")]),
    "text": np.array(["abc", "d"]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_bytes_are_flowers_own(name):
    ours = to_array_record({name: ARRAYS[name]})
    flowers = ArrayRecord({name: Array(ARRAYS[name])})
    assert ours[name] == flowers[name]
    assert ours[name].object_id == flowers[name].object_id
    assert ours.object_id == flowers.object_id


def test_round_trip_of_a_state_dict():
    record = to_array_record({name: tensor.numpy() for name, tensor in state_dict().items()})
    assert record.object_id == ArrayRecord(state_dict()).object_id
    restored = record.to_torch_state_dict()
    assert list(restored) == list(state_dict())
    for name, tensor in state_dict().items():
        assert restored[name].dtype == tensor.dtype
        assert torch.equal(restored[name], tensor)
    assert_same_arrays(array_views(to_array_record(array_views(record))), array_views(record))


def test_survives_deflation():
    record = aggregate_records([ArrayRecord(state_dict(k)) for k in range(2)], [1, 1])
    children = {}
    for array in record.values():
        inflated = Array.inflate(array.deflate(), array.children)
        children[array.object_id] = inflated
    restored = ArrayRecord.inflate(record.deflate(), children)
    assert_same_arrays(array_views(restored), array_views(record))


def test_aggregation_is_the_weighted_average_of_the_views():
    replies = [ArrayRecord(state_dict(k)) for k in range(4)]
    weights = [10, 0, 35, 5]
    result = aggregate_records(replies, weights)
    expected = weighted_average([array_views(reply) for reply in replies], weights)
    assert_same_arrays(array_views(result), expected)
    assert result.object_id == to_array_record(expected).object_id


def test_aggregation_agrees_with_flower_on_floats():
    def floats(seed):
        return {
            name: t
            for name, t in state_dict(seed).items()
            if t.dtype in (torch.float32, torch.float64)
        }

    replies = [ArrayRecord(floats(k)) for k in range(5)]
    weights = [3, 1, 4, 1, 5]
    contents = [
        RecordDict({"arrays": reply, "metrics": MetricRecord({"num-examples": weight})})
        for reply, weight in zip(replies, weights, strict=True)
    ]
    theirs = array_views(aggregate_arrayrecords(contents, "num-examples"))
    for name, array in array_views(aggregate_records(replies, weights)).items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-6, atol=1e-6)


def test_replies_of_unequal_models_name_the_tensor():
    refused(
        lambda: aggregate_records(
            [to_array_record({"w": np.zeros(n, np.float32)}) for n in (2, 3)], [1, 1]
        ),
        "'w' is float32[3] in model 1",
        "float32[2] in model 0",
    )


def test_aggregation_holds_one_model_beside_the_replies():
    num_elements = 500_000
    replies = [to_array_record({"w": np.full(num_elements, k, np.float32)}) for k in range(6)]
    aggregate_records(replies, [1] * 6)
    tracemalloc.start()
    try:
        result = aggregate_records(replies, [1] * 6)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result["w"].numpy()[0] == 2.5
    assert peak_bytes < 1.1 * 4 * num_elements
