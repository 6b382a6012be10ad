"""The CPU's share of a batch: what F9 to F11 promise, for every alpha and beta."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.precision.cpu_share import (
    MIXING_RULES,
    RULES_BY_THROUGHPUT,
    compute_power_ratio,
    confidence,
    cpu_samples,
    cpu_share,
    most_speedup,
)

FIXED = {"fp32": 1.0, "int8": 0.0, "half": 0.5}

many = settings(max_examples=80)
fractions = st.floats(0.0, 1.0)
followers = st.sampled_from(RULES_BY_THROUGHPUT)
throughputs = st.floats(1e-6, 1e15)


# ---------------------------------------------------------------------------------------------- gamma (F11)


@many
@given(followers, fractions, fractions)
def test_gamma_lies_in_1_minus_beta_to_1(rule, alpha, beta):
    assert 1.0 - beta <= cpu_share(rule, alpha, beta) <= 1.0


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
def test_gamma_of_the_paper_is_the_larger_of_its_two_terms(alpha, beta):
    assert cpu_share("paper", alpha, beta) == pytest.approx(
        max(math.exp(-alpha), 1.0 - beta), rel=1e-15
    )


@many
@given(fractions, fractions)
def test_the_paper_is_never_more_than_e_times_faster_than_the_cpu(alpha, beta):
    """2.72 and no more, however fast the NPU (F11)."""
    assert cpu_share("paper", alpha, beta) >= math.exp(-1.0)
    assert 1.0 / cpu_share("paper", alpha, beta) <= most_speedup("paper")
    assert most_speedup("paper") == pytest.approx(math.e, rel=1e-15)


@many
@given(fractions, fractions)
def test_normalised_gives_the_cpu_no_more_than_the_paper_and_spans_all_of_0_to_1(alpha, beta):
    assert cpu_share("normalised", alpha, beta) <= cpu_share("paper", alpha, beta)
    assert cpu_share("normalised", 0.0, beta) == cpu_share("paper", 0.0, beta) == 1.0
    assert cpu_share("normalised", 1.0, beta) == 1.0 - beta
    assert most_speedup("normalised") == math.inf


@many
@given(st.sampled_from(MIXING_RULES), st.floats(-1e300, 1e300), fractions)
def test_alpha_is_clamped_to_0_to_1(rule, alpha, beta):
    assert cpu_share(rule, alpha, beta) == cpu_share(rule, min(1.0, max(0.0, alpha)), beta)


@many
@given(st.sampled_from(sorted(FIXED)), fractions, fractions)
def test_the_ablation_has_fixed_shares(rule, alpha, beta):
    assert cpu_share(rule, alpha, beta) == FIXED[rule]
    assert set(MIXING_RULES) == {*FIXED, *RULES_BY_THROUGHPUT}


def test_the_fastest_of_each_fixed_share():
    assert [most_speedup(rule) for rule in ("fp32", "half", "int8")] == [1.0, 2.0, math.inf]


@pytest.mark.parametrize(
    ("alpha", "beta"), [(math.nan, 0.5), (0.5, math.nan), (0.5, -0.01), (0.5, 1.01)]
)
@pytest.mark.parametrize("rule", RULES_BY_THROUGHPUT)
def test_what_is_no_confidence_or_no_ratio_is_refused_with_the_numbers(rule, alpha, beta):
    with pytest.raises(
        ConfigError, match=rf"alpha = {alpha} must be a number and beta = {beta} lie in"
    ):
        cpu_share(rule, alpha, beta)


def test_an_unknown_rule_is_refused_with_those_there_are():
    with pytest.raises(
        ConfigError, match="'quarter' is unknown; use one of paper, normalised, fp32, int8, half"
    ):
        cpu_share("quarter", 0.5, 0.5)


# ----------------------------------------------------------------------------------------------- beta (F10)


@many
@given(throughputs, throughputs)
def test_beta_of_a_and_b_is_1_minus_beta_of_b_and_a(a, b):
    assert compute_power_ratio(a, b) == pytest.approx(1.0 - compute_power_ratio(b, a), abs=1e-15)


@many
@given(throughputs, throughputs, st.floats(1e-3, 1e3))
def test_beta_lies_in_0_to_1_and_has_no_unit(npu, cpu, factor):
    beta = compute_power_ratio(npu, cpu)
    assert 0.0 <= beta <= 1.0
    assert compute_power_ratio(npu * factor, cpu * factor) == pytest.approx(beta, rel=1e-12)


@many
@given(throughputs, throughputs)
def test_at_1_minus_beta_both_processors_take_equally_long(npu, cpu):
    """That is why 1 - beta is the least that the CPU ever gets: below it, it would wait."""
    beta = compute_power_ratio(npu, cpu)
    assert (1.0 - beta) * npu == pytest.approx(beta * cpu, rel=1e-9, abs=1e-15 * max(npu, cpu))


@given(throughputs)
def test_without_an_npu_beta_is_0_and_the_cpu_does_all(cpu):
    assert compute_power_ratio(0.0, cpu) == 0.0
    assert all(cpu_share(rule, 1.0, 0.0) == 1.0 for rule in RULES_BY_THROUGHPUT)


@pytest.mark.parametrize(
    ("npu", "cpu"),
    [
        (1.0, 0.0),
        (-1.0, 1.0),
        (1.0, -1.0),
        (math.nan, 1.0),
        (1.0, math.nan),
        (math.inf, 1.0),
        (1.0, math.inf),
    ],
)
def test_impossible_throughputs_are_refused(npu, cpu):
    with pytest.raises(ConfigError, match=rf"got {npu} and {cpu} samples a second"):
        compute_power_ratio(npu, cpu)


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
    assert confidence(fp32, fp32) == pytest.approx(1.0, abs=1e-12)
    assert confidence(fp32, fp32 * scales) == pytest.approx(1.0, abs=1e-12)


@many
@given(*shapes, st.floats(-2, 2))
def test_confidence_lies_in_0_to_1_and_does_not_depend_on_the_order(seed, samples, classes, bias):
    fp32, int8 = logits(seed, samples, classes) + bias, logits(seed + 1, samples, classes)
    alpha = confidence(fp32, int8)
    assert 0.0 <= alpha <= 1.0
    order = np.random.default_rng(seed).permutation(samples)
    assert confidence(int8[order], fp32[order]) == pytest.approx(alpha, abs=1e-12)


@many
@given(*shapes)
def test_confidence_is_the_mean_cosine_where_that_is_positive(seed, samples, classes):
    fp32, int8 = logits(seed, samples, classes), logits(seed + 1, samples, classes)
    cosines = [
        sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
        for a, b in zip(fp32.tolist(), int8.tolist(), strict=True)
    ]
    assert confidence(fp32, int8) == pytest.approx(max(0.0, math.fsum(cosines) / samples), abs=1e-9)
    assert confidence(fp32, -fp32) == 0.0


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


@pytest.mark.parametrize(
    ("one", "other"), [((3, 2), (2, 3)), ((3,), (3,)), ((0, 4), (0, 4)), ((2, 2, 2), (2, 2, 2))]
)
def test_logits_that_cannot_be_compared_are_refused_with_their_shapes(one, other):
    with pytest.raises(
        ConfigError, match=r"two \(samples, classes\) logits, got \(.*\) and \(.*\)"
    ):
        confidence(np.ones(one), np.ones(other))


# ------------------------------------------------------------------------------------------- whole samples


@many
@given(st.integers(0, 10_000), fractions)
def test_the_cpu_takes_gamma_of_the_samples_within_half_a_sample(num_samples, gamma):
    on_cpu = cpu_samples(num_samples, gamma)
    assert isinstance(on_cpu, int)
    assert 0 <= on_cpu <= num_samples
    assert abs(on_cpu - gamma * num_samples) <= 0.5


@many
@given(st.integers(0, 10_000), fractions, fractions)
def test_the_cpu_takes_no_less_than_the_floor(num_samples, gamma, floor):
    on_cpu = cpu_samples(num_samples, gamma, floor)
    assert floor * num_samples - 1e-9 <= on_cpu <= num_samples
    assert on_cpu >= cpu_samples(num_samples, gamma)


@many
@given(st.integers(0, 10_000), fractions, fractions)
def test_a_larger_gamma_never_takes_fewer_samples(num_samples, gamma, larger):
    gamma, larger = sorted((gamma, larger))
    assert cpu_samples(num_samples, gamma) <= cpu_samples(num_samples, larger)
    assert cpu_samples(num_samples, 0.0) == 0
    assert cpu_samples(num_samples, 1.0) == num_samples
