"""A plain torch loop in groups: its weights are those of a ClientApp, and what a loop cannot be is refused."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from socflower import (
    FP32Trainer,
    GroupGrid,
    LoopGroup,
    SoCFlow,
    TrainingSchedule,
    launch,
    make_client_app,
    parse_cluster,
    run_app,
    sgd,
)
from socflower.engines.launch import _data_of
from socflower.errors import ConfigError, TrainingFailed
from socflower.training.loop import prepared_by
from tests.one_line import one_line

CLUSTER = parse_cluster({"boards": 2, "socs_per_board": 2})
DRAWN = torch.Generator().manual_seed(0)
DATA = TensorDataset(
    torch.randn(96, 1, 8, 8, generator=DRAWN), torch.randint(0, 4, (96,), generator=DRAWN)
)


def net(norm: bool) -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), *([nn.BatchNorm2d(4)] if norm else []), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 4))


def prepared(group: LoopGroup, norm: bool = False) -> tuple[Any, Any, Any]:
    model = net(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return group.prepare(model, optimizer, DataLoader(DATA, batch_size=32, shuffle=True))


def loop(group: LoopGroup, norm: bool = False) -> None:
    model, optimizer, batches = prepared(group, norm)
    for _ in group.epochs:
        model.train()
        for inputs, labels in batches:
            model.zero_grad()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            group.backward(loss)
            optimizer.step()


def loop_with_norm(group: LoopGroup) -> None:
    loop(group, norm=True)


def of_client_app(norm: bool, groups: int, epochs: int, **settings: Any) -> dict[str, Tensor]:
    """Return the weights that `make_client_app` trains on the same data, seed and plan."""
    trained: list[dict[str, Tensor]] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(1)
        schedule = TrainingSchedule(num_samples=len(DATA), batch_size=32, num_epochs=epochs)
        strategy = SoCFlow(cluster=CLUSTER, groups=groups, schedule=schedule)
        arrays = ArrayRecord(net(norm).state_dict())
        result = strategy.start(GroupGrid(grid), arrays, num_rounds=strategy.num_rounds)
        trained.append(dict(result.arrays.to_torch_state_dict()))

    trainer = FP32Trainer(optimizer=sgd(0.05, 0.9), **settings)
    client_app = make_client_app(lambda context: net(norm), lambda context, *part: DATA, trainer)
    run_app(server_app, client_app, cluster=CLUSTER, num_workers=0)
    return trained[0]


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "BatchNorm"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_loops_weights_are_those_of_a_client_app(norm: bool, groups: int) -> None:
    train = loop_with_norm if norm else loop
    ours = launch(train, cluster=CLUSTER, epochs=2, groups=groups, num_workers=0, max_grad_norm=1.0)
    theirs = of_client_app(norm, groups, 2, max_grad_norm=1.0)
    assert all(torch.equal(ours.state_dict[name], theirs[name]) for name in theirs)
    assert ours.virtual_s and ours.energy_j


def test_a_pass_is_an_epoch_and_the_loop_begins_again_at_each_interval() -> None:
    seen: list[tuple[int, int]] = []
    begun: list[str] = []

    def counted(group: LoopGroup) -> None:
        model, optimizer, batches = prepared(group)
        begun.append("interval")
        for epoch in group.epochs:
            steps = 0
            for inputs, labels in batches:
                steps += 1
                group.backward(functional.cross_entropy(model(inputs), labels))
                optimizer.step()
            seen.append((epoch, steps))
        raise AssertionError("what follows the loop runs in no member")

    launch(counted, cluster=CLUSTER, epochs=3, groups=1, interval_epochs=2.0, num_workers=0)
    assert len(begun) == 2 and [epoch for epoch, _ in seen] == [0, 1, 2]
    # The first epoch has also the batches on which the loss is tried.
    assert [steps for _, steps in seen[1:]] == [3, 3] and seen[0][1] > 3


def forgets_backward(group: LoopGroup) -> None:
    model, optimizer, batches = prepared(group)
    for inputs, labels in batches:
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def returns_early(group: LoopGroup) -> None:
    prepared(group)


def has_a_scheduler(group: LoopGroup) -> None:
    model = net(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    group.prepare(model, optimizer, DataLoader(DATA, batch_size=32))


def sums_its_loss(group: LoopGroup) -> None:
    model, optimizer, batches = prepared(group)
    for inputs, labels in batches:
        group.backward(functional.cross_entropy(model(inputs), labels, reduction="sum"))
        optimizer.step()


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (forgets_backward, "group.backward"),
        (returns_early, "group.epochs"),
        (has_a_scheduler, "launch(scheduler=...)"),
        (sums_its_loss, "the mean over samples"),
    ],
)
def test_what_a_loop_cannot_be_is_refused(train: Callable[[LoopGroup], None], named: str) -> None:
    with pytest.raises((ConfigError, TrainingFailed)) as error:
        launch(train, cluster=CLUSTER, epochs=1, groups=2, num_workers=0)
    one_line(str(error.value), named)


def test_other_engines_are_refused_with_the_way_to_them() -> None:
    with pytest.raises(ConfigError) as error:
        launch(loop, cluster=CLUSTER, epochs=1, engine="deployment")
    one_line(str(error.value), "make_loop_apps", "--engine deployment")


def test_what_is_prepared_ends_without_a_thread_left() -> None:
    import threading

    before = threading.active_count()
    assert len(_data_of(loop)) == len(DATA)
    prepared_by(loop)
    assert threading.active_count() == before


APP = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
import socflower

drawn = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, 1, 8, 8, generator=drawn), torch.randint(0, 4, (96,), generator=drawn))

def train(group):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, batches = group.prepare(model, optimizer, DataLoader(data, batch_size=32))
    for epoch in group.epochs:
        for inputs, labels in batches:
            group.backward(functional.cross_entropy(model(inputs), labels))
            optimizer.step()

cluster = socflower.parse_cluster({"boards": 1, "socs_per_board": 2})
save = lambda state: torch.save(state, OUT)
server_app, client_app = socflower.make_loop_apps(train, cluster=cluster, epochs=1, groups=1, on_end=save)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_loop_trains_in_real_rings_as_in_one_process(tmp_path: Path) -> None:
    """The apps of `make_loop_apps`, in a folder, on engine deployment: two SuperNodes in a ring."""
    from tests.test_scenarios import in_a_process

    (tmp_path / "app" / "loops").mkdir(parents=True)
    (tmp_path / "cluster.toml").write_text("[cluster]\nboards = 1\nsocs_per_board = 2\n")
    weights = {}
    for engine in ("local", "deployment"):
        out = tmp_path / f"{engine}.pt"
        (tmp_path / "app" / "loops" / "__init__.py").write_text(f"OUT = {str(out)!r}\n{APP}")
        (tmp_path / "app" / "pyproject.toml").write_text(
            "[project]\nname = 'loops'\nversion = '1.0.0'\nlicense = 'Apache-2.0'\n[tool.flwr.app]\npublisher = 'x'\n"
            "[tool.flwr.app.components]\nserverapp = 'loops:server_app'\nclientapp = 'loops:client_app'\n"
        )
        words = ["run", str(tmp_path / "app"), "--cluster", str(tmp_path / "cluster.toml")]
        ran = in_a_process(
            *words, "--engine", engine, "--out", str(tmp_path / engine), timeout_s=300.0
        )
        assert ran.status == 0, ran.err[-3000:]
        weights[engine] = torch.load(out)
    for name, ours in weights["local"].items():
        assert torch.allclose(ours, weights["deployment"][name], atol=1e-6)


@pytest.mark.slow
def test_the_example_of_the_documentation_learns(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "docs" / "examples" / "plain_loop.py"
    runpy.run_path(str(example), run_name="__main__")
    accuracy = re.search(r"accuracy (\d\.\d+) after", capsys.readouterr().out)
    assert accuracy and float(accuracy[1]) >= 0.9
