"""LoRA adapters of PEFT over a pipeline: those of one device, and only they are trained."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.pipeline_contest import adapters
from benchmarks.pipeline_contest.work import Train, minis
from socflower.model_graph.chain import capture_chain
from tests.one_line import refused
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime.training import train_together

ONE, OVER_FOUR = straight_plan((7,), ((4,),), 2), straight_plan((2, 4, 7), ((3, 1), (4,), (4,)), 2)


def trained(work: Train) -> Mapping[str, torch.Tensor]:
    own, module = work.workload, work.workload.build()
    options = {"reading": own.read(module), "data": own.data()}
    return train_together(module, work.plan, minis(work), own.trainer, **options).weights


@pytest.mark.slow
def test_adapters_of_peft_train_as_on_one_device(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = tmp_path / "base.pt"
    torch.save(adapters.base_model().state_dict(), base)
    workload = adapters.workload(base, seed=3)
    assert workload.read(workload.build()).model.num_layers == 8  # of which blocks are whole
    alone, over_four = (
        trained(Train(workload=workload, plan=plan, num_updates=1)) for plan in (ONE, OVER_FOUR)
    )
    before = workload.build().state_dict()
    assert alone.keys() == over_four.keys() and all("lora" in name for name in alone)
    for name, weight in alone.items():
        torch.testing.assert_close(over_four[name], weight, rtol=0.0, atol=1e-4, msg=name)
        assert not torch.equal(weight, before[name]), name


def test_a_peft_model_is_cut_by_its_own_names_and_prompts_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    chain = capture_chain(wrapped, (4,))
    inputs = torch.ones(3, 4)
    middle = chain.module(wrapped, 0, 0)(inputs)
    assert torch.equal(chain.module(wrapped, 1, 1)(*middle), wrapped(inputs))
    own = wrapped.state_dict()
    for number in (0, 1):
        assert chain.module(wrapped, number, number).state_dict().keys() <= own.keys()
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    prompted = model
    prompted.peft_config, prompted.get_base_model = {"default": config}, lambda: model
    refused(lambda: capture_chain(prompted, (4,)), "prompts", "LoRA")
