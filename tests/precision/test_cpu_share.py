"""The CPU's share of a batch: what F9 to F11 promise, for every alpha and beta."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.precision.cpu_share import (
    MIXING_RULES,
    RULES_BY_THROUGHPUT,
    compute_power_ratio,
    confidence,
    cpu_samples,
    cpu_share,
    most_speedup,
    without_single,
)
from tests.one_line import refused

FIXED = {"fp32": 1.0, "int8": 0.0, "half": 0.5}

many = settings(max_examples=80)
fractions = st.floats(0.0, 1.0)
followers = st.sampled_from(RULES_BY_THROUGHPUT)
throughputs = st.floats(1e-6, 1e15)


# ---------------------------------------------------------------------------------------------- gamma (F11)


@many
@given(followers, fractions, fractions, fractions, fractions)
def test_more_confidence_or_a_faster_npu_never_give_the_cpu_more(
    rule, alpha, higher_alpha, beta, higher_beta
):
    alpha, higher_alpha = sorted((alpha, higher_alpha))
    beta, higher_beta = sorted((beta, higher_beta))
    assert cpu_share(rule, higher_alpha, higher_beta) <= cpu_share(rule, alpha, beta)


@many
@given(fractions, fractions)
def test_gamma_is_the_larger_of_its_two_terms(alpha, beta):
    """F11; the paper is never more than e = 2.72 times faster than the CPU, however fast the NPU."""
    floor = math.exp(-alpha)
    least = math.exp(-1.0)
    paper, normalised = (cpu_share(rule, alpha, beta) for rule in RULES_BY_THROUGHPUT)
    assert paper == pytest.approx(max(floor, 1.0 - beta), rel=1e-15)
    expected = max((floor - least) / (1.0 - least), 1.0 - beta)
    assert normalised == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert 1.0 - beta <= normalised <= paper <= 1.0
    for rule, share in FIXED.items():
        assert cpu_share(rule, alpha, beta) == share
    assert set(MIXING_RULES) == {*FIXED, *RULES_BY_THROUGHPUT}


@many
@given(st.sampled_from(MIXING_RULES), st.floats(-1e300, 1e300), fractions)
def test_alpha_is_clamped_to_0_to_1(rule, alpha, beta):
    assert cpu_share(rule, alpha, beta) == cpu_share(rule, min(1.0, max(0.0, alpha)), beta)


def test_the_fastest_of_each_rule():
    assert [most_speedup(rule) for rule in MIXING_RULES] == [
        pytest.approx(math.e, rel=1e-15),
        math.inf,
        1.0,
        math.inf,
        2.0,
    ]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: cpu_share("paper", math.nan, 0.5), ("alpha = nan",)),
        (lambda: cpu_share("normalised", 0.5, math.nan), ("beta = nan",)),
        (lambda: cpu_share("paper", 0.5, -0.01), ("beta = -0.01",)),
        (lambda: cpu_share("paper", 0.5, 1.01), ("beta = 1.01",)),
        (lambda: cpu_share("quarter", 0.5, 0.5), ("'quarter'", *MIXING_RULES)),
        (lambda: confidence(np.ones((3, 2)), np.ones((2, 3))), ("(3, 2)", "(2, 3)")),
        (lambda: confidence(np.ones(3), np.ones(3)), ("(3,)",)),
        (lambda: confidence(np.ones((0, 4)), np.ones((0, 4))), ("(0, 4)",)),
        *(
            (lambda npu=npu, cpu=cpu: compute_power_ratio(npu, cpu), (npu, cpu))
            for npu, cpu in (
                (1.0, 0.0),
                (-1.0, 1.0),
                (math.nan, 2.0),
                (2.0, math.nan),
                (math.inf, 1.0),
                (1.0, math.inf),
            )
        ),
    ],
)
def test_impossible_numbers_are_refused(call, named):
    refused(call, *named)


# ----------------------------------------------------------------------------------------------- beta (F10)


@many
@given(throughputs, throughputs, st.floats(1e-3, 1e3))
def test_beta_lies_in_0_to_1_and_has_no_unit(npu, cpu, factor):
    """At 1 - beta both take equally long, so it is the least that the CPU ever gets: below it, it would wait (F10)."""
    beta = compute_power_ratio(npu, cpu)
    assert 0.0 <= beta <= 1.0
    assert compute_power_ratio(npu * factor, cpu * factor) == pytest.approx(beta, rel=1e-12)
    assert beta == pytest.approx(1.0 - compute_power_ratio(cpu, npu), abs=1e-15)
    assert (1.0 - beta) * npu == pytest.approx(beta * cpu, rel=1e-9, abs=1e-15 * max(npu, cpu))
    assert compute_power_ratio(0.0, cpu) == 0.0


# ---------------------------------------------------------------------------------------------- alpha (F9)


def logits(seed, samples, classes):
    return np.random.default_rng(seed).standard_normal((samples, classes)).astype(np.float32)


shapes = (st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 12))


@many
@given(*shapes, st.floats(-30, 30))
def test_confidence_is_1_for_equal_logits_at_any_positive_scale_of_each_sample(
    seed, samples, classes, exponent
):
    fp32 = logits(seed, samples, classes)
    scales = np.random.default_rng(seed).uniform(0.1, 10.0, (samples, 1)) * 10.0**exponent
    assert confidence(fp32, fp32 * scales) == pytest.approx(1.0, abs=1e-12)
    assert confidence(fp32, -fp32) == 0.0


@many
@given(*shapes, st.floats(-2, 2))
def test_confidence_is_the_mean_cosine_where_that_is_positive(seed, samples, classes, bias):
    fp32 = logits(seed, samples, classes) + bias
    int8 = logits(seed + 1, samples, classes)
    cosines = [
        sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
        for a, b in zip(fp32.tolist(), int8.tolist(), strict=True)
    ]
    assert confidence(fp32, int8) == pytest.approx(max(0.0, math.fsum(cosines) / samples), abs=1e-9)


@many
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(2, 12),
    st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
)
def test_samples_that_have_no_direction_count_as_0(seed, good, bad, classes, value):
    """alpha = 0 for NaN, infinity and zeros; among others they pull the mean down by their part of the samples."""
    fp32 = logits(seed, good + bad, classes)
    int8 = fp32.copy()
    int8[good:] = 0.0
    int8[good:, seed % classes] = value
    assert confidence(fp32[good:], int8[good:]) == 0.0
    assert confidence(int8[good:], fp32[good:]) == 0.0
    assert confidence(fp32, int8) == pytest.approx(good / (good + bad), abs=1e-12)


# ------------------------------------------------------------------------------------------- whole samples


@many
@given(st.integers(0, 10_000), fractions, fractions)
def test_the_cpu_takes_gamma_of_the_samples_within_half_a_sample(num_samples, gamma, larger):
    gamma, larger = sorted((gamma, larger))
    on_cpu = cpu_samples(num_samples, gamma)
    assert isinstance(on_cpu, int)
    assert 0 <= on_cpu <= cpu_samples(num_samples, larger) <= num_samples
    assert abs(on_cpu - gamma * num_samples) <= 0.5
    assert cpu_samples(num_samples, 1.0) == num_samples


@many
@given(st.integers(0, 10_000), fractions, fractions)
def test_the_cpu_takes_no_less_than_the_floor(num_samples, gamma, floor):
    on_cpu = cpu_samples(num_samples, gamma, floor)
    assert floor * num_samples - 1e-9 <= on_cpu <= num_samples
    assert on_cpu >= cpu_samples(num_samples, gamma)


@many
@given(st.integers(0, 60), fractions)
def test_no_part_is_of_one_sample_and_the_cpu_never_gets_less(num_samples, gamma):
    """Against the fewest samples at or above its own with which neither part is of one."""
    on_cpu = cpu_samples(num_samples, gamma)
    found = without_single(on_cpu, num_samples)
    fits = [n for n in range(on_cpu, num_samples + 1) if 1 not in (n, num_samples - n)]
    assert found == min(fits, default=on_cpu)
