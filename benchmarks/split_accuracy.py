"""Does training in two halves, with late gradients and few bits, keep the accuracy of training in one piece?

    python benchmarks/split_accuracy.py --resume                    (under an hour; continues after an interruption)
    python benchmarks/split_accuracy.py --resume --results FILE     (keep the runs there, not in out/)
    python benchmarks/split_accuracy.py --quick                     (digits, seconds: everything runs once)

VGG-tiny on CIFAR-10, cut after the activation of its second of four convolutions: from scratch, and by transfer from
classes 0-4 to 5-9, with everything trained (type 1) or the front half frozen (type 2). "normal" is a plain loop in
torch over the whole network; K = 0 without compression must have its weights, tensor by tensor. The others train in two
halves with every gradient as late as the window K allows, the worst case of a link. With the same seed, all have the
same recipe, initial weights and batches. Rows give mean accuracies; runs are stored one by one, with the effect of
error feedback on gradients. One thread. Needs CIFAR-10 in SOCFLOWER_DATA.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness import Row, machine, main, more_is_better, note, write_json
from benchmarks.split_accuracy_runs.gradient_errors import gradient_errors
from benchmarks.split_accuracy_runs.recipes import (
    NORMAL,
    Images,
    Plan,
    SettingName,
    Work,
    full_plan,
    images_of,
    is_judged,
    quick_plan,
    works,
)
from benchmarks.split_accuracy_runs.training import Training, differing_tensors, outcome, weights_of
from socflower.workloads.sources import load_data

RESULTS = Path("out/split-accuracy.json")
POINT = 0.01
PEERS = {"anew": "type 1", "scratch, late cut": "scratch"}
"""Settings that are compared with the normal training of another setting."""


class Runs:
    """The finished runs, in a file that is rewritten after every run."""

    def __init__(self, path: Path, plan: Plan, *, resume: bool) -> None:
        self._path = path
        self._document: dict[str, Any] = {
            "schema": 1,
            "machine": machine(),
            "threads": 1,
            "plan": json.loads(json.dumps(asdict(plan))),
            "same_weights": None,
            "gradients": [],
            "runs": [],
            "rows": [],
        }
        if not path.exists():
            return
        stored = json.loads(path.read_text())
        if not resume:
            raise SystemExit(
                f"{path}: holds {len(stored['runs'])} runs; give --resume to go on, or remove it"
            )
        if stored["plan"] != self._document["plan"]:
            raise SystemExit(
                f"{path}: its runs are of another recipe; remove it, or give other --results"
            )
        self._document = stored

    def __getitem__(self, key: str) -> Any:
        return self._document[key]

    def find(self, setting: str, variant: str, seed: int) -> dict[str, Any] | None:
        """Return a run, or None if it has not been done."""
        for run in self._document["runs"]:
            if (run["setting"], run["variant"], run["seed"]) == (setting, variant, seed):
                return dict(run)
        return None

    def add(self, work: Work, found: dict[str, Any]) -> None:
        """Store a run; one of the same key is replaced."""
        setting, variant, seed = work.key

        def replaced(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
            kept = [
                run for run in runs if (run["setting"], run["variant"], run["seed"]) != work.key
            ]
            return [*kept, {"setting": setting, "variant": variant, "seed": seed, **found}]

        self.change("runs", replaced)

    def change(self, key: str, how: Callable[[Any], Any]) -> None:
        """Replace a part of the document by `how` of it, and store the document."""
        self._document[key] = how(self._document[key])
        write_json(self._path, self._document)


class Bench:
    """Does the trainings of a plan that have not been done."""

    def __init__(self, plan: Plan, runs: Runs, folder: Path) -> None:
        self._plan, self._runs, self._folder = plan, runs, folder
        self._dataset = load_data(plan.dataset)
        self._images: dict[SettingName, Images] = {}

    def training(self, setting: SettingName, seed: int) -> Training:
        """Return a training of a setting; its pre-trained weights must exist."""
        recipe = self._plan.recipes[setting]
        if setting not in self._images:
            self._images[setting] = images_of(recipe, self._dataset)
        transfers = setting in ("type 1", "type 2")
        return Training(
            recipe=recipe,
            images=self._images[setting],
            seed=seed,
            model_name=self._plan.model,
            pretrained=self._weights(seed) if transfers else None,
            frozen=setting == "type 2",
        )

    def compare(self) -> None:
        """Compare the weights of K = 0 without compression with normal training, with and without a frozen part."""
        num_batches, seed = self._plan.num_compared, self._plan.seeds[0]
        self._pretrain(seed)
        compared = []
        settings: tuple[SettingName, ...] = ("scratch", "type 2")
        for setting in settings:
            different, num_tensors = differing_tensors(self.training(setting, seed), num_batches)
            compared.append(
                {
                    "setting": setting,
                    "batches": num_batches,
                    "tensors": num_tensors,
                    "different": different,
                }
            )
        self._runs.change("same_weights", lambda _: compared)

    def do(self, work: Work, *, again: bool = False) -> None:
        """Do a training, unless it was done."""
        if not again and self._runs.find(*work.key) is not None:
            return
        if work.setting in ("type 1", "type 2"):
            self._pretrain(work.seed)
        training = self.training(work.setting, work.seed)
        watched = work.key == ("scratch", NORMAL.name, self._plan.seeds[0])
        found, model = outcome(training, work.variant, self._watch(training) if watched else None)
        if work.setting == "pre-training":
            self._folder.mkdir(parents=True, exist_ok=True)
            partial_file = self._weights(work.seed).with_suffix(f".{os.getpid()}.npz")
            np.savez(partial_file, **weights_of(model))
            partial_file.replace(self._weights(work.seed))
        self._runs.add(work, found)
        note(
            f"{len(self._runs['runs'])}: {work.setting}, {work.variant.name}, seed {work.seed}: "
            f"{found['accuracy']:.4f} in {found['wall_s']:.0f} s ({found['cpu_s']:.0f} s of CPU)"
        )

    def _weights(self, seed: int) -> Path:
        return self._folder / f"pretrained-{self._plan.dataset}-{seed}.npz"

    def _pretrain(self, seed: int) -> None:
        work = Work(setting="pre-training", variant=NORMAL, seed=seed)
        self.do(work, again=not self._weights(seed).exists())

    def _watch(self, training: Training) -> dict[int, Callable[[nn.Module], None]]:
        """Return functions that measure gradients during a training, on held-out images."""
        held_out, size = training.images.held_out, training.recipe.batch_size
        last = training.recipe.num_batches - 1

        def measure(share: float, model: nn.Module) -> None:
            rows = gradient_errors(
                model,
                held_out,
                cut=training.recipe.cut,
                batch_size=size,
                num_batches=min(50, len(held_out) // size),
            )
            self._runs.change(
                "gradients",
                lambda kept: [
                    *(row for row in kept if row["progress"] != share),
                    *({"progress": share, **row} for row in rows),
                ],
            )

        return {round(share * last): partial(measure, share) for share in (0.1, 0.5, 1.0)}


def run(quick: bool = False, *, results: Path = RESULTS, resume: bool = False) -> list[Row]:
    """Return a row for every setting and variant: its mean accuracy against that of normal training.

    Runs are kept in `results`. With `resume` those that it has are not done again.
    """
    plan = quick_plan() if quick else full_plan()
    path = results.with_name(f"{results.stem}-quick.json") if quick else results
    if quick:
        path.unlink(missing_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = Runs(path, plan, resume=resume)
        bench = Bench(plan, runs, RESULTS.parent / "split-accuracy")
        if runs["same_weights"] is None:
            bench.compare()
        for work in works(plan.seeds):
            bench.do(work)
            runs.change(
                "rows", lambda _: [asdict(row) for row in rows(runs, plan, judged=not quick)]
            )
    finally:
        torch.set_num_threads(threads)
    return rows(runs, plan, judged=not quick)


def rows(runs: Runs, plan: Plan, *, judged: bool) -> list[Row]:
    """Return the rows of the finished runs."""
    found = [
        Row(
            case=f"{compared['setting']}: tensors equal to those of normal training after {compared['batches']} "
            "batches with K = 0 and 32 bits",
            ours=compared["tensors"] - len(compared["different"]),
            peer="all tensors",
            peer_value=compared["tensors"],
            unit="tensors",
            ratio=1 - len(compared["different"]) / compared["tensors"],
            ok=not compared["different"],
        )
        for compared in runs["same_weights"] or []
    ]
    for setting, variant in dict.fromkeys(
        (work.setting, work.variant.name) for work in works(plan.seeds)
    ):
        peer = PEERS.get(setting, setting)
        pairs = [
            (ours["accuracy"], normal["accuracy"])
            for seed in plan.seeds
            if (ours := runs.find(setting, variant, seed))
            and (normal := runs.find(peer, NORMAL.name, seed))
        ]
        if pairs and (variant != NORMAL.name or setting == "anew"):
            found.append(
                _row(setting, variant, pairs, judged=judged and is_judged(setting, variant))
            )
    return found


def _row(setting: str, variant: str, pairs: Sequence[tuple[float, float]], *, judged: bool) -> Row:
    ours, normal = (statistics.mean(accuracies) for accuracies in zip(*pairs, strict=True))
    differences = [100 * (own - other) for own, other in pairs]
    return more_is_better(
        f"{setting}, {variant}, {len(pairs)} seeds: {statistics.mean(differences):+.2f} points "
        f"({min(differences):+.2f} to {max(differences):+.2f})",
        ours,
        "normal, transferred" if setting == "anew" else "normal",
        normal,
        "accuracy",
        ok=not judged or ours >= normal - POINT,
    )


if __name__ == "__main__":
    sys.exit(main(__name__))
