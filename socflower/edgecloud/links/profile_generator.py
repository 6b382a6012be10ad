"""Synthetic bandwidth profiles with the statistics of recorded ones, which must not be distributed with this package.

The rate while there is a link is a clipped log-normal AR(1) process,

    r_i = clip(exp(mu + sigma z_i), min, max)
    z_i = phi z_{i-1} + sqrt(1 - phi^2) e_i,    phi = exp(-step / correlation)

with e_i standard normal; mu and sigma are solved for so that mean and deviation *after* clipping are the table's. The
up link has a process of its own of the same shape, scaled by the up:down ratio, whose e_i correlate with those of
the down link. Both are lost at the same times: a two-state Markov chain with the table's share and mean length of
outages, during which the rate process continues. All figures and their sources: `profile_statistics.toml`.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from socflower.cluster.link_rate import RateSteps
from socflower.did_you_mean import did_you_mean
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile
from socflower.errors import ConfigError, require_range
from socflower.field_rules import checked
from socflower.plain_numbers import plain_numbers

_NORMAL = NormalDist()
_HALVINGS = 60

JITTER_CORRELATION_S = 10.0
"""The seconds in which the autocorrelation of jitter falls to 1/e: an assumption."""


_Positive = Annotated[float, Field(gt=0)]


@checked
class LinkStatistics:
    """The statistics of one kind of link; rates are those of the down link while there is a link."""

    mean_bytes_per_s: _Positive
    deviation_bytes_per_s: _Positive
    min_bytes_per_s: _Positive
    max_bytes_per_s: _Positive
    # In which the autocorrelation of the rate's logarithm falls to 1/e.
    correlation_s: _Positive
    # The share of time without a link, and the mean length of an outage.
    outage_share: Annotated[float, Field(ge=0, le=0.5)]
    outage_s: _Positive
    up_down_ratio: _Positive
    up_down_correlation: Annotated[float, Field(ge=0, le=1)]
    # One way.
    latency_s: Annotated[float, Field(ge=0)]

    def check(self) -> None:
        """Raise `ConfigError` for limits without the mean between them, or too narrow for the deviation."""
        least = self.min_bytes_per_s
        mean = self.mean_bytes_per_s
        most = self.max_bytes_per_s
        if not least < mean < most:
            raise ConfigError(f"need min < mean < max, got {least}, {mean}, {most} bytes/s")
        # A distribution between two limits has at most this deviation; near it no log-normal one fits.
        widest = math.sqrt((most - mean) * (mean - least))
        require_range(
            "",
            below=0.9 * widest,
            deviation_bytes_per_s=self.deviation_bytes_per_s,
        )


@cache
def statistics_table() -> Mapping[str, Any]:
    """Return the content of the file, sources included."""
    file = resources.files("socflower.edgecloud.links").joinpath("profile_statistics.toml")
    return tomllib.loads(file.read_text("utf-8"))


def link_statistics(kind: str) -> LinkStatistics:
    """Return the statistics of a kind; `ConfigError` names the closest kind if there is none of that name."""
    tables = statistics_table()["kind"]
    if kind not in tables:
        hint = did_you_mean(kind, tables, f"there are {', '.join(tables)}")
        raise ConfigError(f"link kind {kind!r} is unknown; {hint}")
    names = [key.name for key in fields(LinkStatistics)]
    return LinkStatistics(**{name: float(tables[kind][name]["value"]) for name in names})


@plain_numbers
def generate_bandwidth_profile(
    kind: str, seed: int, duration_s: float, step_s: float = 1.0
) -> BandwidthProfile:
    """Return a profile for a kind of link that repeats after `duration_s`; equal arguments give equal profiles.

    Raises `ConfigError` for an unknown kind, and for a duration that is no whole number of steps.
    """
    return generate_from_statistics(link_statistics(kind), seed, duration_s, step_s)


def generate_from_statistics(
    figures: LinkStatistics,
    seed: int,
    duration_s: float,
    step_s: float = 1.0,
) -> BandwidthProfile:
    """Return a profile with the given statistics; see `generate_bandwidth_profile`."""
    require_range(
        "bandwidth profile",
        above=0,
        step_s=step_s,
        duration_s=duration_s,
    )
    require_range("bandwidth profile", least=0, seed=seed)
    num_steps = round(duration_s / step_s)
    if num_steps < 1 or not math.isclose(
        num_steps * step_s,
        duration_s,
        rel_tol=1e-9,
    ):
        raise ConfigError(
            f"bandwidth profile: duration_s = {duration_s} must be a whole number of steps of {step_s} s"
        )
    # One random stream each, so that a longer profile begins like a shorter one of the same seed.
    down_noise, up_noise, outage_noise = (
        np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3)
    )
    phi = math.exp(-step_s / figures.correlation_s)
    shared = figures.up_down_correlation
    down_e = down_noise.standard_normal(num_steps)
    up_e = shared * down_e + math.sqrt(1 - shared * shared) * up_noise.standard_normal(num_steps)
    limits = (figures.min_bytes_per_s, figures.max_bytes_per_s)
    mu, sigma = _log_moments(figures.mean_bytes_per_s, figures.deviation_bytes_per_s, *limits)
    there = _link_is_up(outage_noise.random(num_steps), figures, step_s)
    times_s = tuple(index * step_s for index in range(num_steps))

    def steps(noise: NDArray[np.float64], scale: float) -> RateSteps:
        rates = np.clip(np.exp(mu + sigma * _autoregressive(noise, phi)), *limits)
        return RateSteps(times_s, tuple((scale * (there * rates)).tolist()), duration_s)

    up = steps(up_e, figures.up_down_ratio)
    down = steps(down_e, 1.0)
    return BandwidthProfile(up, down, figures.latency_s)


def add_jitter(
    link: BandwidthProfile,
    deviation: float,
    seed: int,
    *,
    duration_s: float,
    step_s: float = 1.0,
) -> BandwidthProfile:
    """Return a profile whose rates scatter around those of `link`; equal arguments give equal profiles.

    In each step a rate is multiplied by exp(sigma z_i - sigma^2/2) with the AR(1) process z_i of the module's
    docstring: the factor's mean is 1 and its standard deviation `deviation`; each direction has its own process.
    A lost link remains lost. A profile that repeats does so after the same time, with the same scatter. If the last
    rate never ends, the first `duration_s` seconds scatter. Raises `ConfigError` for a deviation below 0.
    """
    require_range("bandwidth profile", least=0, jitter=deviation)
    if deviation == 0:
        return link
    sigma = math.sqrt(math.log1p(deviation * deviation))
    phi = math.exp(-step_s / JITTER_CORRELATION_S)
    streams = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    up, down = (
        _scattered(steps, sigma, phi, stream, min(duration_s, steps.end_s), step_s)
        for steps, stream in zip((link.up, link.down), streams, strict=True)
    )
    return BandwidthProfile(up, down, link.latency_s)


def _scattered(
    steps: RateSteps,
    sigma: float,
    phi: float,
    stream: np.random.Generator,
    until_s: float,
    step_s: float,
) -> RateSteps:
    noise = _autoregressive(stream.standard_normal(math.ceil(until_s / step_s)), phi)
    factors = np.exp(sigma * noise - sigma * sigma / 2)
    ticks = {index * step_s: float(factor) for index, factor in enumerate(factors)}
    # A rate holds until its own next change or the next tick.
    ends_s = {until_s} if until_s < steps.end_s else set()
    times_s = sorted({*ticks, *steps.times_s} | ends_s)
    rates: list[float] = []
    factor = 1.0
    for time_s in times_s:
        factor = ticks.get(time_s, factor) if time_s < until_s else 1.0
        rates.append(steps.rate(time_s) * factor)
    return RateSteps(tuple(times_s), tuple(rates), steps.end_s)


def _autoregressive(noise: NDArray[np.float64], phi: float) -> NDArray[np.float64]:
    """Return an AR(1) process of unit variance, stationary from its first value on."""
    fresh = math.sqrt(1 - phi * phi)
    values = np.empty_like(noise)
    last = values[0] = float(noise[0])
    for index in range(1, len(noise)):
        last = phi * last + fresh * float(noise[index])
        values[index] = last
    return values


def _link_is_up(
    noise: NDArray[np.float64], figures: LinkStatistics, step_s: float
) -> NDArray[np.bool_]:
    """Return for every step whether the link is up; outages last one or more whole steps."""
    ends = min(1.0, step_s / figures.outage_s)
    begins = ends * figures.outage_share / (1 - figures.outage_share)
    there = np.empty(len(noise), dtype=np.bool_)
    is_there = bool(noise[0] >= figures.outage_share)
    there[0] = is_there
    for index in range(1, len(noise)):
        is_there = bool(noise[index] >= begins) if is_there else bool(noise[index] < ends)
        there[index] = is_there
    return there


@cache
def _log_moments(
    mean: float,
    deviation: float,
    least: float,
    most: float,
) -> tuple[float, float]:
    """Return mu and sigma of the log-normal distribution whose clipped values have this mean and deviation."""
    low = 1e-6
    high = 10.0
    for _ in range(_HALVINGS):
        sigma = (low + high) / 2
        mu = _mu(sigma, mean, least, most)
        if _clipped_moment(mu, sigma, least, most, 2) - mean * mean < deviation * deviation:
            low = sigma
        else:
            high = sigma
    return mu, sigma


def _mu(sigma: float, mean: float, least: float, most: float) -> float:
    """Return the mu at which the clipped mean is `mean`; it rises with mu."""
    low = math.log(least) - 10 * sigma
    high = math.log(most) + 10 * sigma
    for _ in range(_HALVINGS):
        mu = (low + high) / 2
        low, high = (mu, high) if _clipped_moment(mu, sigma, least, most, 1) < mean else (low, mu)
    return (low + high) / 2


def _clipped_moment(
    mu: float,
    sigma: float,
    least: float,
    most: float,
    power: int,
) -> float:
    """Return E[clip(exp(mu + sigma Z), least, most)^power] of a standard normal Z."""
    below = (math.log(least) - mu) / sigma
    above = (math.log(most) - mu) / sigma
    shift = power * sigma
    inside = math.exp(min(700.0, power * mu + shift * shift / 2)) * (
        _NORMAL.cdf(above - shift) - _NORMAL.cdf(below - shift)
    )
    return least**power * _NORMAL.cdf(below) + most**power * (1 - _NORMAL.cdf(above)) + inside
