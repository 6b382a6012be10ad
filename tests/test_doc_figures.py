"""Every measured figure in a sentence of README, guides and concepts is that of a file of results or of a command.

Figures within 5 % of what is computed are right: floating point differs a little between processors. A line with a
figure that no entry here covers fails a test, so that a new figure comes with what makes it. Code blocks with their
outputs are compared by `test_doc_blocks`, the sentences of docs/results.md by `test_doc_results`; its tables are
generated.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from socflower.cli.main import app
from socflower.scenario import choices

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    *(
        str(page.relative_to(ROOT))
        for folder in ("guides", "concepts")
        for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
    "docs/getting-started.md",
]
UNIT = r"(?:%|ms\b|s\b|min\b|h\b|J\b|kJ\b|times\b|MB\b|GB\b|kB\b|MB/s\b|×)"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(rf"(?<![\w.]){NUMBER}(?: to {NUMBER})?[\s ]?{UNIT}")
TOLERANCE = 0.05


class Said(NamedTuple):
    """Text of a page, with `{}` for each figure, and what computes these."""

    page: str
    text: str
    compute: Callable[[], Sequence[float]]

    def figures(self, page: str) -> list[float]:
        found = re.search(
            re.escape(self.text).replace(r"\{\}", f"({NUMBER})").replace(r"\ ", r"\s+"), page
        )
        assert found, f"{self.page}: {self.text!r} is not there; change this list with the page"
        return [float(figure.replace(",", "")) for figure in found.groups()]


def results(name: str) -> Any:
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text("utf-8"))


def bench(name: str, case: str) -> dict[str, Any]:
    return next(row for row in results(name)["rows"] if row["case"].startswith(case))


@cache
def printed(*arguments: str) -> dict[str, Any]:
    """Return the document that a command prints with --json; a plan's has no other choices, which no figure is of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "with_choices", lambda scenario, cluster, planned: planned)
        ran = CliRunner().invoke(app, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


JOULES = "energy_to_accuracy_j"


def seeds(strategy: str, key: str = "time_to_accuracy_s") -> list[float]:
    """Return a figure of the demonstration under each of its seeds."""
    return [row[key] for row in results("digits_seeds")["rows"] if row["strategy"] == strategy]


def demonstrated(strategy: str) -> list[float]:
    """Return seconds and joules to the target, by seed."""
    pairs = zip(seeds(strategy), seeds(strategy, "energy_to_accuracy_j"), strict=True)
    return [figure for pair in pairs for figure in pair]


def leads() -> list[float]:
    """Return the least and the most, over seeds, of how many times as fast as the best other method SoCFlow is.

    Then the same of how many times its joules SoCFlow takes.
    """
    others = ("sgd", "ring", "local-sgd", "fedavg")
    gains, joules = [], []
    for index, own_s in enumerate(seeds("socflow")):
        best = min(others, key=lambda name, index=index: seeds(name)[index])
        gains.append(seeds(best)[index] / own_s)
        joules.append(seeds("socflow", JOULES)[index] / seeds(best, JOULES)[index])
    return [min(gains), max(gains), min(joules), max(joules)]


def uplinks(groups: int, fusion: str = "buckets") -> list[float]:
    """Return the seconds of a step in turns and running freely."""
    return [
        printed(
            "plan",
            "scenarios/auto_groups.toml",
            "--groups",
            str(groups),
            "--fusion",
            fusion,
            *(
                part
                for setting in (
                    "cluster.boards=12",
                    "cluster.socs_per_board=5",
                    "model.name=vgg11",
                    "data.name=cifar10",
                    "train.batch_size=64",
                    f"strategy.uplink_turns={turns}",
                )
                for part in ("--set", setting)
            ),
        )["predicted"]["step_s"]
        for turns in ("true", "false")
    ]


def pipeline_pays() -> list[float]:
    """Return how many times as long replicas and one device take."""
    peers = {peer["name"]: peer["over_ours"] for peer in printed("plan", "pipeline_pays")["peers"]}
    return [peers["data-parallel"], peers["single-device"]]


def leaders(way: str) -> list[float]:
    """Return the seconds of a synchronisation of VGG-11 in 8, 32, and 3,000 groups of 200 servers."""

    def planned(groups: int, *settings: str) -> float:
        return float(
            printed(
                "plan",
                "scenarios/full/mnist_32_socs.toml",
                "--groups",
                str(groups),
                *(
                    part
                    for setting in ("model.name=vgg11", "data.name=cifar10", *settings)
                    for part in ("--set", setting)
                ),
            )["leaders_s"][way]
        )

    return [
        planned(8),
        planned(32),
        planned(
            3000,
            "cluster.boards=12",
            "cluster.socs_per_board=5",
            "server=[{count=200}]",
            "strategy.socs=12000",
        ),
    ]


def over_one_soc(*settings: str) -> list[float]:
    document = printed("plan", "scenarios/full/mnist_32_socs.toml", *settings)
    return [document["one_soc"]["epoch_s"] / document["predicted"]["epoch_s"]]


def speedup(name: str, case: str) -> float:
    return float(bench(name, case)["ratio"])


def int8_step(model: str, peer: str) -> float:
    """Return how many times the default algorithm's step the quickest of some peers takes."""
    case = f"avx512-vnni: {model} step, real-scales"
    return min(
        float(row["ratio"])
        for row in results("bench-int8-step")["rows"]
        if row["case"] == case and row["peer"].startswith(peer)
    )


def lost(network: str, algorithm: str) -> float:
    """Return the points of accuracy lost to FP32, the mean over seeds."""
    rows = [
        row
        for row in results("bench-int8-accuracy")["rows"]
        if row["case"].startswith(network) and row["case"].endswith(algorithm)
    ]
    assert len(rows) >= 3
    return float(sum(row["peer_value"] - row["ours"] for row in rows) / len(rows))


def split_errors() -> list[float]:
    errors = [
        abs(run["predicted_s"] / run["measured_s"] - 1) for run in results("split")["peers"]["runs"]
    ]
    return [sum(error <= 0.1 for error in errors), len(errors), 100 * max(errors)]


def exchange_errors() -> list[float]:
    rows = results("bench-exchange")["rows"]
    fitted, left_out = (
        r"(VGG-11|ResNet-18), [\w ]+, \d+ SoCs \(",
        r".*predicted from the other seven",
    )
    return [
        100
        * max(
            abs(row["ours"] / row["peer_value"] - 1) for row in rows if re.match(kind, row["case"])
        )
        for kind in (fitted, left_out)
    ]


def trained(scenario: str, *settings: str) -> dict[str, Any]:
    return printed(
        "run",
        f"scenarios/{scenario}.toml",
        *(part for each in settings for part in ("--set", each)),
    )


def slowdowns(rebalance: str) -> list[float]:
    """Return by how many percent longer two trainings take than in a cold rack."""
    return [
        100
        * float(
            trained(scenario, f"strategy.rebalance={rebalance}", "expect={}")["heat"]["slowdown"]
        )
        for scenario in ("rebalanced_shares", "tidal_games")
    ]


def beside(strategy: str) -> list[float]:
    """Return the virtual seconds and the joules of a strategy at an edge with Wi-Fi."""
    document = printed("compare", "scenarios/split_against_edge.toml")
    return next(
        [row["virtual_s"], row["energy_j"]]
        for row in document["rows"]
        if row["strategy"] == strategy
    )


def accuracies_beside() -> list[float]:
    document = printed("compare", "scenarios/split_against_edge.toml")
    accuracies = [100 * row["final_accuracy"] for row in document["rows"]]
    return [min(accuracies), max(accuracies)]


def lenet_beside() -> list[float]:
    return [
        trained(
            "split_against_edge",
            "model.name=lenet5",
            "expect={}",
            f"edgecloud.allow_edge_only={alone}",
        )["virtual_s"]
        for alone in ("true", "false")
    ]


def int8_edge() -> list[float]:
    npu, cpu = (
        trained("split_int8_edge", "expect={}", *settings) for settings in ((), ("precision={}",))
    )
    alone = trained("split_int8_edge", "expect={}", "strategy.name=edge-only")
    return [
        npu["virtual_s"],
        npu["energy_j"],
        cpu["virtual_s"],
        cpu["energy_j"],
        alone["virtual_s"],
    ]


README, PLANNING, VIRTUAL_TIME = (
    "README.md",
    "docs/concepts/planning.md",
    "docs/concepts/virtual-time.md",
)
HEAT, PRECISION, SPLIT = (
    f"docs/guides/{name}.md" for name in ("heat", "precision", "split-training")
)
QUICK = [
    Said(
        README,
        "groups are {} to {} times as fast as the best other method, with {} to {} times its joules",
        leads,
    ),
    *(
        Said(
            "docs/results.md",
            f"|{label}|" + "|".join(["{} s, {} J"] * 3) + "|",
            partial(demonstrated, name),
        )
        for label, name in {
            "SoCFlow, 32 SoCs in 8 groups": "socflow",
            "one SoC": "sgd",
            "FedAvg, 32 SoCs": "fedavg",
            "one ring of 16 SoCs": "ring",
            "local SGD, 32 SoCs": "local-sgd",
        }.items()
    ),
    Said(
        README, "meets the published exchange latencies within {} %", lambda: exchange_errors()[:1]
    ),
    Said(
        VIRTUAL_TIME,
        "within {} %, {} % for a latency predicted from the other seven",
        exchange_errors,
    ),
    Said(
        VIRTUAL_TIME,
        "A transfer costs handling, {} ms for each [message]",
        lambda: [1e3 * bench("bench-exchange", "cost of a message")["ours"]],
    ),
    Said(
        VIRTUAL_TIME,
        "{} ms is fitted to its eight",
        lambda: [1e3 * bench("bench-exchange", "cost of a message")["ours"]],
    ),
    Said(
        VIRTUAL_TIME,
        "alone gets {} MB/s",
        lambda: [bench("bench-exchange", "rate of a link")["ours"] / 1e6],
    ),
    Said(PLANNING, "| 20 groups | {} s a step | {} s |", lambda: uplinks(20)),
    Said(
        PLANNING,
        "In eight groups it is `{}× as fast as one SoC`, VGG-11 on CIFAR-10 `{}×`",
        lambda: [
            *over_one_soc(),
            *over_one_soc("--set", "model.name=vgg11", "--set", "data.name=cifar10"),
        ],
    ),
    Said(
        PRECISION,
        "an int8 step takes {} (LeNet-5) to {} times (VGG-11) less time than torch's quickest in "
        "FP32, {} (ResNet-18) to {} times less than under bf16 autocast",
        lambda: [
            *(int8_step(model, "torch FP32") for model in ("LeNet-5", "VGG-11")),
            *(int8_step(model, "torch bf16") for model in ("ResNet-18", "MobileNetV1")),
        ],
    ),
    Said(
        PRECISION,
        "small networks lose {} points with NITI, {} with adaptive",
        lambda: [lost("resnet8", "niti, bits 2-1-0"), lost("resnet8", "adaptive-fixed-point")],
    ),
    Said(
        PRECISION,
        "one SoC computes {} times as fast under the default rule",
        lambda: [speedup("bench-mixed-cluster", "vgg11, paper, one SoC")],
    ),
    Said(
        SPLIT,
        "of the measured time in {} of {} deployments on a busy machine, and off by {} % at worst",
        split_errors,
    ),
]
SLOW = [
    Said(
        README, "three Jetson Nanos: {} times as fast as replicas, {} times as one", pipeline_pays
    ),
    Said("docs/guides/pipelines.md", "# {} times as fast as replicas", lambda: pipeline_pays()[:1]),
    Said(PLANNING, "| 8 groups | {} s | {} s |", lambda: uplinks(8)),
    Said(
        PLANNING,
        "| 8 groups, `--fusion per-tensor` | {} s | {} s |",
        lambda: uplinks(8, "per-tensor"),
    ),
    *(
        Said(PLANNING, f"| {label} | {{}} s, {{}} s | {{}} s |", partial(leaders, name))
        for name, label in {
            "ring": '`"ring"`, as in SoCFlow+',
            "tree": '`"tree"`: by board, server, site',
            "star": '`"star"`',
        }.items()
    ),
    *(
        Said(
            HEAT,
            f"| `{name}`"
            + (" (default)" if name == "off" else "")
            + f" | {what} | {{}} %{more} | {{}} %{more} |",
            partial(slowdowns, name),
        )
        for name, what, more in (
            ("off", "nothing", " slower"),
            (
                "shares",
                "each member's samples of a batch, by capacity, every `rebalance_steps` (10)",
                "",
            ),
            (
                "groups",
                "between rounds SoCs of one board change groups, so that capacities even out",
                "",
            ),
            ("both", "both", ""),
        )
    ),
    *(
        Said(SPLIT, f"| {label} | {{}} s | {{}} J |", partial(beside, name))
        for name, label in {
            "split-replay": "`split-replay`",
            "joint-dnn": "`joint-dnn`",
            "edge-only": "`edge-only`",
            "split": "`split`, one batch at a time",
        }.items()
    ),
    Said(
        README,
        "a Raspberry Pi on Wi-Fi: {} virtual s; alone {}",
        lambda: [beside("split-replay")[0], beside("edge-only")[0]],
    ),
    Said(SPLIT, "Accuracies are {} to {} %", accuracies_beside),
    Said(SPLIT, "LeNet-5: {} s against {} s", lenet_beside),
    Said(
        SPLIT,
        "takes {} s and {} J with its NPU, with its CPU {} s and {} J; its NPU without a cloud takes {} s",
        int8_edge,
    ),
]
NOT_MEASURED = {  # settings, figures of papers, what follows from a formula beside it, and another processor's figures
    README: [
        "to 95 %",
    ],
    "docs/guides/deployment.md": [
        "at least 30 s",
        "on a rack 15 s later",
        "no port after 10 s",
        "kills it after 15 s",
    ],
    "docs/guides/groups.md": ["0.1 % for scales", "3600 s unless set"],
    HEAT: ["after 10 to 12 minutes at slow fans, and costs 30 %", "Every 5 s"],
    PRECISION: ["leaves 37 % to the CPU"],
    SPLIT: ["that gains 5 %", "within 10 %"],
    "docs/concepts/exactness.md": ["gains 3.5 to 5.8 times | 2.72 times at most"],
    PLANNING: ["more than 15 %", "or below 15 %", "Differences below 5 %", "real rings need 10 %"],
}


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def compare(said: Said) -> None:
    shown, computed = said.figures(text_of(said.page)), said.compute()
    assert shown == pytest.approx(list(computed), rel=TOLERANCE), f"{said.page}: {said.text}"


@pytest.mark.parametrize("said", QUICK, ids=lambda said: f"{said.page}: {said.text[:40]}")
def test_figures_are_those_of_files_and_plans(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    compare(said)


@pytest.mark.slow
@pytest.mark.parametrize("said", SLOW, ids=lambda said: f"{said.page}: {said.text[:40]}")
def test_figures_are_those_of_trainings_and_large_plans(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    compare(said)


def outside_blocks(text: str) -> str:
    """Return a page without its code blocks, whose outputs are compared elsewhere."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_without_what_makes_it(page: str) -> None:
    text = " ".join(outside_blocks(text_of(page)).split())
    for said in (*QUICK, *SLOW):
        if said.page == page:
            text = re.sub(re.escape(said.text).replace(r"\{\}", NUMBER), "", text)
    for settled in NOT_MEASURED.get(page, ()):
        text = text.replace(settled, "")
    # The tables of the demonstration and of what it predicts are compared by test_doc_results.
    text = (
        re.sub(
            r"\| (SoCFlow|one SoC|one ring|local SGD|FedAvg|VGG-11|ResNet-18)[^|]*\|(?: [^|]* \|){3,5}",
            "",
            text,
        )
        if page == README
        else text
    )
    assert FIGURE.findall(text) == []
