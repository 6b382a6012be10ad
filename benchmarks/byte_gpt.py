"""A byte-level GPT on the standard library's sources: groups against one SoC and FedAvg, and what LoRA adapters send.

    python benchmarks/byte_gpt.py --json --curves docs/results    (an hour; continues after an interruption)
    python benchmarks/byte_gpt.py --quick                         (only the bytes of one round, on random weights)

The scenarios are scenarios/full/byte_gpt.toml, all parameters from random weights, and byte_gpt_lora.toml, adapters on
the model of the former. Every strategy trains on the same tokens with Adam, at the best of the same learning rates,
which are searched with a seed that is not reported. `all, from the base` trains every parameter on the adapters' text.
TCP proxies count bytes in front of the SuperLink and of every ring port of eight SuperNodes, whose rings exchange over
gRPC. Counted are the bytes from the end of the first synchronisation to the end of the last, less those of an equally
long idle time. Finished runs are kept in out/byte-gpt.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.harness import Row, kept, less_is_better, main
from benchmarks.hub_traffic import CountingProxies, deployed
from socflower.scenario.comparison import compare
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.tuning import parse_tuning
from socflower.scenario.workload import initial_model

FOLDER = Path("out/byte-gpt")
BASE = Path("out/byte_gpt.npz")
SEEDS = (2, 3, 4)
NUM_NODES, NUM_GROUPS, BATCH_SIZE = 8, 4, 16
FULL, LORA = Path("scenarios/full/byte_gpt.toml"), Path("scenarios/full/byte_gpt_lora.toml")
# In nats a byte. The entropy of single bytes is 3.1 for the modules and 2.65 for the topics.
MOST_LOSS = 2.6
# Adapters may send at most this share of the bytes that all parameters take.
MOST_OF_FULL = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """What is trained on which text, and the strategies that do it."""

    title: str
    # The folder of its runs.
    key: str
    scenario: Path
    rates: str
    strategies: tuple[str, ...] = ("socflow", "sgd", "fedavg")
    overrides: tuple[str, ...] = ()


CASES = (
    Regime(
        title="all parameters, modules", key="full", scenario=FULL, rates="0.001,0.002,0.004,0.008"
    ),
    Regime(title="LoRA, topics", key="lora", scenario=LORA, rates="0.005,0.01,0.02,0.04"),
    Regime(
        title="all, from the base, topics",
        key="from-base",
        scenario=LORA,
        rates="0.001,0.002,0.004",
        strategies=("socflow",),
        overrides=("model.factory=byte_gpt:continued", f'model.arguments={{ base = "{BASE}" }}'),
    ),
)


def comparison(case: Regime) -> dict[str, Any]:
    """Return the comparison of a regime and the curves of its runs; finished runs are read from its folder."""
    if case.scenario == LORA and not BASE.exists():
        run_to_folder(load_scenario(FULL), FOLDER / "base", save_model=BASE)
    out = FOLDER / case.key
    document = compare(
        load_scenario(case.scenario, case.overrides),
        case.strategies,
        out,
        seeds=SEEDS,
        tuning=parse_tuning([f"learning_rate={case.rates}"]),
    )
    curves = {
        f"{row['strategy']} {row['seed']}": _curve(
            out / row["strategy"] / f"seed-{row['seed']}" / "result.json"
        )
        for row in document["rows"]
    }
    return {
        "title": case.title,
        "tuning": document["tuning"],
        "headline": document["headline"],
        "target_loss": document["target_loss"],
        "rows": document["rows"],
        "curves": curves,
    }


def _curve(result: Path) -> list[dict[str, float]]:
    rounds = json.loads(result.read_text("utf-8"))["rounds"]
    return [{key: entry[key] for key in ("epoch", "loss", "virtual_s")} for entry in rounds]


def wire_bytes(scenario: str, *, num_rounds: int = 3, idle_s: float = 20.0) -> dict[str, float]:
    """Return the bytes of a synchronisation in both directions: through the SuperLink, and in the rings."""
    with deployed(NUM_NODES, warm=True, counts_rings=True) as cluster:
        assert cluster.ring_proxies is not None
        cluster.wait_until_idle()
        start_s = time.time()
        time.sleep(idle_s)
        end_s = time.time()
        idle = {
            name: _passed(proxies, start_s, end_s) / (end_s - start_s)
            for name, proxies in (("hub", cluster.proxies), ("rings", cluster.ring_proxies))
        }
        marks = cluster.run(
            strategy="socflow",
            model=scenario,
            num_groups=NUM_GROUPS,
            num_rounds=num_rounds,
            batch_size=BATCH_SIZE,
        )
        first_s, last_s = marks[1]["time_s"], marks[-1]["time_s"]
        return {"model_bytes": marks[0]["model_bytes"], "loss": marks[-1]["loss"]} | {
            name: (_passed(proxies, first_s, last_s) - idle[name] * (last_s - first_s))
            / (num_rounds - 1)
            for name, proxies in (("hub", cluster.proxies), ("rings", cluster.ring_proxies))
        }


def _passed(proxies: CountingProxies, start_s: float, end_s: float) -> int:
    between = proxies.between(start_s, end_s)
    return between.up_bytes + between.down_bytes


def untrained_base(folder: Path) -> Path:
    """Return a file of the base's initial weights; adapters on it send as many bytes as on a trained base."""
    path = folder / "base.npz"
    np.savez(
        path,
        **{
            name: tensor.numpy()
            for name, tensor in initial_model(load_scenario(FULL)).state_dict().items()
        },
    )
    return path


def wire_rows(lora: Mapping[str, float], full: Mapping[str, float]) -> list[Row]:
    """Return rows of the bytes with adapters against those with all parameters.

    The limit is not applied to the hub alone: there Flower's wrapping is a large share of the bytes.
    """
    case = (
        f"LoRA, {lora['model_bytes']:.0f} of {full['model_bytes']:.0f} B train, {NUM_NODES} SuperNodes in "
        f"{NUM_GROUPS} groups: "
    )
    sums = [{**each, "hub and rings": each["hub"] + each["rings"]} for each in (lora, full)]
    return [
        less_is_better(
            case + name,
            sums[0][name],
            "all parameters",
            sums[1][name],
            "B",
            ok=sums[0][name] > 0.0
            and (name == "hub" or sums[0][name] < MOST_OF_FULL * sums[1][name]),
        )
        for name in ("hub", "rings", "hub and rings")
    ]


def measured_wire(base: Path, num_rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes with adapters on a base, and with all parameters."""
    return (
        wire_bytes(
            f"{LORA.resolve()} model.arguments.base={base.resolve()}", num_rounds=num_rounds
        ),
        wire_bytes(str(FULL.resolve()), num_rounds=num_rounds),
    )


def _kept_wire() -> tuple[dict[str, float], dict[str, float]]:
    lora, full = kept(FOLDER / "wire.json", lambda: measured_wire(BASE, num_rounds=3))
    return lora, full


def loss_rows(found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return two rows for each strategy, means over the seeds: its final loss and its total time.

    The peer is one SoC; for all parameters from the base, the peer is the training of the adapters.
    """
    rows = []
    for case in CASES:
        peer, peer_case, peer_name = (
            ("sgd", case.key, "one SoC")
            if "sgd" in case.strategies
            else ("socflow", "lora", "adapters")
        )
        peers = _runs(found[peer_case], peer)
        for name in case.strategies:
            own = _runs(found[case.key], name)
            rate = found[case.key]["tuning"]["strategies"][name]["chosen"]
            text = f"{case.title}: {name}, rate {rate}, {len(own)} seeds"
            losses, peer_loss, times, peer_time = (
                [row[key] for row in of]
                for key in ("final_loss", "virtual_s")
                for of in (own, peers)
            )
            rows += [
                less_is_better(
                    f"{text}, +- {stdev(losses):.3f}",
                    mean(losses),
                    peer_name,
                    mean(peer_loss),
                    "nats a byte",
                    ok=max(losses) < MOST_LOSS,
                ),
                less_is_better(text, mean(times), peer_name, mean(peer_time), "virtual s", ok=True),
            ]
    return rows


def _runs(found: Mapping[str, Any], strategy: str) -> list[Mapping[str, Any]]:
    return [row for row in found["rows"] if row["strategy"] == strategy]


def run(quick: bool = False) -> list[Row]:
    """Return the rows of losses and bytes; with `quick` only the bytes of one round."""
    if quick:
        with TemporaryDirectory() as folder:
            return wire_rows(*measured_wire(untrained_base(Path(folder)), num_rounds=2))
    return loss_rows({case.key: comparison(case) for case in CASES}) + wire_rows(*_kept_wire())


def write_curves(folder: Path) -> None:
    """Write the curves of all runs as one JSON document and as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = {case.key: comparison(case) for case in CASES}
    (folder / "byte-gpt-curves.json").write_text(json.dumps(found))
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for column, (key, extra) in enumerate((("full", None), ("lora", "from-base"))):
        for row, (axis, label) in enumerate(
            (("epoch", "epochs, 0.26 million tokens each"), ("virtual_s", "virtual seconds"))
        ):
            for name in ("socflow", "sgd", "fedavg"):
                _draw(axes[row][column], found[key]["curves"], name, axis, name)
            if extra:
                _draw(
                    axes[row][column],
                    found[extra]["curves"],
                    "socflow",
                    axis,
                    "socflow, all parameters",
                )
            axes[row][column].set(
                title=found[key]["title"], xlabel=label, ylabel="test loss, nats a byte"
            )
            axes[row][column].legend()
    figure.savefig(folder / "byte-gpt-curves.svg")


def _draw(
    axes: Any,
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    strategy: str,
    axis: str,
    label: str,
) -> None:
    runs = [curve[1:] for key, curve in curves.items() if key.split()[0] == strategy]
    points = list(zip(*runs, strict=True))
    axes.plot(
        [mean(entry[axis] for entry in entries) for entries in points],
        [mean(entry["loss"] for entry in entries) for entries in points],
        marker="o",
        label=label,
    )


if __name__ == "__main__":
    sys.exit(main(__name__))
