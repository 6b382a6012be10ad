"""Does training in two halves, with late gradients and few bits, keep the accuracy of training in one piece?

    python benchmarks/split_accuracy.py --resume                    (under an hour; goes on where it was cut)
    python benchmarks/split_accuracy.py --resume --results FILE     (keep the runs there, not in out/)
    python benchmarks/split_accuracy.py --choose                    (recipes tried on training images left out)
    python benchmarks/split_accuracy.py --quick                     (digits, seconds: to see that all of it runs)

VGG-tiny on CIFAR-10, cut behind the activation of its second of four convolutions: from scratch, and by transfer from
classes 0-4 to 5-9, with everything trained (type 1) or the front half frozen (type 2). "normal" is a plain loop in
torch over the whole network; K = 0 without compression must have its very weights, tensor by tensor. The others train
in two halves with every gradient as late as the window K allows, the worst that a link can do. All have the same
recipe, first weights and batches, seed by seed. Rows give mean accuracies; runs are stored one by one, with what error
feedback makes of gradients. One thread. Needs CIFAR-10 in SOCFLOWER_DATA.
"""

import argparse
import fcntl
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Row, machine, main
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
from socflower.workloads import evaluate, load_data

RESULTS = Path("out/split-accuracy.json")
POINT = 0.01
LOCK = Path("out/split-accuracy.lock")
PEERS = {"anew": "type 1", "scratch, late cut": "scratch"}
"""Where the normal training stands that a setting is compared with, if not in itself."""

TRIED = ((64, 0.2), (64, 0.1), (64, 0.05), (64, 0.02), (32, 0.025), (32, 0.01), (16, 0.005))
"""Batch sizes and learning rates."""


class Runs:
    """What has been run, in a file that is written anew after every run."""

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
        """Store a part of the document, made of what it is now: another process may have stored runs meanwhile."""
        LOCK.parent.mkdir(parents=True, exist_ok=True)
        with LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._path.exists():
                self._document = json.loads(self._path.read_text())
            self._document[key] = how(self._document[key])
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial_file = self._path.with_suffix(".part")
            partial_file.write_text(json.dumps(self._document, indent=1) + "\n")
            partial_file.replace(self._path)


class Bench:
    """Trains what a plan says, with the runs that are there."""

    def __init__(self, plan: Plan, runs: Runs, folder: Path) -> None:
        self._plan, self._runs, self._folder = plan, runs, folder
        self._dataset = load_data(plan.dataset)
        self._images: dict[SettingName, Images] = {}

    def training(self, setting: SettingName, seed: int) -> Training:
        """Return a training of a setting; the pre-trained weights that it needs must be there."""
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
        """See that K = 0 without compression has the weights of normal training, with and without a frozen part."""
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
        print(
            f"{len(self._runs['runs'])}: {work.setting}, {work.variant.name}, seed {work.seed}: "
            f"{found['accuracy']:.4f} in {found['wall_s']:.0f} s ({found['cpu_s']:.0f} s of CPU)",
            file=sys.stderr,
            flush=True,
        )

    def choose(self) -> list[dict[str, Any]]:
        """Return what normal training comes to on training images that were left out, by a seed of its own."""
        own = self.training("scratch", 0)
        found = []
        for batch_size, rate in TRIED:
            training = replace(
                own, recipe=replace(own.recipe, batch_size=batch_size, learning_rate=rate)
            )
            accuracy = evaluate(training.normal().model, own.images.held_out).accuracy
            found.append({"batch_size": batch_size, "learning_rate": rate, "accuracy": accuracy})
            print(found[-1], file=sys.stderr, flush=True)
        return found

    def _weights(self, seed: int) -> Path:
        return self._folder / f"pretrained-{self._plan.dataset}-{seed}.npz"

    def _pretrain(self, seed: int) -> None:
        work = Work(setting="pre-training", variant=NORMAL, seed=seed)
        self.do(work, again=not self._weights(seed).exists())

    def _watch(self, training: Training) -> dict[int, Callable[[nn.Module], None]]:
        """Return what measures gradients on the way through a training, on images that it does not train on."""
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


def run(
    quick: bool = False,
    *,
    results: Path = RESULTS,
    resume: bool = True,
    part: int = 1,
    parts: int = 1,
) -> list[Row]:
    """Return a row for every setting and variant: its mean accuracy against that of normal training.

    With `parts` only every so manieth training is done here, from the `part`-th on; other processes do the others.
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
        if part == 1 and runs["same_weights"] is None:
            bench.compare()
        for work in works(plan.seeds)[part - 1 :: parts]:
            bench.do(work)
            runs.change(
                "rows", lambda _: [asdict(row) for row in rows(runs, plan, judged=not quick)]
            )
    finally:
        torch.set_num_threads(threads)
    return rows(runs, plan, judged=not quick)


def rows(runs: Runs, plan: Plan, *, judged: bool) -> list[Row]:
    """Return the rows of the runs that are done."""
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
    return Row(
        case=f"{setting}, {variant}, {len(pairs)} seeds: {statistics.mean(differences):+.2f} points "
        f"({min(differences):+.2f} to {max(differences):+.2f})",
        ours=ours,
        peer="normal, transferred" if setting == "anew" else "normal",
        peer_value=normal,
        unit="accuracy",
        ratio=ours / normal,
        ok=not judged or ours >= normal - POINT,
    )


def _choose(plan: Plan) -> None:
    torch.set_num_threads(1)
    unused = Runs(RESULTS.with_name("split-accuracy-unused.json"), plan, resume=True)
    print(json.dumps(Bench(plan, unused, RESULTS.parent).choose()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="digits, seconds")
    parser.add_argument("--json", action="store_true", help="print a document")
    parser.add_argument("--resume", action="store_true", help="go on with the runs that are there")
    parser.add_argument("--choose", action="store_true", help="try batch sizes and learning rates")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="every N-th training, from the I-th on"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where runs are kept")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    if arguments.choose:
        _choose(quick_plan() if arguments.quick else full_plan())
    else:
        number, _, of = arguments.part.partition("/")
        sys.exit(
            main(
                lambda quick: run(
                    quick,
                    results=arguments.results,
                    resume=arguments.resume or quick,
                    part=int(number),
                    parts=int(of),
                )
            )
        )
