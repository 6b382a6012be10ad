"""What devices really send, beside Eqs. 1 and 2."""

import numpy as np
import pytest

from socflower.paper.asteroid.wire_bytes import equations, sent_bytes
from socflower.pipeline.plan import TwoDPlan
from socflower.pipeline.runtime.member import Mini
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime.training import NUM_SAMPLES, data, minis, model, read


def test_all_plans_of_three_devices_send_what_the_equations_say() -> None:
    found = equations()
    for key in ("hybrid pipelines over Eq. 2", "divisions over Eq. 1 with rings"):
        assert (found[f"{key}, least"], found[f"{key}, most"]) == (1.0, 1.0)
    # 2(G − 1)P in place of 2GP, for two and three groups.
    assert 0.5 <= found["divisions over Eq. 1, least"] < found["divisions over Eq. 1, most"] < 1.0


def test_bytes_of_a_hybrid_pipeline_by_hand() -> None:
    """All layers but the last are on two devices: a ring of two sends 2·P, and samples cross there and back."""
    module = model()
    plan = straight_plan((4, 5), ((2, 2), (4,)), 2)
    own = read(module)
    weights = own.model.weight_bytes(0, 4)
    crossing = own.model.layers[4].crossing_bytes * 8
    assert sent_bytes(plan, own, module, data(), minis(2, 8)) == 2 * (2 * weights + 2 * crossing)
    alone = straight_plan((5,), ((4,),), 2)
    assert sent_bytes(alone, own, module, data(), minis(2, 8)) == 0


def test_a_device_that_fails_ends_the_others() -> None:
    module, second = model(), straight_plan((5,), ((4,),), 2, first_soc=2)
    plan = TwoDPlan(groups=(straight_plan((2, 5), ((4,), (4,)), 2), second))
    steps = [Mini(step=0, indices=np.array([0, 1, 2, NUM_SAMPLES + 5, 3, 4]))]
    with pytest.raises(IndexError):
        sent_bytes(plan, read(module), module, data(), steps)
