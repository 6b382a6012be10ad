"""Training algorithms as data."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.precision import ADAPTIVE_FIXED_POINT, ALGORITHMS, NITI
from socflower.precision.algorithm import Fp32Update, IntegerUpdate, Rounding, int8_algorithm


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": (5, 4)}, "one start per number of bits"),
        ({"bits": (), "starts": ()}, "one start per number of bits"),
        ({"bits": (5,), "starts": (0.1,)}, "the first 0"),
        ({"bits": (-9,), "starts": (0.0,)}, "must be -8 to 7"),
        ({"bits": (8,), "starts": (0.0,)}, "must be -8 to 7"),
        ({"starts": (0.0, 0.8, 0.5)}, "must rise"),
        ({"starts": (0.0, 0.5, 1.0)}, "to below 1"),
    ],
)
def test_an_integer_update_refuses_what_cannot_be(arguments, message):
    with pytest.raises(ConfigError, match=message):
        IntegerUpdate(**arguments)


def test_gradient_bits_reach_from_minus_8_to_7():
    update = IntegerUpdate(bits=(7, -8), starts=(0.0, 0.5))
    assert (update.bits_at(0.0), update.bits_at(1.0)) == (7, -8)


def test_an_algorithm_takes_the_setting_that_its_update_has():
    assert int8_algorithm("niti", momentum=0.0) == NITI
    assert int8_algorithm("niti", gradient_bits=(2, 1, 0)).update == IntegerUpdate(bits=(2, 1, 0))
    assert int8_algorithm("adaptive-fixed-point", momentum=0.9).update == Fp32Update(momentum=0.9)
    with pytest.raises(
        ConfigError, match="int8 algorithm 'octo' is unknown, known are niti, adaptive-fixed-point"
    ):
        int8_algorithm("octo")
    with pytest.raises(ConfigError, match="one start per number of bits"):
        int8_algorithm("niti", gradient_bits=(5,))


def test_an_algorithm_refuses_a_setting_that_its_update_has_not():
    with pytest.raises(
        ConfigError, match=r"niti: .* no momentum, got 0.9; use momentum 0, or adaptive-fixed-point"
    ):
        int8_algorithm("niti", momentum=0.9)
    with pytest.raises(
        ConfigError, match=r"adaptive-fixed-point: .* no gradient bits; leave gradient_bits out"
    ):
        int8_algorithm("adaptive-fixed-point", gradient_bits=(5, 4, 3))


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_a_momentum_lies_in_0_to_1(momentum):
    with pytest.raises(ConfigError, match=r"momentum = .* must be 0 or more and below 1"):
        Fp32Update(momentum=momentum)


def test_weights_and_update_must_fit():
    with pytest.raises(ConfigError, match="int8 weights take an IntegerUpdate"):
        dataclasses.replace(NITI, update=Fp32Update())
    with pytest.raises(ConfigError, match="fp32 weights another update"):
        dataclasses.replace(ADAPTIVE_FIXED_POINT, update=IntegerUpdate())
