"""Who trains in the next round when SoCs are spare: as many as can, the quickest, and no needless change."""

from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import parse_cluster
from socflower.hierarchy.group_preemption import GROUPS, SOCS
from socflower.hierarchy.spare_socs import FASTER, spares_fault, with_stand_ins

_RATES = st.sampled_from([0.25, 0.5, 0.95, 1.0, 1.05, 2.0])


@settings(max_examples=50)
@given(
    boards=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
)
def test_as_many_as_can_train_and_none_is_much_slower_than_a_spare_one(
    boards: list[int], data: st.DataObject
) -> None:
    cluster = parse_cluster({"boards": boards})
    everyone = range(cluster.num_socs)
    whole = data.draw(st.sets(st.sampled_from(everyone), min_size=1))
    training = data.draw(st.sets(st.sampled_from(everyone), max_size=len(whole)))
    free = data.draw(st.sets(st.sampled_from(everyone)))
    rates = data.draw(st.lists(_RATES, min_size=len(everyone), max_size=len(everyone)))
    chosen = with_stand_ins(
        cluster, sorted(whole), sorted(training), sorted(free), rates.__getitem__
    )
    assert set(chosen) <= free
    assert len(chosen) == len(set(chosen)) == min(len(whole), len(free))
    spare = free.difference(chosen)
    slowest = min((rates[soc] for soc in chosen), default=0.0)
    assert all(rates[soc] <= FASTER * slowest for soc in spare)
    # Who left although it is free made room for a SoC that is so much faster.
    for left in (training & free).difference(chosen):
        new = set(chosen).difference(training)
        assert any(rates[soc] > FASTER * rates[left] for soc in new)


def test_a_soc_of_the_same_board_is_preferred() -> None:
    cluster = parse_cluster({"boards": [2, 2, 2]})
    chosen = with_stand_ins(cluster, [0, 2], [0, 2], [0, 1, 3, 4, 5], lambda soc: 1.0)
    assert chosen == [0, 3]


def test_nothing_changes_while_all_are_there_and_about_equally_fast() -> None:
    cluster = parse_cluster({"boards": [4]})
    rates = [1.0, 1.0, 1.05, 1.09]
    assert with_stand_ins(cluster, [0, 1], [0, 1], range(4), rates.__getitem__) == [0, 1]


def test_what_leaves_no_use_for_spare_socs_is_named() -> None:
    assert not spares_fault(2, reshuffle=True, preemption=SOCS)
    assert "spare" in spares_fault(0, reshuffle=True, preemption=SOCS)
    assert "reshuffle" in spares_fault(2, reshuffle=False, preemption=SOCS)
    assert "preemption" in spares_fault(2, reshuffle=True, preemption=GROUPS)
