"""Which step devices can return to together, and what has to move for it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from socflower.pipeline.recovery.weight_moves import StageState, backup_of, moves, newest_common
from tests.pipeline.problems import straight_plan

NAMES = "abcdef"
held_states = st.dictionaries(
    st.integers(0, 3),
    st.dictionaries(st.integers(0, 4), st.sets(st.sampled_from(NAMES)), max_size=3),
    min_size=1,
)


@given(held=held_states)
def test_the_newest_step_of_which_all_names_are_there(held: dict[int, dict[int, set[str]]]) -> None:
    step = newest_common(held, NAMES)
    there = [set().union(*(own.get(each, set()) for own in held.values())) for each in range(5)]
    whole = [each for each, names in enumerate(there) if names == set(NAMES)]
    assert step == max(whole, default=None)


@given(
    held=st.dictionaries(
        st.integers(0, 3), st.sets(st.sampled_from(NAMES)), min_size=4, max_size=4
    ),
    needed=st.dictionaries(st.integers(0, 3), st.lists(st.sampled_from(NAMES), unique=True)),
)
def test_moves_bring_each_device_what_it_lacks_once(
    held: dict[int, set[str]], needed: dict[int, list[str]]
) -> None:
    there = set().union(*held.values())
    wanted = {soc: [name for name in names if name in there] for soc, names in needed.items()}
    found = moves(wanted, held, range(4))
    arrived: dict[int, list[str]] = {soc: [] for soc in range(4)}
    for move in found:
        assert set(move.names) <= held[move.source] and move.source != move.target
        arrived[move.target] += move.names
    for soc, names in arrived.items():
        assert sorted(names) == sorted(set(wanted.get(soc, [])) - held[soc])
    assert len({(move.source, move.target) for move in found}) == len(found)


def test_single_devices_are_backed_up_by_the_next_stage_and_the_last_by_the_first() -> None:
    assert backup_of(straight_plan((0, 1, 2), ((4,), (2, 2), (4,)), 2)) == {0: 1, 3: 0}
    assert backup_of(straight_plan((2,), ((4,),), 2)) == {}


def test_a_state_survives_its_bytes_and_joins_its_parts() -> None:
    parameters = {"a": {"momentum_buffer": torch.ones(2)}, "b": {}}
    optimizer = {"parameters": parameters, "groups": [{"lr": 0.1}], "scheduler": None}
    state = StageState(weights={"a": torch.ones(2), "b": torch.zeros(3)}, optimizer=optimizer)
    part = StageState.from_bytes(state.to_bytes(["a"]))
    assert list(part.weights) == ["a"] and list(part.optimizer["parameters"]) == ["a"]
    whole = StageState.from_bytes(state.to_bytes(["b"])).joined(part)
    assert set(whole.weights) == {"a", "b"} == set(whole.optimizer["parameters"])
    assert whole.optimizer["groups"] == [{"lr": 0.1}]
    assert StageState().joined(part).optimizer_bytes() is not None
    assert StageState().optimizer_bytes() is None
