"""The deep interest network in its parts."""

import pytest
import torch
from torch import fx
from torch.nn import functional

from socflower.errors import ConfigError
from socflower.workloads import ClickData, build_click_model, click_data
from socflower.workloads.click_through import GENRE_SLOTS, HISTORY, USER_COLUMNS
from socflower.workloads.models.click_model import FEATURE_SIZE, InterestPooling


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


@pytest.mark.parametrize("party", [0, 1])
def test_bottoms_and_top_are_traceable_at_any_batch_size(clicks: ClickData, party: int) -> None:
    model = build_click_model(seed=1).eval()
    traced, top = fx.symbolic_trace(model.bottoms[party]), fx.symbolic_trace(model.top)
    whole = fx.symbolic_trace(model)
    for size in (1, 7, 32):
        parts, _ = clicks.train.batch(range(size))
        features = torch.randn(size, 2 * FEATURE_SIZE, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert torch.equal(traced(parts[party]), model.bottoms[party](parts[party]))
            assert torch.equal(top(features), model.top(features))
            assert torch.equal(whole(parts), model(parts))


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
    (movies, attributes), _ = clicks.train.batch(range(20))
    turned = torch.cat([movies[:, :HISTORY].flip(1), movies[:, HISTORY:]], dim=1)
    slots = attributes[:, USER_COLUMNS:].unflatten(1, (HISTORY + 1, GENRE_SLOTS))
    swapped = torch.cat([attributes[:, :USER_COLUMNS], slots.flip(2).flatten(1)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model.bottoms[0](turned), model.bottoms[0](movies))
        torch.testing.assert_close(model.bottoms[1](swapped), model.bottoms[1](attributes))


def test_equal_seeds_give_equal_weights_and_no_global_state_moves() -> None:
    before = torch.get_rng_state()
    first = build_click_model(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)  # the global generator goes on
    again, other = build_click_model(seed=3).state_dict(), build_click_model(seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert all(bool(torch.isfinite(value).all()) for value in first.values())
    assert not first["bottoms.1.genres.weight"][0].any()  # the unused slot


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


@pytest.mark.parametrize("num_parties", [0, 3])
def test_other_numbers_of_parties_are_refused(num_parties: int) -> None:
    with pytest.raises(ConfigError, match=f"num_parties must be 1 or 2, got {num_parties}"):
        build_click_model(num_parties, seed=0)
