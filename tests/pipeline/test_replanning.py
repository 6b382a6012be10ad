"""Light re-planning and new shares, against their definitions by brute force."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import InfeasiblePlan
from socflower.pipeline.plan import PipelinePlan, TwoDPlan
from socflower.pipeline.problem import PipelineLayer, PipelineModel
from socflower.pipeline.replanning import replanned, shared_anew
from tests.pipeline.problems import straight_plan

NUM_LAYERS = 9


@st.composite
def models(draw: st.DrawFn) -> PipelineModel:
    flops = draw(
        st.lists(
            st.sampled_from([0.0, 1.0, 2.0, 5.0, 20.0]), min_size=NUM_LAYERS, max_size=NUM_LAYERS
        )
    )
    return PipelineModel(
        name="toy",
        input_bytes=4.0,
        layers=tuple(
            PipelineLayer(
                name=str(number),
                forward_flops=each,
                backward_flops=2 * each,
                weight_bytes=4.0,
                activation_bytes=4.0,
                output_bytes=4.0,
            )
            for number, each in enumerate(flops)
        ),
    )


@st.composite
def pipelines(draw: st.DrawFn) -> PipelinePlan:
    cuts = sorted(draw(st.sets(st.integers(0, NUM_LAYERS - 2), max_size=4)))
    shares = [
        draw(st.sampled_from([(12,), (5, 7), (3, 4, 5), (1, 11)])) for _ in range(len(cuts) + 1)
    ]
    return straight_plan((*cuts, NUM_LAYERS - 1), shares, draw(st.integers(1, 6)))


@given(plan=pipelines(), model=models(), data=st.data())
def test_a_plan_without_lost_devices_has_all_layers_once_and_no_lost_device(
    plan: PipelinePlan,
    model: PipelineModel,
    data: st.DataObject,
) -> None:
    present = data.draw(st.sets(st.sampled_from(plan.socs), min_size=1))
    new = replanned(plan, model, present)
    assert isinstance(new, PipelinePlan)
    assert set(new.socs) == present and new.num_layers == NUM_LAYERS
    assert new.num_samples == plan.num_samples
    if present == set(plan.socs):
        assert new is plan
    whole_stages = [stage for stage in plan.stages if set(stage.devices) & present]
    assert [stage.in_flight for stage in new.stages] == [stage.in_flight for stage in whole_stages]
    if len(whole_stages) == len(plan.stages):  # then layers stay where they are
        assert [(stage.first_layer, stage.last_layer) for stage in new.stages] == [
            (stage.first_layer, stage.last_layer) for stage in plan.stages
        ]
        assert all(
            after == before
            for before, after in zip(plan.stages, new.stages, strict=True)
            if set(before.devices) <= present
        )


@given(plan=pipelines(), model=models(), data=st.data())
def test_layers_of_a_lost_stage_follow_what_the_others_had(
    plan: PipelinePlan,
    model: PipelineModel,
    data: st.DataObject,
) -> None:
    kept = data.draw(st.sets(st.integers(0, len(plan.stages) - 1), min_size=1))
    new = replanned(plan, model, {soc for number in kept for soc in plan.stages[number].devices})
    assert isinstance(new, PipelinePlan)
    flops = [layer.forward_flops for layer in model.layers]
    had = [
        sum(flops[plan.stages[number].first_layer : plan.stages[number].last_layer + 1])
        for number in sorted(kept)
    ]
    if not sum(had):
        return
    for position in range(1, len(new.stages)):
        wanted = sum(had[:position]) / sum(had) * sum(flops)
        reached = sum(flops[: new.stages[position].first_layer])
        # No further from it than half of the largest layer, where the others' least of one layer allows it.
        free = new.stages[position].first_layer > position and new.stages[
            position
        ].first_layer < NUM_LAYERS - (len(new.stages) - position)
        assert not free or abs(reached - wanted) <= max(flops)


def test_pipelines_of_a_2d_plan_that_are_lost_are_left_out() -> None:
    model = PipelineModel(
        name="toy",
        input_bytes=4.0,
        layers=tuple(
            PipelineLayer(
                name=str(number),
                forward_flops=1.0,
                backward_flops=2.0,
                weight_bytes=4.0,
                activation_bytes=4.0,
                output_bytes=4.0,
            )
            for number in range(4)
        ),
    )
    first, second = straight_plan((1, 3), ((4,), (4,)), 2), straight_plan((3,), ((4,),), 2)
    second = PipelinePlan(
        stages=tuple(
            type(stage)(first_layer=0, last_layer=3, devices=(7,), shares=(4,), in_flight=1)
            for stage in second.stages
        ),
        micro_batch_size=4,
        num_micro_batches=2,
    )
    plan = TwoDPlan(groups=(first, second))
    without = replanned(plan, model, {7})
    assert isinstance(without, TwoDPlan) and without.socs == (7,)
    alone = replanned(plan, model, {42, 43})
    assert isinstance(alone, PipelinePlan) and alone.socs == (42,) and alone.num_layers == 4
    with pytest.raises(InfeasiblePlan):
        replanned(plan, model, set())


@given(
    size=st.integers(3, 12),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0, 6.0]), min_size=3, max_size=3),
    most=st.lists(st.integers(1, 12), min_size=3, max_size=3),
    data=st.data(),
)
def test_new_shares_are_the_quickest_within_memory_up_to_a_sample(
    size: int,
    speeds: list[float],
    most: list[int],
    data: st.DataObject,
) -> None:
    first = data.draw(st.integers(1, size - 2))
    second = data.draw(st.integers(1, size - first - 1))
    old = (first, second, size - first - second)
    plan = straight_plan((1,), (old,), 1)
    seconds = {soc: 1.0 / speed for soc, speed in enumerate(speeds)}
    limits = [max(own, each) for own, each in zip(old, most, strict=True)]
    new = shared_anew(plan, seconds, dict(enumerate(most)), 0.0)

    def slowest(shares: tuple[int, ...]) -> float:
        return max(share * seconds[soc] for soc, share in enumerate(shares))

    best = min(
        slowest(shares)
        for shares in product(*(range(1, limit + 1) for limit in limits))
        if sum(shares) == size
    )
    if new is None:
        assert slowest(old) <= best + max(seconds.values()) + 1e-9
        return
    assert isinstance(new, PipelinePlan)
    shares = new.stages[0].shares
    assert sum(shares) == size and all(
        1 <= share <= limit for share, limit in zip(shares, limits, strict=True)
    )
    assert slowest(shares) < slowest(old)
    assert slowest(shares) <= best + max(seconds.values()) + 1e-9


def test_shares_that_gain_too_little_stay() -> None:
    plan = straight_plan((1,), ((6, 6),), 1)
    assert shared_anew(plan, {0: 1.0, 1: 1.05}, {}, 0.1) is None
    new = shared_anew(plan, {0: 1.0, 1: 3.0}, {}, 0.1)
    assert isinstance(new, PipelinePlan) and new.stages[0].shares == (9, 3)
    assert shared_anew(plan, {0: 1.0, 1: 0.0}, {}, 0.1) is None  # not measured
