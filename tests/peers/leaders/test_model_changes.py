"""Leaders exchange changes of their models in fewer bytes: what is lost, what is kept, and what they send."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from socflower.hierarchy import Exchange, GradientExchange, gradient_coding
from socflower.hierarchy.exchange.models import FP16, INT4, INT8
from socflower.peers.leaders.model_changes import ChangeCompression, Floats, feedback_digest
from socflower.peers.leaders.model_exchange import (
    GroupsModel,
    exchange_in_process,
    exchange_models,
    feedback_after,
    pack_model,
    unpack_model,
)
from socflower.peers.transports.in_process import in_process_rings
from socflower.peers.transports.links import LinkedRing

STATISTICS = frozenset({"running_var", "num_batches"})


def common_model(generator: np.random.Generator, size: int) -> dict[str, Floats]:
    return {
        "w": generator.normal(size=(size, 3)).astype(np.float32),
        "half": np.ones(5, np.float16),
        "double": np.ones(2),
        "running_var": np.full(4, 1e-3, np.float32),
        "num_batches": np.array(3),
    }


def trained(common: dict[str, Floats], generator: np.random.Generator, group: int) -> GroupsModel:
    arrays = {
        name: (array + generator.normal(scale=0.01, size=array.shape)).astype(array.dtype)
        if array.dtype != np.int64
        else array + group
        for name, array in common.items()
    }
    arrays["running_var"] = np.abs(arrays["running_var"])
    return GroupsModel(arrays=arrays, samples=float(generator.integers(1, 40)), groups=(group,))


def exchanged(
    name: str,
    common: dict[str, Floats],
    models: Sequence[GroupsModel],
    feedback: list[Floats | None],
) -> tuple[GroupsModel, list[Floats | None]]:
    changes = [
        ChangeCompression(name=name, common=common, untrained=STATISTICS, feedback=each)
        for each in feedback
    ]
    mean = exchange_in_process(models, changes)
    return mean, [
        feedback_after(own, mean, each) for own, each in zip(models, changes, strict=True)
    ]


@pytest.mark.slow
@settings(deadline=None, max_examples=5)
@given(
    name=st.sampled_from([INT8, INT4]),
    num_groups=st.integers(2, 5),
    size=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
)
@example(name=INT8, num_groups=63, size=5, seed=0)
def test_over_any_exchanges_what_was_sent_differs_from_all_changes_by_the_feedback_alone(
    name: str,
    num_groups: int,
    size: int,
    seed: int,
) -> None:
    """Σ over exchanges of (w − c) = Σ of the groups' weighted changes − Σ of what they have left."""
    generator = np.random.default_rng(seed)
    common = common_model(generator, size)
    feedback: list[Floats | None] = [None] * num_groups
    moved, wanted = np.zeros((size, 3)), np.zeros((size, 3))
    for _ in range(3):
        models = [trained(common, generator, group) for group in range(num_groups)]
        total = sum(each.samples for each in models)
        mean, feedback = exchanged(name, common, models, feedback)
        wanted += sum(
            (each.arrays["w"].astype(np.float64) - common["w"]) * (each.samples / total)
            for each in models
        )
        moved += mean.arrays["w"].astype(np.float64) - common["w"]
        common = dict(mean.arrays)
    left = sum(
        each[: 3 * size].reshape(size, 3).astype(np.float64)
        for each in feedback
        if each is not None
    )
    np.testing.assert_allclose(moved + left, wanted, atol=3e-6)
    assert mean.steps is not None
    # Of four bits, a step is a seventh of what a group sends, which is a change and half a step.
    largest = mean.steps.max() if name == INT8 else 0.08 / 7
    assert all(np.abs(each).max() <= 0.5001 * largest for each in feedback if each is not None)


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from([FP16, INT8, INT4]),
    num_groups=st.integers(2, 7),
    seed=st.integers(0, 2**32 - 1),
)
def test_only_weights_that_are_trained_are_rounded(name: str, num_groups: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    common = common_model(generator, 50)
    models = [trained(common, generator, group) for group in range(num_groups)]
    mean, _ = exchanged(name, common, models, [None] * num_groups)
    exact = exchange_in_process(models)
    for tensor in ("double", "running_var", "num_batches"):
        # Other parts of a shorter buffer are summed in another order.
        np.testing.assert_allclose(mean.arrays[tensor], exact.arrays[tensor], rtol=1e-6)
    assert all(
        mean.arrays[each].dtype == array.dtype and mean.arrays[each].shape == array.shape
        for each, array in common.items()
    )
    largest = max(
        np.abs(each.arrays[tensor].astype(float) - common[tensor]).max()
        for each in models
        for tensor in ("w", "half")
    )
    # Of eight bits half a step of each group; of halves a rounding in each of the sums.
    of_each = {FP16: 2.0**-11 * 2, INT8: 0.5 / (126 - num_groups / 2), INT4: 0.5 / 7}
    bound = largest * num_groups * of_each[name]
    assert np.abs(mean.arrays["w"] - exact.arrays["w"]).max() <= bound + 1e-6


@settings(deadline=None, max_examples=12)
@given(
    name=st.sampled_from([FP16, INT8, INT4]),
    num_groups=st.integers(2, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_member_gets_the_same_bits_and_every_time(
    name: str, num_groups: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    common = common_model(generator, 40)
    models = [trained(common, generator, group) for group in range(num_groups)]
    feedback = [
        generator.normal(scale=1e-3, size=3 * 40 + 5).astype(np.float32) if group % 2 else None
        for group in range(num_groups)
    ]
    changes = [
        ChangeCompression(name=name, common=common, untrained=STATISTICS, feedback=each)
        for each in feedback
    ]
    rings = in_process_rings(num_groups)
    with ThreadPoolExecutor(num_groups) as threads:
        means = list(
            threads.map(exchange_models, rings, models, [lambda: None] * num_groups, changes)
        )
    assert len({pack_model(mean) for mean in [*means, exchange_in_process(models, changes)]}) == 1


@pytest.mark.parametrize("spoil", ["nan", "too large", "no samples"])
def test_a_group_that_is_left_out_still_owes_what_it_owed(spoil: str) -> None:
    generator = np.random.default_rng(1)
    common = {"w": np.zeros(9, np.float32)}
    models = [
        trained({**common, "running_var": np.ones(1, np.float32)}, generator, group)
        for group in range(3)
    ]
    models = [
        GroupsModel(arrays={"w": each.arrays["w"]}, samples=2.0, groups=each.groups)
        for each in models
    ]
    owed: list[Floats | None] = [np.full(9, 1e-3 * group, np.float32) for group in range(3)]
    if spoil == "no samples":
        models[1] = GroupsModel(arrays=models[1].arrays, samples=0.0, groups=(1,))
    else:
        models[1].arrays["w"][4] = np.nan if spoil == "nan" else 3e38  # type: ignore[index]
    mean, left = exchanged(INT8, common, models, owed)
    assert mean.groups == (0, 2)
    assert left[1] is owed[1]
    expected = (models[0].arrays["w"] + models[2].arrays["w"]) / 2 + owed[0] + owed[2]  # type: ignore[operator]
    np.testing.assert_allclose(mean.arrays["w"] + left[0] + left[2], expected, atol=1e-7)


def test_one_alone_keeps_its_model_and_what_it_owes() -> None:
    own = GroupsModel(arrays={"w": np.array([0.1, 0.2], np.float32)}, samples=3.0, groups=(0,))
    owed: Floats = np.array([1e-3, 0.0], np.float32)
    mean, left = exchanged(INT8, {"w": np.zeros(2, np.float32)}, [own], [owed])
    assert np.array_equal(mean.arrays["w"], own.arrays["w"])
    assert left == [owed]


def test_groups_that_began_with_other_models_stay_apart() -> None:
    own = [
        GroupsModel(arrays={"w": np.ones(2, np.float32)}, samples=3.0, groups=(group,))
        for group in range(2)
    ]
    changes = [
        ChangeCompression(name=INT8, common={"w": np.full(2, 0.5 * group, np.float32)})
        for group in range(2)
    ]
    assert exchange_in_process(own, changes).groups == (0,)


def test_steps_travel_with_the_mean() -> None:
    mean, _ = exchanged(
        INT8,
        {"w": np.zeros(5, np.float32)},
        [
            GroupsModel(
                arrays={"w": np.full(5, 0.1 + group, np.float32)}, samples=1.0, groups=(group,)
            )
            for group in range(2)
        ],
        [None, None],
    )
    got = unpack_model(pack_model(mean))
    assert mean.steps is not None and got.steps is not None
    assert np.array_equal(got.steps, mean.steps)
    assert [*got.arrays] == ["w"]


def test_feedback_is_known_by_its_bits() -> None:
    one = np.array([0.25, 0.0], np.float32)
    assert feedback_digest(None) == ""
    assert feedback_digest(one) == feedback_digest(one.copy()) != feedback_digest(-one)


@pytest.mark.parametrize("name", ["none", FP16, INT8, INT4])
def test_the_bytes_are_those_that_are_priced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_groups, common = 4, {"w": np.zeros(200_000, np.float32)}
    sent = [0] * num_groups

    def counted(ring: LinkedRing, send: object) -> object:
        def count(chunk: memoryview) -> None:
            sent[ring.rank] += chunk.nbytes
            send(chunk)  # type: ignore[operator]

        return count

    rings = in_process_rings(num_groups)
    for ring in rings:
        assert isinstance(ring, LinkedRing)
        ring._links.send = counted(ring, ring._links.send)  # type: ignore[method-assign, assignment]
    models = [
        GroupsModel(
            arrays={"w": np.full(200_000, 0.1 * group, np.float32)}, samples=1.0, groups=(group,)
        )
        for group in range(num_groups)
    ]
    changes = [None if name == "none" else ChangeCompression(name=name, common=common)] * num_groups
    with ThreadPoolExecutor(num_groups) as threads:
        list(threads.map(exchange_models, rings, models, [lambda: None] * num_groups, changes))
    priced = GradientExchange(coding=gradient_coding(name)).wire_bytes(
        Exchange(num_bytes=800_000.0, num_tensors=1), num_groups
    )
    assert sum(sent) / num_groups == pytest.approx(priced, rel=0.01)
