"""What a stage keeps in memory: counted as autograd saves it, bounded by a budget, and let go."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.profiler.estimates import estimated_problem
from socflower.pipeline.runtime.stage import Crossing, OutOfMemory, StageWork
from tests.one_line import refused
from tests.pipeline.problems import cluster, straight_plan
from tests.pipeline.runtime.training import (
    assert_close,
    minis,
    model,
    read,
    train_alone,
    train_together,
)

PLAN = straight_plan((1, 3, 5), ((6,), (4, 2), (6,)), 4)
CUT = straight_plan((2, 4, 5), ((6,), (6,), (6,)), 4)


def stage(*layers: nn.Module, limit: int = 3, **options: Any) -> StageWork:
    """Return a first stage of these layers, which make 4 numbers a sample."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, entering: Tensor) -> tuple[Tensor]:
            return (self.layers(entering),)

    torch.manual_seed(0)
    return StageWork(
        name="stage 0 on SoC 7",
        module=Layers(),
        entering=(),
        limit=limit,
        leaving=(Crossing(shape=(4,), dtype=torch.float32),),
        **options,
    )


def saved_bytes(result: Tensor, module: nn.Module) -> int:
    """Return the bytes of what a graph's nodes say that they have saved, each storage once, without the module's."""
    own = {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    storages, nodes, seen = {}, [result.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        for value in tree_leaves([getattr(node, name) for name in dir(node) if "_saved_" in name]):
            if isinstance(value, Tensor) and value.numel() and value.data_ptr() not in own:
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("batch_size", [1, 6])
def test_the_peak_is_what_plain_torch_says_that_it_saves(batch_size: int, norm: bool) -> None:
    module = model(norm=norm).train()
    inputs = torch.randn(batch_size, 1, 6, 6)
    work = StageWork(
        name="all", module=module, entering=(), leaving=(), limit=2, loss=nn.CrossEntropyLoss()
    )
    labels = torch.zeros(batch_size, dtype=torch.int64)
    each = saved_bytes(nn.CrossEntropyLoss()(module(inputs), labels), module)
    for number in range(2):
        # A micro-batch has inputs and labels of its own, as from its message.
        work.forward(number, [inputs.clone()], stream=0, labels=labels.clone())
    assert work.peak_bytes == 2 * each
    work.backward(0, ())
    work.forward(2, [inputs], stream=0, labels=labels)
    assert work.peak_bytes == 2 * each


def test_known_layers_keep_known_bytes() -> None:
    """Inputs of both linear layers, the second being the first activation's result, and the sigmoid's result."""
    work = stage(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Sigmoid(), state_bytes=1000.0)
    work.forward(0, [torch.randn(5, 8)], stream=0)
    assert work.peak_bytes == 1000 + 4 * 5 * (8 + 16 + 4)


def test_beyond_its_budget_a_stage_says_so_in_a_line() -> None:
    each = 4 * 5 * (8 + 4)
    limits = {"state_bytes": 100_000.0, "budget_bytes": 100_000.0 + 2 * each}
    work = stage(nn.Linear(8, 4), nn.Sigmoid(), **limits)
    for number in range(2):
        work.forward(number, [torch.randn(5, 8)], stream=0)
    named = ("stage 0 on SoC 7", "0.1 MB", "3")
    refused(lambda: work.forward(2, [torch.randn(5, 8)], stream=0), *named, error=OutOfMemory)


def test_weights_alone_may_be_too_much_also_where_nothing_is_saved() -> None:
    work = stage(nn.Linear(8, 4).requires_grad_(False), state_bytes=144.0, budget_bytes=143.0)
    refused(lambda: work.forward(0, [torch.randn(5, 8)], stream=0), "SoC 7", error=OutOfMemory)


@pytest.mark.parametrize(("plan", "int8_socs"), [(PLAN, ()), (CUT, (1,))])
def test_a_member_out_of_memory_names_its_stage_and_soc(
    plan: PipelinePlan, int8_socs: tuple[int, ...]
) -> None:
    """In int8 the engines count towards the budget."""
    train = partial(train_together, model(norm=True), plan, minis(2, plan.num_samples))
    needed = train(int8_socs=int8_socs).peak_bytes
    most = max(needed.values())
    train(int8_socs=int8_socs, budget_bytes=most)
    soc = int8_socs[0] if int8_socs else 0
    less = partial(train, int8_socs=int8_socs, budget_bytes=needed[soc] - 1)
    refused(less, f"stage {soc} on SoC {soc}", "MB", error=OutOfMemory)


def test_what_a_pass_has_saved_goes_with_its_stage_where_no_backward_pass_follows() -> None:
    """Without the help of garbage collection, which does not see the references of autograd."""
    gc.disable()
    try:
        work = stage(nn.Linear(8, 4), nn.Sigmoid())
        work.forward(0, [torch.randn(5, 8)], stream=0)
        kept = weakref.ref(work.session._kept[0].made[0])
        del work
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm", [False, True])
def test_a_plan_counts_no_less_than_a_device_keeps_and_not_three_times_as_much(
    norm: bool, dropout: float
) -> None:
    """A plan counts what all operations make.

    Autograd does not keep a convolution's result where its activation keeps its own, as here behind each of them, but
    keeps the masks of dropout and the statistics of batches, which a plan does not count.
    """
    module = model(norm=norm, dropout=dropout)
    peaks = train_together(module, PLAN, minis(2, PLAN.num_samples)).peak_bytes
    problem = estimated_problem(
        read(module).model, cluster(4), micro_batch_size=6, num_micro_batches=4
    )
    for part in PLAN.stages:
        for soc, share in zip(part.devices, part.shares, strict=True):
            assert peaks[soc] <= part.memory_bytes(problem, share) < 3 * peaks[soc]


@pytest.mark.parametrize("budget_bytes", [1e6, float("inf")])
def test_activations_in_place_compute_the_same_within_a_budget(budget_bytes: float) -> None:
    """Activations overwrite what the layer before has made."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.Hardtanh(inplace=True),
        nn.Linear(8, 5),
    )
    steps = minis(3, 16)
    alone = train_alone(module, steps, micro_batches=4)
    for cuts in ((3,), (0, 3), (1, 3), (0, 1, 3), (0, 1, 2, 3)):
        plan = straight_plan(cuts, ((4,),) * len(cuts), 4)
        end = train_together(module, plan, steps, budget_bytes=budget_bytes)
        assert_close(end.weights, alone, 1e-6)


def test_in_place_changes_that_autograd_refuses_are_refused() -> None:
    """As without the hooks that count; otherwise gradients would be wrong without a word."""
    work = stage(nn.Linear(8, 4), nn.Sigmoid(), nn.ReLU(inplace=True))
    work.forward(0, [torch.randn(5, 8)], stream=0)
    refused(lambda: work.backward(0, [torch.ones(5, 4)]), "SoC 7", error=RuntimeError)
