"""The deep interest network in its parts."""

import pytest
import torch
from torch import fx
from torch.nn import functional

from socflower.workloads.click_through import (
    GENRE_SLOTS,
    HISTORY,
    USER_COLUMNS,
    ClickData,
    click_data,
)
from socflower.workloads.models.click_model import FEATURE_SIZE, InterestPooling, build_click_model
from tests.one_line import refused


@pytest.fixture(scope="module")
def clicks() -> ClickData:
    return click_data(seed=3, num_train=400, num_test=50)


def test_the_whole_is_the_top_over_the_bottoms(clicks: ClickData) -> None:
    model = build_click_model(seed=1)
    parts, _ = clicks.train.batch(range(40))
    with torch.no_grad():
        features = [bottom(part) for bottom, part in zip(model.bottoms, parts, strict=True)]
        assert all(feature.shape == (40, FEATURE_SIZE) for feature in features)
        assert torch.equal(model(parts), model.top(torch.cat(features, dim=1)))
        assert model(parts).shape == (40, 2)


def test_one_party_alone_is_the_viewing_service(clicks: ClickData) -> None:
    model = build_click_model(1, seed=1)
    parts, _ = clicks.train.batch(range(4))
    assert len(model.bottoms) == 1
    assert model(parts[:1]).shape == (4, 2)
    for num_parties in (0, 3):
        refused(lambda num=num_parties: build_click_model(num, seed=0), "1 or 2", num_parties)


def test_bottoms_and_top_are_traceable_at_any_batch_size(clicks: ClickData) -> None:
    model = build_click_model(seed=1).eval()
    halves = [*model.bottoms, model.top, model]
    traces = [fx.symbolic_trace(half) for half in halves]
    for size in (1, 7, 32):
        parts, _ = clicks.train.batch(range(size))
        features = torch.randn(size, 2 * FEATURE_SIZE, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            for half, trace, inputs in zip(halves, traces, (*parts, features, parts), strict=True):
                assert torch.equal(trace(inputs), half(inputs))


def test_interest_pooling_is_the_sum_of_weighed_embeddings() -> None:
    generator = torch.Generator().manual_seed(0)
    pooling = InterestPooling(3)
    history, candidate = (
        torch.randn(5, HISTORY, 3, generator=generator),
        torch.randn(5, 3, generator=generator),
    )
    with torch.no_grad():
        for row in range(5):
            expected = torch.zeros(3)
            for watched in history[row]:
                pair = torch.cat(
                    [watched, candidate[row], watched - candidate[row], watched * candidate[row]]
                )
                expected += pooling.weigh(pair) * watched
            torch.testing.assert_close(pooling(history, candidate)[row], expected)


def test_the_order_of_a_history_and_unused_genre_slots_do_not_matter(clicks: ClickData) -> None:
    model = build_click_model(seed=1)
    # The slot of no genre.
    assert not model.bottoms[1].genres.weight[0].any()
    (movies, attributes), _ = clicks.train.batch(range(20))
    turned = torch.cat([movies[:, :HISTORY].flip(1), movies[:, HISTORY:]], dim=1)
    slots = attributes[:, USER_COLUMNS:].unflatten(1, (HISTORY + 1, GENRE_SLOTS))
    swapped = torch.cat([attributes[:, :USER_COLUMNS], slots.flip(2).flatten(1)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model.bottoms[0](turned), model.bottoms[0](movies))
        torch.testing.assert_close(model.bottoms[1](swapped), model.bottoms[1](attributes))


def test_every_weight_gets_a_gradient_and_the_loss_falls(clicks: ClickData) -> None:
    model = build_click_model(seed=1)
    parts, labels = clicks.train.batch(range(400))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(parts), labels)
        loss.backward()
        assert all(
            weight.grad is not None and bool(weight.grad.any()) for weight in model.parameters()
        )
        optimizer.step()
        losses.append(loss.item())
    assert 0.6 < losses[0] < 0.8 and losses[-1] < losses[0] - 0.05
