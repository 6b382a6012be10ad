"""Scenarios that name the user's own functions: the same training as the registry's, on all engines, or one line."""

import json
import random
import textwrap
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.data import TensorDataset

from socflower.cli.compare import print_comparison
from socflower.cli.plan import print_plan
from socflower.engines.checkpoint import difference, training_keys
from socflower.errors import TrainingFailed
from socflower.scenario import jobs
from socflower.scenario.app.deployed import app_in_bundle, bundled_document
from socflower.scenario.comparison import compare
from socflower.scenario.planning import plan_scenario
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.file import (
    from_document,
    load_scenario,
    scenario_cluster,
    to_document,
)
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.tuning import parse_tuning
from socflower.scenario.workload import image_shape, initial_model, scenario_data
from socflower.user_code import forgotten_modules
from socflower.workloads.evaluation import evaluate
from socflower.workloads.map_dataset import MapDataset
from tests.one_line import refused

pytestmark = pytest.mark.usefixtures("on_few_digits")

CODE = """
    import helper_NAME
    import itertools
    import numpy as np
    import random
    import torch
    from socflower import build_model, load_data
    from torch import nn
    from torch.utils.data import TensorDataset
    from types import SimpleNamespace

    def lenet(seed):
        return build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=seed)

    def digits():
        return load_data("digits")

    def drawn(num_classes=3):
        model = nn.Linear(4, num_classes)
        model.bias.data[:2] = torch.tensor([np.random.rand(), random.random()])
        return model

    def tokens():
        return nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(40, 2))

    def points(num_train=64, noise=0.5):
        inputs = torch.randn(num_train + 16, 4)
        labels = (inputs[:, 0] + noise * torch.randn(num_train + 16) > 0).long()
        train = TensorDataset(inputs[:num_train], labels[:num_train])
        train.targets = labels[:num_train].tolist()
        return train, TensorDataset(inputs[num_train:], labels[num_train:])

    def ids():
        inputs = torch.randint(20, (80, 5))
        return {"train": TensorDataset(inputs[:64], inputs[:64, 0] % 2),
                "test": TensorDataset(inputs[64:], inputs[64:, 0] % 2)}

    class Answering(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)

        def forward(self, ids, mask, labels=None):
            logits = self.head((self.embed(ids) * mask.unsqueeze(-1)).sum(1))
            loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
            return SimpleNamespace(loss=loss, logits=logits)

    def in_dicts():
        rows = [{"ids": ids, "mask": torch.ones(5), "labels": ids[0] % 2} for ids in torch.randint(20, (80, 5))]
        return SimpleNamespace(train=rows[:64], test=rows[64:])

    def without_targets():
        train, test = points()
        del train.targets
        return train, test

    class Reader(nn.Module):
        def __init__(self, trained):
            super().__init__()
            self.base, self.head = nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 64)), nn.Linear(64, 2)
            self.base.requires_grad_(trained)

        def forward(self, ids, labels):
            hidden = self.base(ids[:, :int((ids >= 0).sum(dim=1).max())])
            logits = self.head(hidden.mean(dim=1))
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def reader(trained=True):
        return Reader(trained)

    def elsewhere():
        model = Reader(False)
        model.base[0].weight.data += next(counted)
        return model

    counted = itertools.count()

    def dicts():
        train, test = ids().values()
        as_dict = lambda pairs: [{"ids": inputs, "labels": label} for inputs, label in pairs]
        return as_dict(train), as_dict(test)

    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

        def forward(self, ids, labels=None):
            logits = self.head(self.embed(ids))
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            return SimpleNamespace(loss=loss, logits=logits)

    def texts():
        starts = torch.randint(20, (80, 1))
        rows = [{"ids": ids, "labels": ids} for ids in (starts + torch.arange(6)) % 20]
        return rows[:64], rows[64:]

    raises = lambda: 1 / 0
    exits = lambda: exit(3)
    a_list = lambda: [1, 2, 3]
    an_empty_one = lambda: (TensorDataset(torch.zeros(0, 4), torch.zeros(0)), points()[1])
    a_stream = lambda: (iter(()), points()[1])
    a_number = 3
    frozen = lambda: nn.Linear(4, 2).requires_grad_(False)
    too_wide = lambda: nn.Linear(5, 2)
    one_output = lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    unreadable = lambda: (range(5), range(5))
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[str]:
    """The name of a module in `tmp_path` with functions for scenarios; its name is new, as modules stay imported."""
    name = f"own_{uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(CODE).replace("NAME", name), "utf-8")
    (tmp_path / f"helper_{name}.py").write_text("number = 1\n", "utf-8")
    with forgotten_modules(tmp_path):
        yield name


def write(folder: Path, module: str, *, model: str = "", data: str = "", more: str = "") -> Path:
    """Write a scenario with functions of the module, each with arguments, as in `lenet seed=1`."""
    text = (
        "[cluster]\nboards = 2\nsocs_per_board = 2\n[train]\nepochs = 1\nbatch_size = 32\nlearning_rate = 0.05\n"
        "[strategy]\ngroups = 2\nsync_interval_epochs = 0.5\n"
    )
    for table, call in (("model", model), ("data", data)):
        if call:
            function, *arguments = call.split()
            text += f'[{table}]\nfactory = "{module}:{function}"\n' + "".join(
                f"arguments.{each}\n" for each in arguments
            )
    path = folder / "mine.toml"
    path.write_text(text + more, "utf-8")
    return path


def load(folder: Path, module: str, overrides: tuple[str, ...] = (), **tables: str) -> Scenario:
    return load_scenario(write(folder, module, **tables), overrides)


@pytest.mark.parametrize(
    "arithmetic", ["fp32", "int8", pytest.param("mixed", marks=pytest.mark.slow)]
)
def test_functions_that_return_the_registrys_model_and_data_train_the_registrys_weights(
    arithmetic: str,
    own: str,
    tmp_path: Path,
) -> None:
    override = (f"precision.arithmetic={arithmetic}",)
    ours = run_scenario(
        load(tmp_path, own, override, model="lenet seed=1", data="digits"), num_workers=0
    )
    theirs = run_scenario(load(tmp_path, own, override), num_workers=0)
    assert ours["virtual_s"] == theirs["virtual_s"]
    if arithmetic == "int8":
        assert ours["weights_sha256"] == theirs["weights_sha256"]
    # The registry's models train in another memory layout, which changes the order of FP32 sums.
    assert ours["rounds"][0]["loss"] == pytest.approx(theirs["rounds"][0]["loss"], rel=1e-3)


def test_equal_seeds_give_equal_weights_and_leave_the_generators_as_they_were(
    own: str, tmp_path: Path
) -> None:
    scenario = load(tmp_path, own, model="drawn")
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    first, again, other = (
        initial_model(each).state_dict() for each in (scenario, scenario, scenario.replaced(seed=2))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    drawn = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert drawn == (torch.rand(1), np.random.rand(), random.random())


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_any_dataset_trains_and_is_planned_with_its_own_length(
    own: str, tmp_path: Path, partition: str
) -> None:
    scenario = load(
        tmp_path,
        own,
        (f"data.partition={partition}", "train.batch_size=8", "train.learning_rate=0.5"),
        model="drawn num_classes=2",
        data="points noise=0.0",
    )
    first, second = (run_scenario(scenario, num_workers=0) for _ in range(2))
    assert first["weights_sha256"] == second["weights_sha256"]
    assert (first["final_accuracy"] or 0) > 0.6
    assert "4 steps" in plan_scenario(scenario)["work"]  # 64 samples, two groups, batches of 8
    assert first["data_source"] == f"{own}:points"


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(("model", "data"), [("tokens", "ids"), ("Answering", "in_dicts")])
@pytest.mark.parametrize("strategy", ["fedavg", "ring"])
def test_token_ids_and_dicts_are_planned_and_train_under_other_strategies(
    strategy: str,
    model: str,
    data: str,
    own: str,
    tmp_path: Path,
) -> None:
    scenario = load(tmp_path, own, (f"strategy.name={strategy}",), model=model, data=data)
    prepare(scenario)
    result = run_scenario(scenario, num_workers=0)
    assert result["rounds"][-1]["loss"] < 2.0 and result["virtual_s"] > 0


def test_groups_auto_and_training_with_a_cloud_take_functions(own: str, tmp_path: Path) -> None:
    auto = load(
        tmp_path, own, ('strategy.groups="auto"',), model="drawn num_classes=2", data="points"
    )
    assert run_scenario(auto, num_workers=0)["warm_up"]["num_groups"] >= 1
    split = load(
        tmp_path,
        own,
        (
            "strategy.name=split-replay",
            "strategy.socs=1",
            "strategy.groups=auto",
            "strategy.sync_interval_epochs=decay",
            "train.batch_size=200",
        ),
        model="lenet seed=1",
        data="digits",
    )
    assert run_scenario(split, num_workers=0)["split"]["num_edges"] == 1


@pytest.mark.parametrize(
    ("model", "data", "named"),
    [
        ("nothing", "", ":nothing"),
        ("raises", "", "ZeroDivisionError"),
        ("exits", "", "SystemExit: 3"),
        ("a_number", "", "is a int, not a function"),
        ("a_list", "", "a list, not a torch.nn.Module"),
        ("lenet", "", "'seed'"),
        ("frozen", "points", "frozen"),
        ("too_wide", "points", "mat1 and mat2 shapes"),
        ("one_output", "points", "test data"),
        ("", "a_list", "list of int, int, int"),
        ("", "an_empty_one", "no training sample"),
        ("", "a_stream", "by number"),
        ("", "points", "square images"),
        ("drawn", "unreadable", "test data"),
    ],
)
def test_what_a_function_returns_wrong_is_one_line_before_training(
    model: str, data: str, named: str, own: str, tmp_path: Path
) -> None:
    refused(lambda: prepare(load(tmp_path, own, model=model, data=data)), own, named)


@pytest.mark.parametrize(
    ("model", "data", "more", "named"),
    [
        ("tokens", "ids", "[precision]\narithmetic = 'int8'\n", "int64 of shape (5,)"),
        ("lenet seed=1", "", "name = 'vgg11'\n", "'vgg11'"),
        ("drawn", "without_targets", "partition = 'dirichlet'\n", "class"),
    ],
)
def test_what_does_not_go_with_a_function_is_one_line_before_training(
    model: str, data: str, more: str, named: str, own: str, tmp_path: Path
) -> None:
    refused(lambda: prepare(load(tmp_path, own, model=model, data=data, more=more)), own, named)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ('factory = "models"', "factory = 'models'"),
        ('factory = "my-models:make"', "package.module:function"),
        ("arguments.width = 3", "factory"),
        ("factory = 3", "[model] factory = 3"),
        ('factory = "a:b"\narguments = 3', "arguments] must be a table, got 3"),
    ],
)
def test_a_factory_is_written_as_a_module_and_a_function(
    table: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(f"[model]\n{table}\n", "utf-8")
    refused(lambda: load_scenario(tmp_path / "mine.toml"), named)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("not_there:make", None, "No module named 'not_there'"),
        ("own_broken:make", "def make(:\n", "SyntaxError"),
        ("own_needs:make", "import no_such_package\n", "No module named 'no_such_package'"),
        ("random:random", "def make(): ...\n", "random.py"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    tmp_path: Path, name: str, text: str | None, named: str
) -> None:
    if text is not None:
        (tmp_path / f"{name.partition(':')[0]}.py").write_text(text, "utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(f'[model]\nfactory = "{name}"\n', "utf-8")
    with forgotten_modules(tmp_path):
        refused(lambda: prepare(load_scenario(path)), named)


def test_a_result_of_other_code_is_another_run_and_one_in_another_folder_the_same(
    own: str, tmp_path: Path
) -> None:
    before = to_document(load(tmp_path, own, model="drawn", data="points"))
    assert from_document(before) == load(tmp_path, own, model="drawn", data="points")
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in tmp_path.glob("*.py"):
        (moved / file.name).write_bytes(file.read_bytes())
    assert training_keys(
        to_document(load(moved, own, model="drawn", data="points"))
    ) == training_keys(before)
    (tmp_path / f"helper_{own}.py").write_text("number = 2\n", "utf-8")  # which the module imports
    after = to_document(load(tmp_path, own, model="drawn", data="points"))
    changed = difference(training_keys(before), training_keys(after))
    assert changed is not None and changed[0] == "code"


def test_a_bundle_for_other_machines_has_the_code_and_reads_it_there(
    own: str, tmp_path: Path
) -> None:
    scenario = load(tmp_path, own, model="drawn", data="points")
    bundle = tmp_path / "bundle"
    app_in_bundle(scenario).write(bundle, {})
    assert sorted(file.name for file in (bundle / "code").iterdir()) == [
        f"helper_{own}.py",
        f"{own}.py",
    ]
    with forgotten_modules(bundle):
        there = from_document(bundled_document(bundle))
        assert there.folder == str(bundle / "code")
        assert len(scenario_data(there).train) == 64
        assert torch.equal(
            initial_model(there).state_dict()["weight"], initial_model(there).state_dict()["weight"]
        )


def test_what_is_random_in_a_sample_is_that_of_its_number_in_the_whole_set() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(2), index

    source = MapDataset(Noisy(torch.zeros(6, 2)))
    part = source.select([4, 1, 3])
    assert len(part) == 3
    for one, other in zip(part.batch([2, 0], (7,)), source.batch([3, 4], (7,)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_functions_are_called_in_the_processes_of_the_other_engines(
    engine: str, own: str, tmp_path: Path
) -> None:
    """On a deployment the ring sums in another order."""
    scenario = load(tmp_path, own, model="drawn num_classes=2", data="points")
    there, here = run_scenario(scenario, engine), run_scenario(scenario, num_workers=1)
    assert json.dumps(there["scenario"]) == json.dumps(here["scenario"])
    assert there["final_accuracy"] == here["final_accuracy"]
    if engine == "simulation":
        assert there["weights_sha256"] == here["weights_sha256"]


def test_a_plan_prices_batches_of_dicts_and_exchanges_only_what_trains(
    own: str, tmp_path: Path
) -> None:
    whole, frozen = (
        plan_scenario(load(tmp_path, own, model=f"reader trained={trained}", data="dicts"))
        for trained in ("true", "false")
    )
    base_bytes, head_bytes = 4 * (20 * 32 + 32 * 64 + 64), 4 * (2 * 64 + 2)
    forward = 2 * (5 * 32 * 64 + 64 * 2)
    expected = {"weight_bytes": base_bytes + head_bytes, "trained_bytes": base_bytes + head_bytes}
    expected["training_flops"] = 3 * forward
    assert expected.items() <= whole["model"].items()
    expected |= {"trained_bytes": head_bytes, "training_flops": forward + 2 * 64 * 2}
    assert expected.items() <= frozen["model"].items()
    assert frozen["predicted"]["sync_s"] < whole["predicted"]["sync_s"]
    assert frozen["predicted"]["memory_bytes"] < whole["predicted"]["memory_bytes"]
    adam = load(
        tmp_path, own, ("train.optimizer=adam",), model="reader trained=false", data="dicts"
    )
    assert (
        plan_scenario(adam)["predicted"]["memory_bytes"]
        == frozen["predicted"]["memory_bytes"] + head_bytes
    )
    assert any("a pass on the CPU" in note for note in whole["notes"])
    console = Console(width=200, record=True, file=StringIO())
    print_plan(console, scenario_cluster(adam), {**frozen, "heat": None})
    assert "; of 11.5 kB of weights 520 B train and are exchanged" in console.export_text()


@pytest.mark.slow
def test_a_model_without_accuracy_is_run_compared_and_searched_by_its_loss(
    own: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        jobs, "write_report", lambda path, *_, **__: path.write_text("page")
    )  # that of each run
    path = write(tmp_path, own, model="Writer", data="texts", more="[expect]\nmax_loss = 3.2\n")
    scenario = load_scenario(path, ("train.learning_rate=0.5",))
    result = run_scenario(scenario, num_workers=0)
    model, data = initial_model(scenario), scenario_data(scenario)
    untrained = evaluate(model, data.test).loss
    assert result["quality"] == "loss" and result["final_accuracy"] is result["target_loss"] is None
    assert [entry["accuracy"] for entry in result["rounds"]] == [None] * len(result["rounds"])
    assert result["rounds"][0]["loss"] == pytest.approx(untrained)
    assert result["final_loss"] == result["rounds"][-1]["loss"] < untrained
    assert (
        result["expectations"][0]["holds"]
        and result["expectations"][0]["observed"] == result["final_loss"]
    )

    tuning = parse_tuning(["learning_rate=0.001,0.5"])
    document = compare(
        scenario, ["socflow", "sgd"], tmp_path / "out", num_workers=0, seeds=(1, 2), tuning=tuning
    )
    searched = document["tuning"]["strategies"].values()
    assert [each["chosen"] for each in searched] == [0.5, 0.5]
    worst = max(row["final_loss"] for row in document["rows"])
    assert document["quality"] == "loss" and document["target_loss"] == pytest.approx(1.01 * worst)
    assert all(
        row["time_to_loss_s"] > 0 and row["final_accuracy"] is None for row in document["rows"]
    )
    assert " loss " in document["headline"]
    console = Console(width=80, record=True, file=StringIO())
    print_comparison(console, scenario, document, Path("out"))
    assert "final" in (said := console.export_text()) and "loss" in said and "accuracy" not in said


def test_groups_auto_compares_losses_and_a_target_of_loss_judges_models_with_accuracy(
    own: str,
    tmp_path: Path,
) -> None:
    auto = load(
        tmp_path,
        own,
        (
            "strategy.groups=auto",
            "train.learning_rate=0.5",
            "train.epochs=10",
            "strategy.sync_interval_epochs=0.25",
        ),
        model="Writer",
        data="texts",
    )
    tried = run_scenario(auto, num_workers=0)["warm_up"]["accuracy"]
    assert all(0.0 < likelihood < 1.0 for likelihood in tried.values()) and len(tried) > 1
    timed = load(
        tmp_path, own, ("compare.target_loss=0.69",), model="drawn num_classes=2", data="points"
    )
    result = run_scenario(timed, num_workers=0)
    assert (
        result["quality"] == "loss"
        and result["target_loss"] == 0.69
        and result["final_accuracy"] > 0
    )
    assert (result["time_to_loss_s"] is not None) == (
        min(entry["loss"] for entry in result["rounds"]) <= 0.69
    )


@pytest.mark.parametrize("strategy", ["socflow", "fedavg"])
def test_frozen_parameters_stay_at_the_nodes_and_are_in_the_saved_model(
    strategy: str,
    own: str,
    tmp_path: Path,
) -> None:
    scenario = load(
        tmp_path, own, (f"strategy.name={strategy}",), model="reader trained=false", data="dicts"
    )
    result = run_scenario(scenario, num_workers=0, model_to=tmp_path / "model.npz")
    saved, first = np.load(tmp_path / "model.npz"), initial_model(scenario).state_dict()
    assert {name for name in first if not np.array_equal(saved[name], first[name])} == {
        "head.weight",
        "head.bias",
    }
    assert result["final_accuracy"] is not None and result["final_loss"] > 0
    # The grid prices the arrays of real messages.
    if strategy == "fedavg":
        whole = run_scenario(
            scenario.replaced(model=scenario.model.replaced(arguments={})), num_workers=0
        )
        stayed = sum(value.nbytes for name, value in first.items() if name.startswith("base"))
        num_messages = 2 * 4  # there and back, of four nodes, in a round
        assert whole["bytes"]["hub"] - result["bytes"]["hub"] == pytest.approx(
            num_messages * stayed, rel=0.1
        )


def test_a_base_that_differs_among_nodes_is_refused_by_its_digest(own: str, tmp_path: Path) -> None:
    scenario = load(tmp_path, own, model="elsewhere", data="dicts")
    refused(lambda: run_scenario(scenario, num_workers=0), "frozen", error=TrainingFailed)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("compare.target_accuracy=0.5", "target_loss"),
        ("expect.min_accuracy=0.5", "max_loss"),
        ("expect.max_accuracy_gap_to_sgd=0.5", "max_loss_gap_to_sgd"),
    ],
)
def test_an_accuracy_that_a_model_lacks_is_refused_before_training(
    line: str, instead: str, own: str, tmp_path: Path
) -> None:
    scenario = load(tmp_path, own, (line,), model="Writer", data="texts")
    refused(lambda: prepare(scenario), f"write {instead}")


def test_int8_takes_no_dicts(own: str, tmp_path: Path) -> None:
    scenario = load(tmp_path, own, ("precision.arithmetic=int8",), model="reader", data="dicts")
    refused(lambda: image_shape(scenario), "ids, labels", "[precision]")
