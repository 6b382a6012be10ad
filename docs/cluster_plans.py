"""Write docs/reference/clusters.md, what `plan` says of each shipped cluster file: `make clusters`, in a minute."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from socflower.quantities import human_joules, human_ratio, human_seconds
from socflower.scenario.choices import with_choices
from socflower.scenario.planning import plan_scenario
from socflower.scenario.schema.file import load_scenario, scenario_cluster
from socflower.toml_file import read_toml

# Methods whose steps are those of one SoC with the same batch.
SAME_STEPS = ("sgd", "ring", "ps", "hybrid-pipeline")
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "scenarios" / "clusters"
PAGE = ROOT / "docs" / "reference" / "clusters.md"
WORK = ("model.name=vgg11", "data.name=cifar10")
HEAD = f"""# Clusters, and what plan says of them

Files to begin with, in [scenarios/clusters](../../scenarios/clusters). Predicted is an epoch of VGG-11 on CIFAR-10 in
FP32, batches of 64 a group; the choice is that of the quickest epoch in the table of

```sh fragment
socflower plan scenarios/clusters/soc_cluster.toml {" ".join(f"--set {each}" for each in WORK)}
```

Groups, local SGD and FedAvg take fewer steps in an epoch than one SoC, and so need more epochs; the last column is the
quickest with as many. Made by `make clusters`.

| file | the quickest epoch | SoCs | an epoch | energy | over one SoC | with as many steps |
| --- | --- | --- | --- | --- | --- | --- |
"""


def cluster_files() -> list[Path]:
    """Return the shipped cluster files; the other files of the folder are profiles of devices."""
    return sorted(
        path for path in FOLDER.glob("*.toml") if {"cluster", "board"} & set(read_toml(path, "it"))
    )


def planned(path: Path) -> dict[str, Any]:
    """Return the plan of a cluster file with its choices, as `socflower plan --json` prints it."""
    scenario = load_scenario(path, WORK)
    return with_choices(scenario, scenario_cluster(scenario), plan_scenario(scenario))


def row(path: Path, document: Mapping[str, Any]) -> str:
    """Return the row of a cluster file."""
    best = min(document["choices"], key=lambda choice: choice["epoch_s"])
    same = min(
        (choice for choice in document["choices"] if choice["strategy"] in SAME_STEPS),
        key=lambda choice: choice["epoch_s"],
    )
    groups = "" if best["groups"] is None else f", {best['groups']} groups"
    cells = (
        f"`{path.stem}`",
        f"`{best['strategy']}`{groups}",
        str(best["num_socs"]),
        human_seconds(best["epoch_s"]),
        human_joules(best["epoch_energy_j"]).partition(" (")[0],
        human_ratio(best["speedup"]),
        f"`{same['strategy']}`: {human_seconds(same['epoch_s'])}",
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    files = cluster_files()
    rows = [row(path, planned(path)) for path in files]
    links = [
        f"- [{path.stem}](../../scenarios/clusters/{path.name}): {load_scenario(path).question}\n"
        for path in files
    ]
    PAGE.write_text(HEAD + "".join(rows) + "\n" + "".join(links), "utf-8")
