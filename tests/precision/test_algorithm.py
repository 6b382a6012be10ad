"""Training algorithms as data."""

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.precision import ADAPTIVE_FIXED_POINT, ALGORITHMS, NITI
from socflower.precision.algorithm import (
    ADAPTIVE_INT16,
    MLS_FORMAT,
    RELATIVE_NITI,
    BackwardRule,
    Fp32Update,
    IntegerUpdate,
    OperatorTranslation,
    OutsideUpdate,
    Rounding,
    int8_algorithm,
)
from tests.one_line import refused


def test_the_published_algorithms():
    assert {"niti", "adaptive-fixed-point"} <= set(ALGORITHMS)
    assert NITI.update == IntegerUpdate(
        bits=(5, 4, 3), starts=(0.0, 0.5, 0.75), rounding=Rounding.PSEUDO_STOCHASTIC
    )
    assert ALGORITHMS["adaptive-fixed-point"] is ADAPTIVE_FIXED_POINT
    assert isinstance(ADAPTIVE_FIXED_POINT.update, Fp32Update)


@given(st.floats(0.0, 1.0))
def test_gradient_bits_follow_niti(progress):
    """F18: 5, then 4 from half, then 3 from three quarters of training."""
    expected = 5 if progress < 0.5 else 4 if progress < 0.75 else 3
    assert NITI.update.bits_at(progress) == expected


@given(st.floats(0.0, 1.0), st.integers(0, 2**53), st.integers(0, 2**40))
def test_a_relative_step_is_the_finest_within_its_part_of_the_weights(progress, gradient, weights):
    """By counting up, to 30 bits."""
    most = RELATIVE_NITI.update.relative * (1 - progress) * weights
    fits = [shift for shift in range(31) if gradient <= most * 2.0**shift]
    shift = RELATIVE_NITI.update.relative_shift(progress, gradient, weights)
    assert shift == min(fits, default=30)


def test_gradient_bits_reach_from_minus_8_to_7():
    update = IntegerUpdate(bits=(7, -8), starts=(0.0, 0.5))
    assert (update.bits_at(0.0), update.bits_at(1.0)) == (7, -8)


def test_an_algorithm_takes_the_setting_that_its_update_has():
    assert int8_algorithm("niti", momentum=0.0) == NITI
    assert int8_algorithm("niti", gradient_bits=(2, 1, 0)).update == IntegerUpdate(bits=(2, 1, 0))
    assert int8_algorithm("adaptive-fixed-point", momentum=0.9).update == Fp32Update(momentum=0.9)


@pytest.mark.parametrize(
    ("make", "settings", "named"),
    [
        *(
            (IntegerUpdate, settings, settings.values())
            for settings in (
                {"bits": (5, 4)},
                {"bits": (), "starts": ()},
                {"bits": (5,), "starts": (0.1,)},
                {"bits": (-9, 5, 5)},
                {"bits": (8, 5, 5)},
                {"starts": (0.0, 0.8, 0.5)},
                {"starts": (0.0, 0.5, 1.0)},
            )
        ),
        (Fp32Update, {"gradient_bits": 8}, ("gradient_bits", 8)),
        (Fp32Update, {"weight_bits": 25}, ("weight_bits", 25)),
        *((Fp32Update, {"momentum": each}, ("momentum", each)) for each in (-0.1, 1.0, math.nan)),
        (IntegerUpdate, {"relative": 0.01}, ("relative", (5, 4, 3))),
        (IntegerUpdate, {"relative": 0.0, "bits": (), "starts": ()}, ("relative", 0.0)),
        (int8_algorithm, {"name": "mls"}, ("mls", *ALGORITHMS)),
        (int8_algorithm, {"name": "niti-relative", "gradient_bits": (5, 4, 3)}, ("(5, 4, 3)",)),
        (int8_algorithm, {"name": "niti", "gradient_bits": (5,)}, ("(5,)",)),
        (int8_algorithm, {"name": "niti", "momentum": 0.9}, ("0.9", "momentum", "niti")),
        (
            int8_algorithm,
            {"name": "adaptive-fixed-point", "gradient_bits": (5, 4, 3)},
            ("gradient_bits", "niti"),
        ),
        (partial(replace, NITI), {"update": Fp32Update()}, ("niti", "IntegerUpdate")),
        *(
            (partial(replace, NITI), {"forward": OperatorTranslation(reach=each)}, ("reach", each))
            for each in (0.0, 1.1, math.nan)
        ),
        (partial(replace, NITI), {"backward": BackwardRule(wide_above=0.5)}, ("wide_above", 0.5)),
        *(
            (
                partial(replace, MLS_FORMAT),
                {"backward": BackwardRule(mantissa_bits=each)},
                ("mls-format", "mantissa_bits", each),
            )
            for each in (0, 5)
        ),
        (
            partial(replace, MLS_FORMAT),
            {"update": OutsideUpdate()},
            ("mantissa_bits", "Fp32Update"),
        ),
        (
            partial(replace, ADAPTIVE_INT16),
            {"backward": replace(ADAPTIVE_INT16.backward, mantissa_bits=4)},
            ("mantissa_bits", "wide_above"),
        ),
        (partial(replace, ADAPTIVE_FIXED_POINT), {"update": IntegerUpdate()}, ("IntegerUpdate",)),
    ],
)
def test_what_an_algorithm_has_not_or_cannot_be_is_refused(make, settings, named):
    refused(lambda: make(**settings), *named)
