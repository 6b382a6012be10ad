"""beta of mixed precision (F10): profiled once, deaf to noise, renewed when a processor's speed has really changed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.precision.cpu_share import ThroughputRatio

SECONDS = st.floats(1e-6, 1e3)
SAMPLES = st.integers(1, 500)


def note(
    ratio: ThroughputRatio,
    cpu_factor: float = 1.0,
    npu_factor: float = 1.0,
    *,
    of: tuple[float, float],
) -> None:
    """Let both processors do 8 samples, at a multiple of the seconds that each sample took at `of`."""
    ratio.note(cpu=(8, 8 * of[0] * cpu_factor), npu=(8, 8 * of[1] * npu_factor))


@given(cpu_s=SECONDS, npu_s=SECONDS)
def test_beta_is_the_npus_part_of_both_throughputs(cpu_s: float, npu_s: float) -> None:
    beta = ThroughputRatio(cpu_s, npu_s).beta
    assert 0.0 < beta < 1.0
    assert beta == pytest.approx(cpu_s / (cpu_s + npu_s))


@given(noise=st.lists(st.tuples(st.floats(-0.149, 0.149), st.floats(-0.149, 0.149)), max_size=200))
def test_noise_within_the_tolerance_never_moves_beta(noise: list[tuple[float, float]]) -> None:
    ratio = ThroughputRatio(0.02, 0.01)
    for cpu, npu in noise:
        note(ratio, 1.0 + cpu, 1.0 + npu, of=(0.02, 0.01))
        assert (ratio.cpu_s, ratio.npu_s, ratio.num_renewals) == (0.02, 0.01, 0)


@pytest.mark.parametrize("patience", [1, 2, 10])
@pytest.mark.parametrize("factors", [(2.0, 1.0), (1.0, 2.0), (0.2, 1.0), (1.0, 0.2), (3.0, 0.1)])
def test_a_lasting_change_is_taken_up_after_exactly_patience_steps(
    patience: int, factors: tuple[float, float]
) -> None:
    """All these changes pass the tolerance at once: a fifth of the newest step is in the mean."""
    ratio = ThroughputRatio(0.02, 0.01, patience=patience)
    for _ in range(patience):
        assert (ratio.beta, ratio.num_renewals) == (pytest.approx(2 / 3), 0)
        note(ratio, *factors, of=(0.02, 0.01))
    assert ratio.num_renewals == 1
    moved = 1.0 - 0.8**patience  # the smoothed seconds have gone this part of the way
    expected = [1.0 + moved * (factor - 1.0) for factor in factors]
    assert [ratio.cpu_s / 0.02, ratio.npu_s / 0.01] == pytest.approx(expected)


def test_after_a_lasting_change_beta_arrives_at_the_new_speeds_and_stays() -> None:
    ratio = ThroughputRatio(0.02, 0.01)
    renewals = []
    for _ in range(2):
        for _ in range(200):
            note(ratio, 3.0, of=(0.02, 0.01))
        renewals.append(ratio.num_renewals)
    assert ratio.cpu_s == pytest.approx(0.06, rel=0.15)
    assert renewals[0] == renewals[1]


def test_a_return_to_the_reference_starts_the_patience_anew() -> None:
    ratio = ThroughputRatio(0.02, 0.01)
    for _ in range(50):
        for _ in range(5):
            note(ratio, 1.5, of=(0.02, 0.01))  # away for four or five steps
        for _ in range(8):
            note(ratio, 1.0, of=(0.02, 0.01))  # and after three or four within the tolerance again
    assert (ratio.cpu_s, ratio.num_renewals) == (0.02, 0)


def test_both_slowed_alike_leave_beta_where_it_was() -> None:
    ratio = ThroughputRatio(0.02, 0.01)
    for _ in range(100):
        note(ratio, 1.6, 1.6, of=(0.02, 0.01))
        assert ratio.beta == pytest.approx(2 / 3)
    assert ratio.num_renewals >= 1


@given(seconds=st.lists(SECONDS, max_size=40))
def test_a_processor_without_samples_tells_nothing(seconds: list[float]) -> None:
    ratio = ThroughputRatio(0.02, 0.01)
    for each in seconds:
        ratio.note(cpu=(0, each), npu=(4, 0.04))
        ratio.note(cpu=(4, 0.08), npu=(0, each))
    assert (ratio.cpu_s, ratio.npu_s, ratio.num_renewals) == (0.02, 0.01, 0)


@given(
    steps=st.lists(st.tuples(SAMPLES, SECONDS, SAMPLES, SECONDS), max_size=60),
    patience=st.integers(1, 12),
)
def test_the_reference_moves_only_in_renewals_and_those_are_patience_steps_apart(
    steps: list[tuple[int, float, int, float]],
    patience: int,
) -> None:
    ratio = ThroughputRatio(0.02, 0.01, patience=patience)
    at = [0]
    for number, (*cpu, num_npu, npu_s) in enumerate(steps, start=1):
        before = (ratio.cpu_s, ratio.npu_s)
        ratio.note(cpu=tuple(cpu), npu=(num_npu, npu_s))
        assert 0.0 <= ratio.beta <= 1.0
        if ratio.num_renewals < len(at):
            assert (ratio.cpu_s, ratio.npu_s) == before
        else:
            assert number - at[-1] >= patience
            at.append(number)
