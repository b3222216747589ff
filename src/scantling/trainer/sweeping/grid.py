"""Expand a sweep into runs: a checked recipe for every combination, or a list of all faults in them."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scantling.errors import Fault, RecipeError, UserError, with_hint
from scantling.trainer.planning.plan import planned_size
from scantling.trainer.recipe import Recipe, check_recipe
from scantling.trainer.recipe.loading import set_key
from scantling.trainer.sweeping.schema import Sweep
from scantling.trainer.training.resume import FREE_KEYS

logger = logging.getLogger(__name__)

MAX_COMBINATIONS = 10_000
"""Most combinations in one sweep, including those in `leave_out`."""
_IRRELEVANT_KEYS = FREE_KEYS - {"train.eval_samples"}
"""Keys that do not affect a run's row in the table."""


@dataclass(frozen=True)
class Case:
    """One run of a sweep.

    Attributes:
        key: identifier of the run, a hash of its recipe.
        label: readable text that distinguishes the run from others.
        values: values of the sweep's keys, in order; None for a key that the recipe does not have.
        recipe: the checked recipe.
        num_parameters: N, outside of embeddings and the output layer.
        num_tokens: D.
    """

    key: str
    label: str
    values: Mapping[str, Any]
    recipe: Recipe
    num_parameters: int
    num_tokens: int

    @property
    def work(self) -> float:
        """Relative duration of the run, without a unit: N D."""
        return float(max(1, self.num_parameters) * self.num_tokens)


def expand_sweep(sweep: Sweep, base: Mapping[str, Any], source: str = "sweep") -> list[Case]:
    """Return the runs of a sweep in the order of its axes, the last one fastest; equal recipes become one run.

    Args:
        sweep: as read.
        base: the base recipe, unchecked.
        source: name of the sweep in messages.

    Raises:
        RecipeError: a recipe of the grid is invalid; lists all faults, each with the settings that cause it.
        UserError: all combinations are left out, or there are too many.
    """
    count = math.prod(map(len, [*sweep.axes.values(), *sweep.linked.values()]))
    if count > MAX_COMBINATIONS:
        raise UserError(f"{source}: {count:,} combinations; at most {MAX_COMBINATIONS:,} are allowed in one sweep")
    product = list(_product(sweep))
    for unused in (each for each in sweep.leave_out if not any(_matches(each, given, base) for given in product)):
        logger.warning("%s: leave_out matches no combination: %s", source, unused)
    settings = [given for given in product if not any(_matches(each, given, base) for each in sweep.leave_out)]
    if not settings:
        raise UserError(f"{source}: leave_out removes all runs; remove some of its entries")
    cases: dict[str, Case] = {}
    faults: dict[str, tuple[Fault, list[int]]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for i, given in enumerate(settings):
        content = copy.deepcopy(dict(base))
        for key, value in given.items():
            set_key(content, key.split("."), copy.deepcopy(value))
        try:
            case = _make_case(sweep, given, content, sizes)
        except RecipeError as error:
            problems = error.faults
        except UserError as error:
            problems = [Fault("", str(error))]
        else:
            # Different combinations can give the same recipe; the first one names the run.
            cases.setdefault(case.key, case)
            continue
        for fault in problems:
            faults.setdefault(str(fault), (fault, []))[1].append(i)
    if faults:
        raise RecipeError([_locate_fault(fault, indices, settings) for fault, indices in faults.values()], source)
    return list(cases.values())


def select_cases(chosen: Sequence[Case], where: Mapping[str, str]) -> list[Case]:
    """Return the runs that have these values, written as in the table.

    Raises:
        UserError: a key that is not swept, or a value that no run has.
    """
    for key, value in where.items():
        known = list(chosen[0].values) if chosen else []
        if key not in known:
            raise UserError(with_hint(f"--only: '{key}' is not swept; the sweep sets {', '.join(known)}", key, known))
        left = [case for case in chosen if format_cell(case.values[key]) == value]
        if not left:
            values = ", ".join(dict.fromkeys(format_cell(case.values[key]) for case in chosen))
            raise UserError(f"--only: no run has {key} = {value}; the values are {values}")
        chosen = left
    return list(chosen)


def format_cell(value: Any) -> str:
    """Return a value as text for the table: empty for null, JSON for lists, mappings and booleans."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def axis_labels(sweep: Sweep) -> dict[str, str]:
    """Return short names of the keys that distinguish runs: only the first key of linked settings, if it suffices."""
    keys = list(sweep.axes)
    for group in sweep.linked.values():
        first = next(iter(group[0]))
        values = [settings.get(first) for settings in group]
        starts_alike = all(next(iter(settings)) == first for settings in group)
        is_distinct = starts_alike and len({format_cell(value) for value in values}) == len(group)
        keys += [first] if is_distinct else [key for settings in group for key in settings]
    keys = list(dict.fromkeys(keys))
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def _product(sweep: Sweep) -> Iterator[dict[str, Any]]:
    axes = [[{key: value} for value in values] for key, values in sweep.axes.items()]
    for combination in itertools.product(*axes, *sweep.linked.values()):
        yield {key: value for settings in combination for key, value in settings.items()}


def _matches(pattern: Mapping[str, Any], given: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """True if settings on top of a base match every key of a pattern; a list in the pattern allows several values."""
    values = {key: given[key] if key in given else _get_path(base, key.split(".")) for key in pattern}
    return all(
        values[key] == wanted or (isinstance(wanted, list) and values[key] in wanted) for key, wanted in pattern.items()
    )


def _make_case(
    sweep: Sweep, given: Mapping[str, Any], content: dict[str, Any], sizes: dict[str, tuple[int, int]]
) -> Case:
    labels = {name: given[key] for key, name in axis_labels(sweep).items() if key in given}
    label = " ".join(f"{name}={format_cell(value) or 'null'}" for name, value in labels.items())
    content["name"] = "".join(c if c.isprintable() and c != "/" else "_" for c in label)[:120]
    recipe = check_recipe(content)
    if recipe.comm.elastic:
        raise UserError("comm.elastic: the runs of a sweep would join each other as replicas; leave it out")
    # hash paths as written and omit defaults: the key must be the same on another machine and in a later version
    written = Recipe.model_validate(content).model_dump(mode="json", exclude_defaults=True)
    for path in _IRRELEVANT_KEYS:
        _drop_path(written, path.split("."))
    key = hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:16]
    all_keys = Recipe.model_validate(content).model_dump(mode="json")
    values = {key: given[key] if key in given else _get_path(all_keys, key.split(".")) for key in sweep.keys}
    # planning builds the model, which is slow: runs with the same sections and batch share the result
    shape = f"{recipe.model_dump_json(include={'model', 'data', 'tensor', 'precision'})} {recipe.batch_size}"
    if shape not in sizes:
        sizes[shape] = planned_size(recipe)
    num_parameters, tokens = sizes[shape]
    return Case(key, label, values, recipe, num_parameters, tokens * recipe.train.steps)


def _locate_fault(fault: Fault, indices: Sequence[int], settings: Sequence[Mapping[str, Any]]) -> Fault:
    """Return the fault with the one setting that exactly its runs share, or else with an example run."""
    where = None
    if len(indices) < len(settings):
        first = settings[indices[0]]
        for key, value in first.items():
            if [i for i, each in enumerate(settings) if key in each and each[key] == value] == list(indices):
                where = f"where {key} = {format_cell(value) or 'null'}"
                break
        else:
            others = f", and {len(indices) - 1} more" if len(indices) > 1 else ""
            where = (
                "where " + ", ".join(f"{key} = {format_cell(value) or 'null'}" for key, value in first.items()) + others
            )
    hint = "; ".join(each for each in (fault.hint, where) if each)
    return Fault(fault.path, fault.problem, fault.given, hint or None)


def _get_path(content: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


def _drop_path(content: dict[str, Any], parts: Sequence[str]) -> None:
    inner = _get_path(content, parts[:-1])
    if isinstance(inner, dict):
        inner.pop(parts[-1], None)
