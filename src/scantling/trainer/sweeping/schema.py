"""Schema of a sweep file, and its loader. All faults are reported at once, as for a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from scantling.errors import Fault, RecipeError, UserError, did_you_mean
from scantling.files import expand_path
from scantling.trainer.recipe.loading import apply_override, is_sweep, read_yaml, recipe_file, schema_faults
from scantling.trainer.recipe.schema import Paths, Section, Text

Settings = dict[Text, Any]
Several = Annotated[list[Any], Field(min_length=1)]
Group = Annotated[list[Annotated[Settings, Field(min_length=1)]], Field(min_length=1)]


class QuantizeSection(Section):
    """Held-out losses after the weights of a run are quantized."""

    formats: Annotated[list[Text], Field(min_length=1)]
    """Names of formats, such as `[int3, int4]`. Each is a column, `post.int3`, or with GPTQ `post.int3.gptq`. A
    format may name its own method, `[int3, int3.gptq]`."""
    method: Literal["rtn", "gptq"] = "rtn"
    """Rounding to nearest, or GPTQ with the run's own training data; one scale per output channel."""


class PairsSection(Section):
    """Minimal pairs to score."""

    files: Paths
    """Files or folders, as in `scantling eval --minimal-pairs`."""
    limit: int | None = Field(default=None, ge=1)
    """Number of pairs, spread evenly over the files. Default: all."""


class AfterSection(Section):
    """Evaluations of each finished run; their metrics are additional columns of the table."""

    quantize: QuantizeSection | None = None
    """Weight formats whose loss is measured, as in `scantling quantize`."""

    minimal_pairs: Paths | PairsSection | None = None
    """Files or folders of minimal pairs, as in `scantling eval --minimal-pairs`, or `{files: ..., limit: 5000}`; the
    column is the accuracy."""


class Sweep(Section):
    """Grid of recipes: the product of all axes and of all groups of linked settings."""

    name: Text | None = None
    """Name of the sweep. Default: the file's name."""
    base: Text | dict[str, Any]
    """The base recipe of all runs: the path of a file, or the recipe itself."""
    axes: dict[Text, Several] = Field(default_factory=dict)
    """Dotted keys of the recipe, and the values that each takes: `{train.steps: [100, 200]}`."""
    linked: dict[Text, Group] = Field(default_factory=dict)
    """Settings that change together: for each group name, a list of mappings from keys to values."""
    leave_out: list[Annotated[Settings, Field(min_length=1)]] = Field(default_factory=list)
    """Combinations that are not run: those that match all keys of a mapping. A list in the mapping allows several
    values. A key that a combination does not set has its value in the base, or null."""
    after: AfterSection = Field(default_factory=AfterSection)
    """Evaluations of each finished run."""
    out: Text | None = None
    """Folder of the runs. Default: `runs/<name>`."""
    table: Text | None = None
    """CSV file of the table of runs. Default: `runs.csv` in that folder."""

    @property
    def keys(self) -> list[str]:
        """Keys that the sweep sets, in order: the columns of the table that distinguish runs."""
        linked = [key for group in self.linked.values() for settings in group for key in settings]
        return list(dict.fromkeys([*self.axes, *linked]))

    @property
    def folder(self) -> Path:
        """Folder of the sweep's runs."""
        return expand_path(self.out or f"runs/{self.name or 'sweep'}")

    @property
    def table_path(self) -> Path:
        """Path of the table."""
        return expand_path(self.table) if self.table else self.folder / "runs.csv"


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Sweep, dict[str, Any]]:
    """Read a sweep and its base recipe.

    Args:
        path: path of a YAML file.
        overrides: overrides `a.b=c` of the base recipe.

    Returns:
        The sweep, and its base as an unchecked mapping.

    Raises:
        RecipeError: keys of the sweep itself are invalid; all faults are listed.
        UserError: a file cannot be read.
    """
    path = Path(path)
    content = read_yaml(path, "sweep", "base and axes")
    if not is_sweep(content) and "model" in content:
        raise UserError(f"{path} is a recipe, not a sweep; train it with: scantling train {path}")
    content.setdefault("name", path.stem)
    try:
        sweep = Sweep.model_validate(content)
    except ValidationError as error:
        raise RecipeError(list(schema_faults(error, Sweep)), str(path)) from None
    if faults := list(_faults(sweep)):
        raise RecipeError(faults, str(path))
    if isinstance(sweep.base, str):
        base = read_yaml(recipe_file(expand_path(sweep.base)))
    else:
        base = dict(sweep.base)
    for override in overrides:
        apply_override(base, override)
    return sweep, base


def _faults(sweep: Sweep) -> Iterator[Fault]:
    if not sweep.axes and not sweep.linked:
        yield Fault("axes", "missing; give axes, linked settings, or both")
    sources = [("axes", set(sweep.axes))]
    sources += [(f"linked.{name}", {key for each in group for key in each}) for name, group in sweep.linked.items()]
    seen: dict[str, str] = {}
    for source, keys in sources:
        for key in sorted(keys):
            path = f"{source}.{key}"
            if not all(key.split(".")) or key == "name":
                yield Fault(path, "is not a recipe key that a sweep can set; give one such as train.steps")
            for other, where in seen.items():
                if source == where != "axes":
                    continue  # a run has only one of a group's settings
                if key == other or key.startswith(other + ".") or other.startswith(key + "."):
                    yield Fault(path, f"overlaps with {where}.{other}; remove one of them")
            seen[key] = source
    for number, settings in enumerate(sweep.leave_out):
        for key in settings:
            if key not in seen:
                allowed = f"is not swept; the sweep sets {', '.join(sweep.keys)}"
                yield Fault(f"leave_out.{number}.{key}", allowed, None, did_you_mean(key, sweep.keys))
