"""Synthetic click-through data in the format of MovieLens, with features split between two parties.

Each of 6,040 users has watched some of 3,706 movies, in order. A sample is a movie advertised to a user, the candidate,
and the last `HISTORY` movies that the user watched before; a click stands for a rating of 4 or 5. The *viewing
service* (party 0) has the movie ids, and the *account service* (party 1) the user's attributes and the movies' genres.
Neither sees the other's features, and both are needed. The true probabilities are known, and so is the best possible
accuracy.

The generator, with one seed for all of it; σ is the logistic function:

- Movie m: popularity ∝ 1 / (rank + 20), long-tailed; one to three genres g(m) by `GENRE_SHARES`, weights that sum to 1;
  a *circle*, one of 8 sets of movies that the same users like, independent of genres and not part of the data: latent
  factors v(m) of length about 1 are the circle's plus a small deviation of the movie; a quality b(m) ~ N(0, ½²).
- User u: gender and age group by `GENDERS` and `AGES`, a uniform occupation; latent factors z(u) ~ N(0, I); a taste
  t(u) for each genre, the sum of contributions of gender, age group and occupation and a small individual one.
- Watching: u watches movies one by one without replacement, with odds popularity(m) · exp(2 z·v + t·g): in the
  history, movie ids carry information on z, and genres on t.
- Advertising: movies are drawn by popularity alone, independent of the user.
- Click: with probability σ(b(m) + 3 z·v + 2 t·g + constant), the constant such that a fraction `CLICKED` is clicked.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers
from socflower.workloads.sample_tensors import VerticalSamples

NUM_USERS = 6040
NUM_MOVIES = 3706
NUM_GENRES = 18
HISTORY = 10
"""The number of movies of a history, in the order in which they were watched."""

GENRE_SLOTS = 3
"""Most genres of a movie; genres are numbered from 1, and unused slots hold 0."""

USER_COLUMNS = 3
"""Gender, age group and occupation: the first columns of the account service, before the genres."""

GENDERS = (0.28, 0.72)
AGES = (0.04, 0.18, 0.35, 0.20, 0.09, 0.08, 0.06)
NUM_OCCUPATIONS = 21

GENRE_SHARES = tuple(1.0 / rank for rank in range(2, NUM_GENRES + 2))
"""Relative frequencies with which genres are drawn."""

CLICKED = 0.55
"""Fraction of candidates that are clicked."""

_FACTORS = 2
_CIRCLES = 8
_WATCH_BY_FACTORS, _WATCH_BY_GENRES = 2.0, 1.0
_CLICK_BY_FACTORS, _CLICK_BY_GENRES = 3.0, 2.0
# The odds of so many users for all movies fit into a cache.
_USERS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True, eq=False)
class ClickData:
    """Training and test samples, and bounds (0..1) of the accuracy that a model should reach on the test samples."""

    train: VerticalSamples
    test: VerticalSamples
    # The expected accuracy of a predictor that knows the true probabilities (Bayes).
    best_accuracy: float
    # The accuracy of always predicting the more frequent label of the training samples.
    majority_accuracy: float
    # The accuracy of predicting by each candidate's click rate in the training samples.
    movie_accuracy: float


@plain_numbers
def click_data(*, seed: int, num_train: int = 60_000, num_test: int = 10_000) -> ClickData:
    """Return generated samples: of party 0 (n, HISTORY + 1) movie ids, of party 1 (n, 3 + (HISTORY + 1)·3) attributes.

    In both, the candidate is last. Party 1's columns are gender, age group and occupation, then the genre slots of
    each movie in party 0's order. For every user, test samples are later than training samples. Equal arguments give
    equal samples. Raises ConfigError for sizes below 1, and for more samples than users can watch movies.
    """
    require_range("click data", least=1, num_train=num_train, num_test=num_test)
    require_range("click data", least=0, seed=seed)
    samples_per_user = -(-(num_train + num_test) // NUM_USERS)
    if HISTORY + samples_per_user > NUM_MOVIES // 2:
        most = NUM_USERS * (NUM_MOVIES // 2 - HISTORY)
        raise ConfigError(
            f"click data: {num_train} + {num_test} samples are too many; ask for {most} at most"
        )
    random = np.random.default_rng(seed)
    movies, users = _Movies(random), _Users(random)
    # In the order of time, so that the first samples are early ones of all users.
    user = np.concatenate([random.permutation(NUM_USERS) for _ in range(samples_per_user)])
    moment = np.repeat(np.arange(samples_per_user), NUM_USERS)
    kept = np.r_[0:num_train, len(user) - num_test : len(user)]
    user, moment = user[kept], moment[kept]
    # With few samples, these are not all users.
    watchers, watcher = np.unique(user, return_inverse=True)
    watched = _watch(random, movies, users, watchers, HISTORY + samples_per_user - 1)
    advertised = random.choice(NUM_MOVIES, size=len(user), p=movies.popularity)
    history = watched[watcher[:, None], moment[:, None] + np.arange(HISTORY)]
    shown = np.column_stack([history, advertised])
    probability = _click_probability(movies, users, user, shown[:, -1])
    labels = (random.random(len(user)) < probability).astype(np.int64)
    genres = movies.genre_slots[shown].reshape(len(user), -1)
    attributes = np.concatenate([users.attributes[user], genres], axis=1)

    def samples(rows: slice) -> VerticalSamples:
        ids = torch.arange(len(user))[rows]
        features = [torch.from_numpy(part[rows].astype(np.int32)) for part in (shown, attributes)]
        return VerticalSamples(ids, tuple(features), torch.from_numpy(labels[rows]))

    early, late = slice(0, num_train), slice(num_train, None)
    majority, by_movie = _frequencies(shown[early, -1], labels[early])
    return ClickData(
        samples(early),
        samples(late),
        best_accuracy=float(np.maximum(probability[late], 1 - probability[late]).mean()),
        majority_accuracy=float((labels[late] == majority).mean()),
        movie_accuracy=float((labels[late] == by_movie[shown[late, -1]]).mean()),
    )


class _Movies:
    """The properties drawn for every movie."""

    def __init__(self, random: np.random.Generator) -> None:
        # Ranks are shuffled, so that ids are independent of popularity.
        self.popularity = 1.0 / (random.permutation(NUM_MOVIES) + 20.0)
        self.popularity /= self.popularity.sum()
        self.quality = random.normal(0.0, 0.5, NUM_MOVIES)
        circles = random.normal(0.0, 1.0 / np.sqrt(_FACTORS), (_CIRCLES, _FACTORS))
        own = random.normal(0.0, 0.1 / np.sqrt(_FACTORS), (NUM_MOVIES, _FACTORS))
        circle = random.integers(_CIRCLES, size=NUM_MOVIES)
        self.factors = (circles[circle] + own).astype(np.float32)
        # A draw without replacement in proportion to the shares, as in `_watch`.
        race = random.standard_exponential((NUM_MOVIES, NUM_GENRES)) / np.array(GENRE_SHARES)
        drawn = np.argsort(race, axis=1)[:, :GENRE_SLOTS] + 1
        num_genres = random.choice([1, 2, 3], size=NUM_MOVIES, p=[0.5, 0.35, 0.15])
        self.genre_slots = np.where(np.arange(GENRE_SLOTS) < num_genres[:, None], drawn, 0)
        # Unused slots have a column of their own, which is dropped.
        self.genres = np.zeros((NUM_MOVIES, NUM_GENRES + 1), dtype=np.float32)
        np.put_along_axis(self.genres, self.genre_slots, 1.0 / num_genres[:, None], axis=1)
        self.genres = self.genres[:, 1:]


class _Users:
    """The properties drawn for every user."""

    def __init__(self, random: np.random.Generator) -> None:
        kinds = (len(GENDERS), len(AGES), NUM_OCCUPATIONS)
        drawn = (
            random.choice(len(GENDERS), NUM_USERS, p=GENDERS),
            random.choice(len(AGES), NUM_USERS, p=AGES),
            random.integers(NUM_OCCUPATIONS, size=NUM_USERS),
        )
        self.attributes = np.stack(drawn, axis=1)
        tastes = random.normal(0.0, 0.3, (NUM_USERS, NUM_GENRES))
        for num_kinds, column in zip(kinds, drawn, strict=True):
            tastes += random.normal(0.0, 0.7, (num_kinds, NUM_GENRES))[column]
        self.tastes = tastes.astype(np.float32)
        self.factors = random.standard_normal((NUM_USERS, _FACTORS), dtype=np.float32)


def _watch(
    random: np.random.Generator,
    movies: _Movies,
    users: _Users,
    watchers: npt.NDArray[np.int64],
    num_watched: int,
) -> npt.NDArray[np.int64]:
    """Return the movies (len(watchers), num_watched) that each of `watchers` watched, in order, each at most once.

    Ascending order of E / odds, E exponential, is a draw without replacement with probabilities proportional to odds.
    """
    weighted = (_WATCH_BY_FACTORS * users.factors, _WATCH_BY_GENRES * users.tastes)
    tastes = np.hstack(weighted)[watchers]
    traits = np.hstack([movies.factors, movies.genres])
    popularity = movies.popularity.astype(np.float32)
    watched = np.empty((len(watchers), num_watched), dtype=np.int64)
    for start in range(0, len(watchers), _USERS_AT_A_TIME):
        some = slice(start, min(start + _USERS_AT_A_TIME, len(watchers)))
        odds = tastes[some] @ traits.T
        np.multiply(np.exp(odds, out=odds), popularity, out=odds)
        race = random.standard_exponential(odds.shape, dtype=np.float32)
        race /= odds
        first = np.argpartition(race, num_watched, axis=1)[:, :num_watched]
        in_order = np.argsort(np.take_along_axis(race, first, axis=1), axis=1)
        watched[some] = np.take_along_axis(first, in_order, axis=1)
    return watched


def _click_probability(
    movies: _Movies, users: _Users, user: npt.NDArray[np.int64], movie: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the true probability that `user` clicks `movie`, pair by pair."""
    liking = np.einsum("nf,nf->n", users.factors[user], movies.factors[movie])
    genre_liking = np.einsum("ng,ng->n", users.tastes[user], movies.genres[movie])
    utility = movies.quality[movie] + _CLICK_BY_FACTORS * liking + _CLICK_BY_GENRES * genre_liking
    low, high = -40.0, 40.0
    for _ in range(60):
        constant = (low + high) / 2
        if _logistic(utility + constant).mean() < CLICKED:
            low = constant
        else:
            high = constant
    return _logistic(utility + constant)


def _logistic(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    # Unlike 1 / (1 + exp(-x)), this does not overflow.
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values.astype(np.float64))))


def _frequencies(
    candidate: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]
) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the more frequent label, over all samples and per movie; unseen movies get the overall one."""
    share = labels.mean()
    seen = np.bincount(candidate, minlength=NUM_MOVIES)
    clicked = np.bincount(candidate, weights=labels, minlength=NUM_MOVIES)
    # Five pseudo-observations of the overall share: a single sample must not determine a movie's label.
    return int(share > 0.5), ((clicked + 5 * share) / (seen + 5) > 0.5).astype(np.int64)
