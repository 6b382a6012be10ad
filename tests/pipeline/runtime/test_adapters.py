"""LoRA adapters of PEFT over a pipeline: those of one device, and only they are trained."""

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.pipeline_contest import adapters
from benchmarks.pipeline_contest.work import SPAN, Train, minis
from socflower.errors import ConfigError
from socflower.model_graph.chain import capture_chain
from socflower.pipeline.runtime.member import Member
from socflower.pipeline.runtime.together import Mail, run_together
from tests.pipeline.runtime.training import plan_of

ONE, OVER_FOUR = plan_of((7,), ((4,),), 2), plan_of((2, 4, 7), ((3, 1), (4,), (4,)), 2)


def trained(work: Train) -> dict[str, torch.Tensor]:
    mail, members = Mail(), []
    for soc in work.plan.socs:
        module = work.workload.build()
        members.append(
            Member(
                work.plan,
                soc,
                work.workload.read(module),
                module,
                work.workload.trainer,
                SPAN,
                data=work.workload.data(),
                send=mail.sender(soc),
            )
        )
    for mini in minis(work):
        run_together({member.soc: member.update(mini) for member in members}, mail)
    ends = run_together({member.soc: member.finish() for member in members}, mail)
    return next(dict(end.weights) for end in ends.values() if end is not None)


def test_adapters_of_peft_train_as_on_one_device(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = tmp_path / "base.pt"
    torch.save(adapters.base_model().state_dict(), base)
    workload = adapters.workload(base, seed=3)
    assert workload.read(workload.build()).model.num_layers == 8  # of which blocks are whole
    alone, over_four = (
        trained(Train(workload=workload, plan=plan, num_updates=2)) for plan in (ONE, OVER_FOUR)
    )
    assert alone.keys() == over_four.keys() and all("lora" in name for name in alone)
    for name, weight in alone.items():
        torch.testing.assert_close(over_four[name], weight, rtol=0.0, atol=1e-4, msg=name)
        assert not torch.equal(weight, workload.build().state_dict()[name]), name


def test_a_peft_model_is_refused_with_what_to_give_instead() -> None:
    peft = pytest.importorskip("peft")
    model, config = (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        peft.LoraConfig(target_modules=["0"]),
    )
    wrapped = peft.get_peft_model(model, config)
    with pytest.raises(
        ConfigError, match=r"give its \.base_model\.model, which has the same adapters$"
    ):
        capture_chain(wrapped, (4,))
    assert len(capture_chain(wrapped.base_model.model, (4,)).pieces) == 2
