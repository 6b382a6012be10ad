"""RegionCache against a model of its contract."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.precision.int8.region_cache import RegionCache
from tests.one_line import refused

SIZES = {"a": 10, "b": 20, "c": 5, "d": 40, "e": 0, "f": 33}
operations = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["acquire", "acquire", "release"]), st.sampled_from(sorted(SIZES))
        ),
        st.just(("release all", "")),
    ),
    max_size=60,
)


@settings(max_examples=80)
@given(operations, st.one_of(st.none(), st.integers(30, 110)), st.booleans())
def test_any_sequence_keeps_the_budget_and_evicts_the_most_recently_used(operations, budget, reuse):
    cache = RegionCache(budget_bytes=budget, reuse=reuse)
    in_use, idle, contents = {}, [], {}  # idle: most recently used last
    built = evicted = 0
    for operation, key in operations:
        if operation == "release all":
            released = [k for k in contents if k in in_use]
            cache.release_all()
        elif operation == "release":
            released = [key] if key in in_use else []
            cache.release(key)
        else:
            released = []
            victims = []
            held = sum(SIZES[k] for k in contents)
            if key not in contents and budget is not None:
                while held + SIZES[key] > budget and len(victims) < len(idle):
                    victims.append(idle[-1 - len(victims)])
                    held -= SIZES[victims[-1]]
            lacks = budget is not None and key not in contents and held + SIZES[key] > budget
            evicted += len(victims)
            for victim in victims:
                idle.remove(victim)
                del contents[victim]
            if lacks:
                acquire = partial(cache.acquire, key, SIZES[key], object)
                refused(acquire, budget, f"{held} bytes", key, SIZES[key], held + SIZES[key])
            else:
                content = cache.acquire(key, SIZES[key], object)
                built += key not in contents
                assert (
                    contents.setdefault(key, content) is content
                )  # what is held is not built again
                if key in idle:
                    idle.remove(key)
                in_use[key] = True
        for one in released:
            del in_use[one]
            if reuse:
                idle.append(one)
            else:
                del contents[one]
        assert cache.held_bytes == sum(SIZES[k] for k in contents)
        assert (cache.num_built, cache.num_evicted) == (built, evicted)
        assert budget is None or cache.held_bytes <= cache.peak_bytes <= budget


def test_walking_in_the_same_order_reuses_what_fits():
    """The most recently used region is the one whose next use lies furthest ahead, so evicting it wastes least."""
    cache = RegionCache(budget_bytes=3)
    for _ in range(10):
        for key in range(4):
            cache.acquire(key, 1, object)
            cache.release(key)
    assert cache.num_built <= 4 + 9 * 2  # least recently used first would build all 40


def test_a_failing_build_leaves_the_cache_as_it_was():
    cache = RegionCache(budget_bytes=100)

    def fail():
        raise MemoryError

    with pytest.raises(MemoryError):
        cache.acquire("x", 60, fail)
    assert cache.held_bytes == cache.num_built == 0
    assert cache.acquire("x", 60, lambda: "built") == "built"
