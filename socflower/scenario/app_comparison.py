"""Comparison of Flower app folders, or of values of their run config, on one cluster; finished results are reused."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from socflower.engines.run_log import NO_LOGGING, RoundLogging
from socflower.errors import ConfigError, TrainingFailed
from socflower.report.quality import FIGURES, TARGETS, costs_to_target, quality_of
from socflower.report.report import write_report
from socflower.report.summary import headline_of
from socflower.scenario.app_folder import AppRun, OnNotice, run_app_folder
from socflower.scenario.comparison import failed_run
from socflower.scenario.expectations import check_app_claims, parse_claims
from socflower.scenario.tuning import key_and_values
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import remove_partial, write_atomically

_ROW_KEYS = (
    "app",
    "run_config",
    *FIGURES,
    "virtual_s",
    "wall_s",
    "energy_j",
    "bytes",
    "weights_sha256",
)
_INPUTS = (".py", ".toml", ".json", ".yaml")
_INPUTS_FILE = "inputs.json"


def app_variants(folders: Sequence[Path], vary: str, **settings: Any) -> list[AppRun]:
    """Return a run for each folder, or with `vary`, `key=value,value`, for each folder and value.

    `ConfigError` unless that makes two or more different runs.
    """
    key, tried = key_and_values("--vary", vary) if vary else ("", [])
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("compare: an app is named twice; name each once")
    if len(folders) < 2 and not vary:
        raise ConfigError(f"compare {folders[0]}: is one app; name others, or give --vary")
    names = [folder.resolve().name for folder in folders]
    labels = [
        str(folder) if names.count(name) > 1 else name
        for folder, name in zip(folders, names, strict=True)
    ]
    runs = [
        AppRun(folder=folder, label=label, **settings)
        for folder, label in zip(folders, labels, strict=True)
    ]
    if not vary:
        return runs
    return [
        replace(
            run,
            label=f"{run.label} {key}={value}" if len(runs) > 1 else f"{key}={value}",
            overrides=(*run.overrides, f"{key}={value}"),
        )
        for run in runs
        for value in tried
    ]


def compare_apps(
    runs: Sequence[AppRun],
    out: Path,
    *,
    on_notice: OnNotice = lambda line: None,
    run_one: Callable[..., dict[str, Any]] = run_app_folder,
    logging: RoundLogging = NO_LOGGING,
) -> dict[str, Any]:
    """Run the apps and return the comparison document; each result is in a folder of its own in `out`.

    A result of the same app, settings and cluster is reused. The claims are checked for each app.
    """
    with exclusive_folder(out, f"--out {out}"):
        for run in runs:
            run.check()
        remove_partial(out)
        results: list[dict[str, Any]] = []
        for run in runs:
            try:
                results.append(kept_or_run(run, out, on_notice, run_one, logging))
            except TrainingFailed as error:
                raise failed_run(
                    run.title, error, out, [each["label"] for each in results]
                ) from None
        return _write(runs, results, out)


def kept_or_run(
    run: AppRun,
    out: Path,
    on_notice: OnNotice,
    run_one: Callable[..., dict[str, Any]] = run_app_folder,
    logging: RoundLogging = NO_LOGGING,
) -> dict[str, Any]:
    """Return the result of an app in a folder of its own in `out`; it is run unless that has a result of the same."""
    folder = out / "".join(char if char.isalnum() or char in "._=-" else "-" for char in run.title)
    inputs = _inputs(run)
    try:
        if json.loads((folder / _INPUTS_FILE).read_text("utf-8")) == inputs:
            kept: dict[str, Any] = json.loads((folder / "result.json").read_text("utf-8"))
            logging.write(folder, kept["rounds"])
            return kept
    except (OSError, ValueError):
        # The result is missing or incomplete.
        pass
    on_notice(f"running {run.title}")
    # Without its inputs a result is never reused, so an interrupted run cannot look finished.
    (folder / _INPUTS_FILE).unlink(missing_ok=True)
    result = run_one(run, folder, on_notice=on_notice, logging=logging)
    write_atomically(folder / _INPUTS_FILE, json.dumps(inputs))
    return result


def _inputs(run: AppRun) -> dict[str, Any]:
    """Return what determines an app's result: its files, its settings, its cluster."""
    digest = hashlib.sha256()
    for file in sorted(
        file for file in run.folder.rglob("*") if file.suffix in _INPUTS and file.is_file()
    ):
        digest.update(
            f"{file.relative_to(run.folder)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
        )
    return {
        "files_sha256": digest.hexdigest(),
        "cluster": run.cluster_file.read_text("utf-8"),
        "engine": run.engine,
        "num_nodes": run.num_nodes,
        "training_flops": run.training_flops,
        "overrides": list(run.overrides),
        "label": run.title,
    }


def _write(runs: Sequence[AppRun], results: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    quality = quality_of(results)
    target = quality.common_target(results)
    in_wall_time = any(result["virtual_s"] is None for result in results)
    claims = []
    for run, result in zip(runs, results, strict=True):
        result |= costs_to_target(result, quality, target, in_wall_time=in_wall_time)
        result["expectations"] = check_app_claims(parse_claims(run.claims), result)[0]
        claims += [{**claim, "app": run.title} for claim in result["expectations"]]
    document = {
        "schema": 1,
        "engine": runs[0].engine,
        "cluster_file": str(runs[0].cluster_file),
        "quality": quality.name,
        **{key: results[0][key] for key in TARGETS},
        "rows": [
            {"strategy": result["label"], **{key: result.get(key) for key in _ROW_KEYS}}
            for result in results
        ],
        "headline": headline_of([{**result, "strategy": result["label"]} for result in results]),
        "expectations": claims,
    }
    write_atomically(out / "comparison.json", json.dumps(document, indent=1))
    shown = [run.shown(result) for run, result in zip(runs, results, strict=True)]
    write_report(out / "report.html", shown, title=" and ".join(run.title for run in runs))
    return document
