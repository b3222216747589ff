"""Load a YAML file (or a mapping) with `--set` overrides as a checked `Recipe`, or report all faults in it.

`scantling.trainer.recipe` does not import torch. Checks that need a method's own definitions (an optimizer's
arguments, a preset's name) are in `scantling.trainer.recipe.checks`, which imports the method's list of names.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from scantling.errors import Fault, RecipeError, UserError, did_you_mean, shorten
from scantling.files import expand_path
from scantling.trainer.hub import is_hub_name
from scantling.trainer.recipe.checks import MOST_FAULTS, semantic_faults
from scantling.trainer.recipe.parsing import dump_yaml, flatten, parse_yaml, read_text, value_faults
from scantling.trainer.recipe.schema import DIGITS, Recipe

RecipeLike = Recipe | Mapping[str, Any] | str | os.PathLike[str]


def load_recipe(
    source: RecipeLike, overrides: Sequence[str] = (), *, sections: Mapping[str, Mapping[str, Any]] | None = None
) -> Recipe:
    """Read, override and check a recipe.

    Args:
        source: a `Recipe`, a mapping, or the path of a YAML file.
        overrides: texts `a.b=c`; the value is read as YAML.
        sections: keys to change by section, after the overrides; the values are used as given.

    Returns:
        The recipe, with all its paths made absolute.

    Raises:
        RecipeError: the recipe is invalid; all faults are listed.
        UserError: the file cannot be read.
    """
    name = "recipe"
    if isinstance(source, Recipe):
        content: dict[str, Any] = source.model_dump(exclude_unset=True)
    elif isinstance(source, Mapping):
        content = _checked_plain(source, name)
    else:
        path = recipe_file(source)
        name = str(path)
        content = read_yaml(path)
        if is_sweep(content):
            raise UserError(f"{path} is a sweep, not a recipe; run it with: scantling sweep {path}")
        content.setdefault("name", path.stem)
    for override in overrides:
        apply_override(content, override)
    for section, keys in _checked_plain(sections or {}, name).items():
        for key, value in keys.items():
            set_key(content, [section, *key.split(".")], value)
    return check_recipe(content, name)


def recipe_file(path: str | os.PathLike[str]) -> Path:
    """Return the file of a recipe: the path itself, or recipe.yaml in the directory of a run.

    Raises:
        UserError: it is a directory without a run.
    """
    path = Path(path)
    if not os.path.isdir(path):  # unlike Path.is_dir, also accepts names that are too long
        return path
    if not os.path.isfile(path / "recipe.yaml"):
        raise UserError(f"{path} holds no run: there is no recipe.yaml in it; give a recipe or the directory of a run")
    return path / "recipe.yaml"


def is_sweep(content: Mapping[str, Any]) -> bool:
    """Return True if a mapping is a sweep of recipes."""
    return "base" in content


def read_yaml(path: Path, kind: str = "recipe", keys: str = "model, data and train") -> dict[str, Any]:
    """Read one YAML mapping with the safe loader; raise a `UserError` if the file is missing or invalid.

    Args:
        path: the file.
        kind: noun for the mapping, for messages.
        keys: keys that such a mapping has, for messages.
    """
    try:
        text = read_text(path)
    except FileNotFoundError:
        close = did_you_mean(path.name, (p.name for p in path.parent.glob("*.y*ml"))) if path.parent.is_dir() else None
        raise UserError(f"{kind} not found: {path}" + (f" ({close})" if close else "")) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {kind} {path}: {error}") from None
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a {kind} is a mapping with the keys {keys}; given {_show(content)}")
    return content


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one dotted key of `content` in place from the text `a.b=value`; the value is YAML, including `null`.

    Values that YAML would read as an alias or as a comment only are taken as text, such as a file pattern.
    """
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise UserError(f"--set takes key=value, such as train.steps=100; given '{shorten(override, 200)}'")
    try:
        # `*.txt` would be an alias and `#1` a comment
        plain = text.lstrip().startswith(("*", "#"))
        value = text.strip() if plain else parse_yaml(text)
    except ValueError as error:
        raise UserError(f"--set {shorten(override, 200)}: the value is not valid YAML: {error}") from None
    set_key(content, parts, value)


def set_key(content: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set the key at a path of `content` in place; create missing mappings on the way."""
    for part in parts[:-1]:
        if not isinstance(content.get(part), dict):
            # a single value, such as `tokenizer: bytes`, gives way to a mapping
            content[part] = {}
        content = content[part]
    content[parts[-1]] = value


def check_recipe(content: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Validate a plain mapping; raise one `RecipeError` with structural and semantic faults together."""
    if faults := value_faults(content):
        raise RecipeError(faults, source)
    checked: dict[str, Any] = {}
    try:
        checked = Recipe.model_validate(content).model_dump(exclude_unset=True)
    except ValidationError as error:
        faults = schema_faults(error, Recipe)
    # after structural faults the raw mapping is checked, so that one run reports all faults
    faults += semantic_faults(checked or content, {fault.path for fault in faults})
    if faults:
        raise RecipeError(faults, source)
    # checked paths last: a fault shows the path as it was given
    return Recipe.model_validate(_absolute_paths(checked))


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe with all defaults as YAML that `load_recipe` reads back to an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Return the dotted keys in which two recipes differ, as lines `key: old -> new`."""
    before, after = dict(flatten(old.model_dump())), dict(flatten(new.model_dump()))
    return [
        f"{key}: {_show(before.get(key))} -> {_show(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _checked_plain(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a copy as plain dictionaries and lists; raise a RecipeError if it is too deep or too large."""
    if faults := value_faults(content):
        raise RecipeError(faults, source)
    return {key: _plain(inner) for key, inner in content.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _show(value: Any) -> str:
    return shorten(repr(value), 80)


def schema_faults(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """Convert pydantic's errors to faults: dotted path, allowed values, given value, closest allowed name."""
    faults = list(islice(_schema_faults(error, model), MOST_FAULTS))
    if len(faults) == MOST_FAULTS:
        faults.append(Fault("", f"more than {MOST_FAULTS} faults; only the first are listed"))
    return faults


def _schema_faults(error: ValidationError, model: type[BaseModel]) -> Iterator[Fault]:
    seen: set[str] = set()
    for item in error.errors(include_url=False):
        # pydantic's location also holds the names of union members, such as data.tokenizer.BpeTokenizer.bpe
        *above, last = item["loc"] or ("",)
        location = [part for part in above if not _is_union_tag(part, above)]
        if not _is_union_tag(last, item["loc"]) or item["type"] == "extra_forbidden":
            location.append(last)
        elif item["type"] == "string_type" and isinstance(item["input"], dict | list):
            continue  # the other member of a union, which was not meant
        path = ".".join(shorten(str(part), 100) for part in location)
        # members of a union report the same value once each
        if path in seen:
            continue
        seen.add(path)
        kind = item["type"]
        if kind == "extra_forbidden":
            fields = _fields_at(model, location[:-1])
            allowed = f"unknown key; allowed here: {', '.join(fields)}" if fields else "unknown key"
            yield Fault(path, allowed, None, did_you_mean(str(location[-1]), fields))
        elif kind == "missing":
            yield Fault(path, "missing; this key is required")
        elif kind == "literal_error":
            # pydantic gives the choices as text: 'a', 'b' or 'c'
            choices = [c.strip().strip("'") for c in item["ctx"]["expected"].replace(" or ", ", ").split(",")]
            hint = did_you_mean(str(item["input"]), choices)
            yield Fault(path, f"must be {_join_alternatives(choices)}", _show(item["input"]), hint)
        else:
            message = item["msg"].removeprefix("Value error, ")
            yield Fault(path, message[0].lower() + message[1:], _show(item["input"]))


def _join_alternatives(choices: Sequence[str]) -> str:
    return f"'{choices[0]}'" if len(choices) == 1 else "one of " + ", ".join(f"'{c}'" for c in choices)


_UNION_TAGS = {"str", "int", "constrained-str", "constrained-int", "BpeTokenizer", "FormatSection"}


def _is_union_tag(part: int | str, location: Sequence[int | str]) -> bool:
    """Return True if a location part is the name of a union member, which pydantic adds, and not a recipe key."""
    return isinstance(part, str) and ("[" in part or (part in _UNION_TAGS and location.index(part) > 0))


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        inner = _find_model(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _find_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return next((model for arg in get_args(annotation) if (model := _find_model(arg))), None)
    return None


def _absolute_paths(content: dict[str, Any]) -> dict[str, Any]:
    """Expand `~` and `$VAR` and make local paths absolute, so that a run can be resumed from any directory."""

    def expand(value: Any, *, must_exist: bool = False) -> Any:
        if isinstance(value, list):
            return [expand(inner, must_exist=must_exist) for inner in value]
        if not isinstance(value, str):
            return value
        path = expand_path(value)
        if must_exist and not os.path.exists(path):  # unlike Path.exists, also accepts names that are too long
            return value
        # escape the working directory: in a pattern, only the given part may match as a glob
        if glob.has_magic(str(path)) and not os.path.exists(path):
            return os.path.normpath(Path(glob.escape(os.getcwd())) / path)
        return os.path.abspath(path)

    data, model = content["data"], content["model"]
    kind_is_hf = data.get("hf") is not None
    # `digits` names built-in images, not a file
    for key in ("text", "jsonl", "csv", "parquet", "bin", "criteo", "images"):
        if key in data and not (key == "images" and data[key] == DIGITS):
            data[key] = expand(data[key])
    # for `hf`, the validation is the name of a split
    if "validation" in data and not kind_is_hf:
        data["validation"] = expand(data["validation"])
    if isinstance(data.get("tokenizer"), str) and data["tokenizer"] != "bytes" and not is_hub_name(data["tokenizer"]):
        data["tokenizer"] = expand(data["tokenizer"])
    if kind_is_hf:
        # the name of a dataset on the Hub stays as it is
        data["hf"] = expand(data["hf"], must_exist=True)
    if model.get("hf") is not None and not is_hub_name(model["hf"]):
        model["hf"] = expand(model["hf"])
    return content
