"""NumPy's numbers as arguments: every export takes them, and what is made of them is what Python's numbers make."""

import inspect
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import socflower
from socflower import FP32Trainer, ModelProfile, cluster, hierarchy
from socflower.cluster import LayerProfile, TaskGraphBuilder, cost_model, parse_cluster
from socflower.cluster.device import StepTimings
from socflower.engines.local.grid import LocalGrid
from socflower.plain_numbers import plain, plain_numbers
from socflower.thermal.sensors.reading import Reading
from socflower.wire.saved_state import StateKind, StateStore
from socflower.workloads.click_through import click_data
from socflower.workloads.dataset import LabelledData
from socflower.workloads.models.click_model import build_click_model
from socflower.workloads.models.generator import build_generator
from socflower.workloads.partition import partition
from tests.one_line import refused

CLUSTER = parse_cluster({"boards": [2, 2]})
LAYER = LayerProfile(
    name="layer",
    kind="Linear",
    forward_flops=1e6,
    output_bytes=4096.0,
    weight_bytes=1024.0,
    num_tensors=2,
)
TOY = ModelProfile(name="toy", input_bytes=64.0, layers=(LAYER,))


def network(*_: Any) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def images(*_: Any) -> LabelledData:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(12, 1, 2, 2, generator=generator)
    return LabelledData(inputs, torch.arange(12) % 3, mean=(0.0,), std=(1.0,), num_classes=3)


# ------------------------------------------------------------------------------------- every function that takes one
PARTS: tuple[Any, ...] = (
    # what arguments of exports are made of, and what parts of the package export
    *(cluster.Board, cluster.Server, cluster.Processor, cluster.LayerProfile),
    *(StepTimings, cost_model.Gradient, Reading),
    *(build_click_model, build_generator, click_data),
    *(partition, hierarchy.choose_by_time, hierarchy.group_steps_per_epoch),
    *(hierarchy.integrity_greedy, hierarchy.map_groups, hierarchy.sync_schedule),
    # methods that users call
    *(socflower.EventClock.run, socflower.EventClock.predicted_s, socflower.Resumable.resume_from),
    *(socflower.RackDynamics.advance, socflower.StepTiming.add_step, socflower.HwmonPwm.set_rpm),
    *(socflower.CsvLogger.log, socflower.JsonLinesLogger.log),
)


def takes_numbers(made: Any) -> bool:
    """Whether a parameter has int or float in its annotation; those of callables do not count."""
    for each in inspect.signature(made).parameters.values():
        is_type = isinstance(each.annotation, type)
        kind = each.annotation.__name__ if is_type else str(each.annotation)
        if "Callable" not in kind and re.search(r"\b(int|float)\b", kind):
            return True
    return False


def converts(made: Any) -> bool:
    """Whether `plain_numbers` is among the decorators."""
    layer = made.__init__ if inspect.isclass(made) else made
    while layer is not None:
        code = getattr(layer, "__code__", None)
        if code and code.co_qualname == "plain_numbers.<locals>.call":
            return True
        layer = getattr(layer, "__wrapped__", None)
    return False


def is_made(made: Any) -> bool:
    """Return whether users call it themselves, to get what is no error."""
    is_error = inspect.isclass(made) and issubclass(made, Exception)
    is_abstract = getattr(made, "_is_protocol", False) or inspect.isabstract(made)
    return (inspect.isclass(made) or inspect.isfunction(made)) and not is_error and not is_abstract


def test_every_export_that_takes_a_number_converts_it() -> None:
    exported = {name: getattr(socflower, name) for name in socflower._MODULES}
    made = {name: inspect.unwrap(value) for name, value in exported.items()}
    takes = {name for name, value in made.items() if is_made(value) and takes_numbers(value)}
    assert {name for name in exported if is_made(made[name]) and converts(exported[name])} == takes


@pytest.mark.parametrize("made", PARTS, ids=lambda made: made.__qualname__)
def test_every_part_that_takes_a_number_converts_it(made: Any) -> None:
    assert converts(made)


def test_exported_functions_are_pickled_by_name() -> None:
    for name in socflower._MODULES:
        value = getattr(socflower, name)
        if inspect.isfunction(value):
            assert pickle.loads(pickle.dumps(value)) is value


# ------------------------------------------------------------------------------------- what becomes of a number
VARIANTS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "int64": (int, np.int64),
    "int32": (int, np.int32),
    "float32": (float, np.float32),
    "float64": (float, np.float64),
}


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a value with all its numbers of a type changed."""
    if type(value) is kind:
        return change(value)
    if isinstance(value, dict):
        return {
            mapped(key, kind, change): mapped(part, kind, change) for key, part in value.items()
        }
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, kind, change) for part in value)
    return value


def typed(value: Any) -> Any:
    """Return a value with the type of each of its numbers."""
    if isinstance(value, dict):
        return [(typed(key), typed(part)) for key, part in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [typed(part) for part in value]
    return type(value), value


NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.integers(-(2**31), 2**31 - 1), st.floats(width=32, allow_nan=False), st.booleans(), st.text()
)
NESTED = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(0, 100)), inner),
    ),
    max_leaves=8,
)


@settings(max_examples=25)
@given(value=NESTED, variant=st.sampled_from(sorted(VARIANTS)))
def test_nested_numbers_become_those_of_python(value: Any, variant: str) -> None:
    kind, change = VARIANTS[variant]
    assert typed(plain(mapped(value, kind, change))) == typed(value)
    assert plain(value) is value


def gives(
    count: int,
    shares: tuple[float, ...] | None = None,
    *,
    by_soc: Mapping[int, float] | None = None,
    name: str = "",
    measure: Callable[[int], float] | None = None,
    rows: np.ndarray | None = None,
) -> tuple[Any, ...]:
    return count, shares, by_soc, name, measure, rows


class Given:
    def __init__(self, count: int, shares: tuple[float, ...] | None = None, **rest: Any) -> None:
        self.taken = (count, shares, rest)


def test_numbers_are_converted_by_place_and_by_name_and_nothing_else_is() -> None:
    rows, measure = np.arange(3), np.float64
    took = plain_numbers(gives)(
        np.int32(2),
        (np.float32(0.5), np.int64(1)),
        by_soc={np.int64(0): np.float64(0.25)},
        name=np.str_("a"),
        measure=measure,
        rows=rows,
    )
    assert typed(took[:3]) == typed((2, (0.5, 1), {0: 0.25}))
    assert type(took[3]) is np.str_ and took[4] is measure and took[5] is rows
    made = plain_numbers(Given)
    assert made is Given and typed(made(np.int8(2), shares=[np.float32(0.5)]).taken) == typed(
        (2, [0.5], {})
    )
    assert type(made(1, other=np.int8(2)).taken[2]["other"]) is np.int8


@pytest.mark.parametrize(
    "kind", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
)
def test_an_integer_of_any_width_is_a_whole_number(kind: type[np.integer[Any]]) -> None:
    schedule = socflower.TrainingSchedule(
        num_samples=kind(100), batch_size=kind(100), num_epochs=kind(100)
    )
    assert schedule == socflower.TrainingSchedule(num_samples=100, batch_size=100, num_epochs=100)
    assert 3 * schedule.num_samples == 300 and type(schedule.num_samples) is int


def test_arrays_are_sequences_of_numbers() -> None:
    assert socflower.IntegerUpdate(
        bits=np.array([5, 4]), starts=np.array([0.0, 0.5])
    ) == socflower.IntegerUpdate(bits=[5, 4], starts=[0.0, 0.5])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [True, np.True_, np.float64(2.0), np.float32(2.0), "2", np.array([2])]
)
def test_what_is_no_whole_number_is_refused_as_before(value: Any) -> None:
    refused(lambda: socflower.Grouping(num_groups=value), "num_groups", "whole number")


# ------------------------------------------------------------------------------------- what is made of them
def graph(of: Callable[[Any], Any]) -> Any:
    builder = TaskGraphBuilder()
    done = builder.compute("step", of(2), of(0.25))
    builder.transfer("model", of(2), of(3), of(32.0), rounds=of(2), after=(done,))
    tasks = builder.build((of(2), of(3)))
    return tasks, socflower.EventClock(CLUSTER).predicted_s(tasks, repeat=of(2))


def integers(of: Callable[[Any], Any]) -> Any:
    model = socflower.Int8Model.from_module(network(), input_shape=(1, 2, 2))
    pixels, labels = np.ones((4, 1, 2, 2), np.float32), np.arange(4, dtype=np.int32) % 3
    result = model.train_step(pixels, labels, learning_rate=of(0.25), progress=of(0.5), seed=of(3))
    found = model.evaluate(pixels, labels, batch_size=of(2))
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return result.loss, result.num_correct, found.accuracy, weights


def resumed(of: Callable[[Any], Any]) -> Any:
    schedule = socflower.TrainingSchedule(num_samples=12, batch_size=4, num_epochs=2)
    costs = socflower.Costs(model_profile=TOY)
    strategy = socflower.SoCFlow(cluster=CLUSTER, schedule=schedule, costs=costs)
    strategy.resume_from(of(1), without_state=(of(0),))
    return strategy.state


def run(of: Callable[[Any], Any]) -> Any:
    """Return the run as the server app sees it."""
    from flwr.serverapp import ServerApp

    app, seen = ServerApp(), []

    @app.main()
    def main(grid: Any, context: Context) -> None:
        seen.append((len(list(grid.get_node_ids())), dict(context.run_config)))

    socflower.run_app(
        app,
        socflower.make_client_app(network, images),
        cluster=CLUSTER,
        model_profile=TOY,
        num_nodes=of(3),
        run_config={"a": of(1), "b": of(0.5)},
        num_workers=of(0),
    )
    return seen


def parsed(of: Callable[[Any], Any]) -> Any:
    numbers = {"socs_per_board": of(3), "soc_bytes_per_s": of(64.0), "board_bytes_per_s": of(128.0)}
    return parse_cluster({"boards": of(2), **numbers}), parse_cluster({"boards": [of(2), of(3)]})


def trained(of: Callable[[Any], Any], folder: Path) -> Any:
    """Return the weights, the state and the files of a training whose settings are numbers `of` Python or NumPy."""
    strategy = socflower.SoCFlow(
        cluster=CLUSTER,
        groups=of(2),
        costs=socflower.Costs(model_profile=TOY),
        schedule=socflower.TrainingSchedule(
            num_samples=of(12), batch_size=of(4), num_epochs=of(2), seed=of(3)
        ),
        exchange=socflower.ExchangeSettings(overlap_buckets=of(2)),
    )
    trainer = FP32Trainer(
        optimizer=socflower.sgd(of(0.25), of(0.5)),
        scheduler=socflower.cosine_annealing,
        accumulation_steps=of(2),
        max_grad_norm=of(0.5),
        device="cpu",
    )
    app = socflower.make_client_app(network, images, trainer=trainer, num_threads=of(1))
    loggers = (
        socflower.JsonLinesLogger(folder / "rounds.jsonl"),
        socflower.CsvLogger(folder / "rounds.csv"),
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        for logger in loggers:
            logger.log(of(server_round), {"loss": of(0.5)})

    with LocalGrid(app, num_nodes=of(4), num_workers=0) as grid:
        result = strategy.start(
            grid,
            ArrayRecord(network().state_dict()),
            num_rounds=of(strategy.num_rounds),
            evaluate_fn=evaluate,
        )
    for logger in loggers:
        logger.close()
    kind = StateKind(name="state", schema=1, remedy="none")
    store = StateStore(folder, kind, prefix="state-", suffix="")
    reports = [[report.server_round, report.epoch] for report in strategy.reports]
    state = {
        key: value
        for key, value in strategy.state.items()
        if key not in ("outer", "servers", "feedback")
    }
    store.write(1, {**state, "reports": reports})
    trace = socflower.Trace()
    trace.add("SoCs", "row", "name", of(0.5), of(2.0), args={"samples": of(3)})
    trace.write(folder / "trace.json")
    weights = {name: array.numpy().tobytes() for name, array in result.arrays.items()}
    files = {path.name: path.read_text() for path in folder.glob("*.[jc]s*")}
    assert len(files) == 3 and reports
    return weights, store.read(1)[0], files


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("made", [graph, integers, resumed, run, parsed, trained])
def test_the_same_is_made_of_numbers_of_numpy(
    made: Callable[..., Any], width: int, tmp_path: Path
) -> None:
    def of_numpy(value: float) -> Any:
        return getattr(np, f"{type(value).__name__}{width}")(value)

    found = []
    for name, of in (("python", lambda value: value), ("numpy", of_numpy)):
        (tmp_path / name).mkdir()
        found.append(made(of, tmp_path / name) if made is trained else made(of))
    assert repr(found[1]) == repr(found[0])
