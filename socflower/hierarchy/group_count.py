"""The number of groups, chosen by the warm-up heuristic (F2, SoCFlow+ section 3.1)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from socflower.errors import ConfigError, TrainingFailed, require_range
from socflower.plain_numbers import plain_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCountChoice:
    """The chosen number of groups, and the accuracies measured for it."""

    num_groups: int
    # After the first epoch, by number of groups, in the order tried.
    accuracies: Mapping[int, float]
    # The first number of groups whose accuracy fell; None if none did.
    stopped_at: int | None


@plain_numbers
def default_candidates(num_socs: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to `num_socs`: the numbers of groups that the paper's Figure 4 tries.

    Divisors of the number of SoCs are not preferred: groups whose sizes differ by one cost little, and the planner
    minimises the contention. Raises `ConfigError` below one SoC.
    """
    require_range("group count", least=1, num_socs=num_socs)
    return tuple(1 << exponent for exponent in range(num_socs.bit_length()))


@plain_numbers
def choose_group_count(
    candidates: Iterable[int],
    first_epoch_accuracy: Callable[[int], float],
    *,
    relative_drop: float = 0.15,
    floor: float = 0.15,
) -> GroupCountChoice:
    """Return the largest number of groups before first-epoch accuracy drops clearly (F2).

    Candidates are tried in ascending order, each once; the smallest one's accuracy is the reference. The search ends at
    the first candidate whose accuracy is NaN, or more than `relative_drop` (a fraction of the reference) below the
    reference, or below the absolute `floor` while the reference is not. The largest number is best because an epoch
    takes less time with more groups.

    Raises `ConfigError` for no candidates, candidates below 1 and settings outside [0, 1], `TrainingFailed` if
    the reference diverges.
    """
    ordered = sorted(set(candidates))
    if not ordered or ordered[0] < 1:
        raise ConfigError(f"group count: candidates = {ordered} must be numbers of 1 or more")
    require_range("group count", least=0.0, most=1.0, relative_drop=relative_drop, floor=floor)
    reference = first_epoch_accuracy(ordered[0])
    if not reference >= 0.0:
        raise TrainingFailed(
            f"group count: accuracy = {reference} with {ordered[0]} groups; lower the learning rate"
        )
    least = max((1.0 - relative_drop) * reference, floor if reference >= floor else 0.0)
    accuracies, best = {ordered[0]: reference}, ordered[0]
    for num_groups in ordered[1:]:
        accuracies[num_groups] = first_epoch_accuracy(num_groups)
        if not accuracies[num_groups] >= least:
            return GroupCountChoice(num_groups=best, accuracies=accuracies, stopped_at=num_groups)
        best = num_groups
    return GroupCountChoice(num_groups=best, accuracies=accuracies, stopped_at=None)
