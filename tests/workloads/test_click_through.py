"""Generated click-through data: its shape, what its parties know, and that there is something to learn."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from socflower.workloads.click_through import (
    AGES,
    CLICKED,
    GENDERS,
    GENRE_SLOTS,
    HISTORY,
    NUM_GENRES,
    NUM_MOVIES,
    NUM_OCCUPATIONS,
    NUM_USERS,
    USER_COLUMNS,
    ClickData,
    click_data,
)
from socflower.workloads.models.click_model import build_click_model
from tests.one_line import refused


@pytest.fixture(scope="module")
def clicks() -> ClickData:
    return click_data(seed=0)


def genre_slots(attributes: torch.Tensor) -> torch.Tensor:
    return attributes[:, USER_COLUMNS:].unflatten(1, (HISTORY + 1, GENRE_SLOTS))


def test_sizes_and_values_are_in_their_ranges(clicks: ClickData) -> None:
    for samples, num_samples in ((clicks.train, 60_000), (clicks.test, 10_000)):
        (movies, attributes), labels = samples.batch(range(num_samples))
        assert len(samples) == num_samples and samples.num_parties == 2
        assert movies.shape == (num_samples, HISTORY + 1)
        assert attributes.shape == (num_samples, USER_COLUMNS + (HISTORY + 1) * GENRE_SLOTS)
        assert int(movies.min()) >= 0 and int(movies.max()) < NUM_MOVIES
        highest = attributes[:, :USER_COLUMNS].amax(dim=0)
        assert (
            highest < torch.tensor([len(GENDERS), len(AGES), NUM_OCCUPATIONS])
        ).all() and attributes.min() == 0
        assert int(attributes[:, USER_COLUMNS:].max()) == NUM_GENRES
        assert set(labels.tolist()) == {0, 1}
        assert float(labels.float().mean()) == pytest.approx(CLICKED, abs=0.03)


def test_no_id_is_in_both_sets(clicks: ClickData) -> None:
    everything = torch.cat([clicks.train.ids, clicks.test.ids])
    assert len(torch.unique(everything)) == 70_000


def test_a_history_holds_no_movie_twice(clicks: ClickData) -> None:
    history = clicks.train.features[0][:, :HISTORY].sort(dim=1).values
    assert bool((history[:, 1:] != history[:, :-1]).all())


def test_parties_speak_of_the_same_movies(clicks: ClickData) -> None:
    """Wherever party 0 has a movie, party 1 has that movie's genres, one at least and none twice."""
    genres: dict[int, tuple[int, ...]] = {}
    for samples in (clicks.train, clicks.test):
        (movies, attributes), _ = samples.batch(range(2000))
        for movie, slots in zip(
            movies.flatten().tolist(), genre_slots(attributes).flatten(0, 1).tolist(), strict=True
        ):
            assert genres.setdefault(movie, tuple(slots)) == tuple(slots)
    for slots in genres.values():
        used = [slot for slot in slots if slot]
        assert used and len(set(used)) == len(used)
        assert list(slots) == used + [0] * (GENRE_SLOTS - len(used))


def test_popularity_has_a_long_tail(clicks: ClickData) -> None:
    seen = np.bincount(clicks.train.features[0].numpy().ravel(), minlength=NUM_MOVIES)
    seen = np.sort(seen)[::-1] / seen.sum()
    # A tenth of the movies.
    assert seen[: NUM_MOVIES // 10].sum() > 0.4
    # And yet the other half is watched.
    assert seen[NUM_MOVIES // 2 :].sum() > 0.05
    assert seen[NUM_MOVIES * 9 // 10] > 0


def test_equal_seeds_give_equal_samples_whatever_the_global_state() -> None:
    np.random.seed(1)
    first = click_data(seed=5, num_train=300, num_test=100)
    state = np.random.get_state()[1]
    np.random.seed(2)
    again, other = (click_data(seed=seed, num_train=300, num_test=100) for seed in (5, 6))
    np.random.seed(1)
    assert np.array_equal(np.random.get_state()[1], state)
    assert all(
        torch.equal(*pair) for pair in zip(first.train.features, again.train.features, strict=True)
    )
    assert (
        torch.equal(first.test.labels, again.test.labels)
        and first.best_accuracy == again.best_accuracy
    )
    assert not torch.equal(first.train.features[0], other.train.features[0])


def test_tests_come_later_in_every_users_life() -> None:
    """With as many samples as users per moment, test histories are the training histories moved on by one movie."""
    few = click_data(seed=1, num_train=NUM_USERS, num_test=NUM_USERS)
    before = {tuple(history[1:HISTORY]) for history in few.train.features[0].tolist()}
    assert all(tuple(history[: HISTORY - 1]) in before for history in few.test.features[0].tolist())


def test_reference_accuracies_are_ordered_and_leave_room(clicks: ClickData) -> None:
    labels = clicks.test.labels.float()
    assert clicks.majority_accuracy == pytest.approx(float(max(labels.mean(), 1 - labels.mean())))
    assert 0.5 < clicks.majority_accuracy < clicks.movie_accuracy < clicks.best_accuracy - 0.1 < 0.9


@pytest.mark.parametrize(
    ("key", "value"), [("num_train", 0), ("num_test", 0), ("seed", -1), ("num_train", 10**8)]
)
def test_sizes_that_cannot_be_are_refused(key: str, value: int) -> None:
    named = "11131720" if value == 10**8 else f"{key} = {value}"
    refused(lambda: click_data(**{"seed": 0, key: value}), named)


def trained_accuracy(clicks: ClickData, parties: tuple[bool, bool], num_epochs: int) -> float:
    """Return the test accuracy of the model when parties that do not take part send zeros."""
    model = build_click_model(seed=0)

    def logits(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        features = [
            bottom(part) * takes_part
            for bottom, part, takes_part in zip(model.bottoms, parts, parties, strict=True)
        ]
        return model.top(torch.cat(features, dim=1))

    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    order = torch.Generator().manual_seed(0)
    for _ in range(num_epochs):
        for rows in torch.randperm(len(clicks.train), generator=order).split(256):
            parts, labels = clicks.train.batch(rows)
            optimizer.zero_grad()
            functional.cross_entropy(logits(parts), labels).backward()
            optimizer.step()
    with torch.no_grad():
        parts, labels = clicks.test.batch(range(len(clicks.test)))
        return float((logits(parts).argmax(dim=1) == labels).float().mean())


@pytest.mark.slow
def test_both_parties_are_needed(clicks: ClickData) -> None:
    together, viewing, account = (
        trained_accuracy(clicks, parties, num_epochs=3)
        for parties in ((True, True), (True, False), (False, True))
    )
    assert clicks.movie_accuracy + 0.03 < min(viewing, account)
    assert max(viewing, account) + 0.02 < together < clicks.best_accuracy
