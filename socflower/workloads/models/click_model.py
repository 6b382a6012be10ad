"""A deep interest network (Zhou et al. 2018) for click-through rates, split between the parties that hold its inputs.

Attention weights every movie of the history by its relation to the candidate. Each party does this in its own bottom
model with its own attributes of movies. A top model receives only the outputs of bottom models and predicts the click.
"""

from collections.abc import Sequence

import torch
from torch import nn

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers
from socflower.workloads.click_through import (
    AGES,
    GENDERS,
    GENRE_SLOTS,
    HISTORY,
    NUM_GENRES,
    NUM_MOVIES,
    NUM_OCCUPATIONS,
    USER_COLUMNS,
)
from socflower.workloads.models.layers import drawn

FEATURE_SIZE = 32
"""Features that each party sends per sample, unless others are given."""

_EMBEDDING = 16


class InterestPooling(nn.Module):
    """Return the sum of the history's embeddings, weighted by a small network of each embedding and the candidate.

    The weights are not normalised (no softmax), as in the paper, to preserve the intensity of interests.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Linear(4 * size, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, history: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        """Map history (n, HISTORY, size) and candidate (n, size) to (n, size)."""
        beside = candidate.unsqueeze(1).expand_as(history)
        pairs = torch.cat([history, beside, history - beside, history * beside], dim=2)
        pooled: torch.Tensor = (self.weigh(pairs) * history).sum(dim=1)
        return pooled


class ViewingBottom(nn.Module):
    """The bottom model of the viewing service, whose features are movie ids."""

    def __init__(self, feature_size: int = FEATURE_SIZE) -> None:
        super().__init__()
        self.movies = nn.Embedding(NUM_MOVIES, _EMBEDDING)
        self.interest = InterestPooling(_EMBEDDING)
        self.features = nn.Sequential(nn.Linear(3 * _EMBEDDING, feature_size), nn.ReLU())

    def forward(self, movies: torch.Tensor) -> torch.Tensor:
        """Map movie ids (n, HISTORY + 1) int64, the candidate last, to features (n, feature_size)."""
        embedded = self.movies(movies)
        history, candidate = embedded[:, :HISTORY], embedded[:, HISTORY]
        pooled = self.interest(history, candidate)
        features: torch.Tensor = self.features(
            torch.cat([pooled, candidate, pooled * candidate], dim=1)
        )
        return features


class AccountBottom(nn.Module):
    """The bottom model of the account service, whose features are user attributes and movie genres."""

    def __init__(self, feature_size: int = FEATURE_SIZE) -> None:
        super().__init__()
        self.genders = nn.Embedding(len(GENDERS), _EMBEDDING)
        self.ages = nn.Embedding(len(AGES), _EMBEDDING)
        self.occupations = nn.Embedding(NUM_OCCUPATIONS, _EMBEDDING)
        self.genres = nn.Embedding(NUM_GENRES + 1, _EMBEDDING, padding_idx=0)
        self.interest = InterestPooling(_EMBEDDING)
        self.features = nn.Sequential(nn.Linear(5 * _EMBEDDING, feature_size), nn.ReLU())

    def forward(self, attributes: torch.Tensor) -> torch.Tensor:
        """Map attributes (n, USER_COLUMNS + (HISTORY + 1)·GENRE_SLOTS) int64 to features (n, feature_size)."""
        slots = torch.unflatten(attributes[:, USER_COLUMNS:], 1, (HISTORY + 1, GENRE_SLOTS))
        # The mean over a movie's genres; unused slots have zero embeddings and are not counted.
        used = (slots > 0).sum(dim=2, keepdim=True).clamp(min=1)
        embedded = self.genres(slots).sum(dim=2) / used
        history, candidate = embedded[:, :HISTORY], embedded[:, HISTORY]
        user = (
            self.genders(attributes[:, 0])
            + self.ages(attributes[:, 1])
            + self.occupations(attributes[:, 2])
        )
        pooled = self.interest(history, candidate)
        known = [user, candidate, user * candidate, pooled, pooled * candidate]
        features: torch.Tensor = self.features(torch.cat(known, dim=1))
        return features


class ClickModel(nn.Module):
    """Bottom models of the parties, and the top model, whose input is their features, concatenated in party order."""

    def __init__(self, bottoms: Sequence[nn.Module], feature_size: int = FEATURE_SIZE) -> None:
        super().__init__()
        self.bottoms = nn.ModuleList(bottoms)
        self.top = nn.Sequential(
            nn.Linear(len(bottoms) * feature_size, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 2),
        )

    def forward(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Map the inputs of each party to logits (n, 2), of no click and click."""
        # An index for each part, since torch.fx does not know how many parts it would iterate over.
        features = [bottom(parts[party]) for party, bottom in enumerate(self.bottoms)]
        logits: torch.Tensor = self.top(torch.cat(features, dim=1))
        return logits


@plain_numbers
def build_click_model(
    num_parties: int = 2, *, seed: int, feature_size: int = FEATURE_SIZE
) -> ClickModel:
    """Return the model for `click_data`: the bottom models of both parties, or of the viewing service, and the top.

    The edge-cloud paper sends 1,024 features a sample. Equal seeds give equal weights; torch's global random state is
    neither read nor changed. Raises ConfigError for another number of parties.
    """
    if num_parties not in (1, 2):
        raise ConfigError(f"click model: num_parties must be 1 or 2, got {num_parties}")
    require_range("click model", least=1, feature_size=feature_size)

    def build() -> ClickModel:
        bottoms = [ViewingBottom(feature_size), AccountBottom(feature_size)]
        return ClickModel(bottoms[:num_parties], feature_size)

    return drawn(build, seed)
