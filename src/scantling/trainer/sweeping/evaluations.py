"""Evaluations of finished runs; each adds columns to the sweep's table.

`python -m scantling.trainer.sweeping.evaluations RUN SETTINGS` runs them in a separate process and writes `after.json`
to the run's folder: the settings and metrics of each evaluation. To add an evaluation, add an entry to `EVALUATIONS`
and a key to the section `after`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scantling.errors import ScantlingError, UserError
from scantling.files import write_json
from scantling.trainer.reporting.metrics import finite_or_none
from scantling.trainer.sweeping.schema import AfterSection
from scantling.trainer.training.run_dir import RunDir

Metrics = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation; each function gets the value of its key in the sweep.

    Attributes:
        columns: returns the names of its metrics.
        check: raises a UserError before any run if the evaluation is impossible.
        evaluate: returns the metrics of the run in a folder.
        reads_files: True if `check` reads files, which may not exist yet.
    """

    columns: Callable[[Any], list[str]]
    check: Callable[[Any], object]
    evaluate: Callable[[Path, Any], Metrics]
    reads_files: bool = False


def _paths(given: Any) -> list[str]:
    files = given["files"] if isinstance(given, Mapping) else given
    return [files] if isinstance(files, str) else list(files)


def _check_pairs(given: Any) -> None:
    from scantling.trainer.data.blimp import read_pairs

    read_pairs(_paths(given))


def _evaluate_pairs(run_dir: Path, given: Any) -> Metrics:
    from scantling.trainer.training.minimal_pairs import evaluate_pairs

    limit = given.get("limit") if isinstance(given, Mapping) else None
    return {"minimal_pairs": evaluate_pairs(run_dir, _paths(given), limit=limit)["accuracy"]}


def _format_methods(given: Any) -> list[tuple[str, Any]]:
    """Return formats with their methods: `int3.gptq` names its own; others use the method of the section."""
    parts = [name.partition(".") for name in given["formats"]]
    return [(name, method or given["method"]) for name, _, method in parts]


def _post_columns(given: Any) -> list[str]:
    return [f"post.{name}" if method == "rtn" else f"post.{name}.{method}" for name, method in _format_methods(given)]


def _check_formats(given: Any) -> None:
    from scantling.precision import Quantizer
    from scantling.precision.weights import check_method

    for name, method in _format_methods(given):
        Quantizer.from_spec(name)
        check_method(method)
    columns = _post_columns(given)
    if len(set(columns)) < len(columns):
        raise UserError(f"after.quantize.formats: a format is listed twice; given {', '.join(given['formats'])}")


def _evaluate_quantized(run_dir: Path, given: Any) -> Metrics:
    from scantling.trainer.training.quantize import losses_after

    return dict(zip(_post_columns(given), losses_after(run_dir, _format_methods(given)), strict=True))


EVALUATIONS = {
    "quantize": Evaluation(_post_columns, _check_formats, _evaluate_quantized),
    "minimal_pairs": Evaluation(lambda _: ["minimal_pairs"], _check_pairs, _evaluate_pairs, reads_files=True),
}


def evaluation_settings(after: AfterSection) -> dict[str, Any]:
    """Return the evaluations that a sweep requests, by name."""
    return after.model_dump(mode="json", exclude_none=True)


def metric_columns(settings: Mapping[str, Any]) -> list[str]:
    """Return the columns of all of these evaluations."""
    return [column for name, given in settings.items() for column in EVALUATIONS[name].columns(given)]


def stored_metrics(run_dir: Path, settings: Mapping[str, Any]) -> Metrics:
    """Return the metrics already stored in a run's folder, of evaluations with the same settings."""
    stored = _stored(run_dir)
    known = (stored[name]["metrics"] for name in settings if _is_done(stored, name, settings[name]))
    return {column: value for metrics in known for column, value in metrics.items()}


def missing_evaluations(run_dir: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested evaluations that the run's folder does not contain."""
    stored = _stored(run_dir)
    return {name: given for name, given in settings.items() if not _is_done(stored, name, given)}


def _is_done(stored: Mapping[str, Any], name: str, given: Any) -> bool:
    if name not in stored or stored[name]["given"] != given:
        return False
    return set(stored[name]["metrics"]) == set(EVALUATIONS[name].columns(given))


def _stored(run_dir: Path) -> dict[str, Any]:
    try:
        content = json.loads(RunDir(run_dir).after.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: done for name, done in content.items() if _is_intact(done)} if isinstance(content, dict) else {}


def _is_intact(done: Any) -> bool:
    """True if a stored evaluation has its settings and metrics; a damaged one is repeated."""
    if not isinstance(done, dict) or "given" not in done or not isinstance(done.get("metrics"), dict):
        return False
    return all(finite_or_none(value) is not None for value in done["metrics"].values())


def main(run_dir: str, settings: str) -> int:
    """Run the missing evaluations and store each as soon as it is done."""
    folder = RunDir(Path(run_dir))
    try:
        # the lock keeps a training or another evaluation of this run from writing at the same time
        folder.lock()
        for name, given in missing_evaluations(folder.path, json.loads(settings)).items():
            metrics = EVALUATIONS[name].evaluate(folder.path, given)
            # read the file again: each evaluation adds to those already stored
            write_json(folder.after, {**_stored(folder.path), name: {"given": given, "metrics": metrics}})
    except ScantlingError as error:
        print(f"scantling: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
