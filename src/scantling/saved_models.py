"""Folders of `save_pretrained`, checked before transformers reads them, so that an error names the file."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scantling.errors import UserError, first_line
from scantling.files import read_json_object

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_TEXTS = (".json", ".txt", ".jinja", ".jsonl")
_REPEATED = re.compile(r"(num|n|encoder|decoder).*(layers?|experts|blocks)|depths?", re.IGNORECASE)
"""Keys of configurations that say how many modules a model has."""
MOST_MODULES = 10_000
"""Layers and experts of a model without weights."""
_MODULES = 1000
MOST_IDS = 1 << 20
"""Ids that every vocabulary may have, whatever it is known of it."""
_ELEMENTS = 1 << 26
"""More modules than tensors and more elements than the weights have, before a configuration is refused."""


@dataclass(frozen=True)
class Weights:
    """The weights in a folder.

    Attributes:
        files: that hold them, by name.
        tensors: how many there are.
        elements: of all of them.
    """

    files: str
    tensors: int
    elements: int


@contextmanager
def blaming(what: object) -> Iterator[None]:
    """Turn every exception into a UserError that names a file.

    Args:
        what: the file, or a text that names it.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
    except Exception as error:  # transformers documents no set of errors
        text = f"{type(error).__name__} {error}" if isinstance(error, LookupError) else first_line(error)
    else:
        return
    raise UserError(f"cannot load {what}: {text}")


@contextmanager
def without_marks(folder: Path) -> Iterator[Path]:
    """Return a folder whose texts begin without a byte-order mark: this one, or one of links and copies."""
    marked = {path.name for path in folder.iterdir() if path.suffix in _TEXTS and _has_mark(path)}
    if not marked:
        yield folder
        return
    with TemporaryDirectory(prefix="scantling-") as name:
        for path in folder.iterdir():
            if path.name in marked:
                (Path(name) / path.name).write_bytes(path.read_bytes().removeprefix(codecs.BOM_UTF8))
            else:
                (Path(name) / path.name).symlink_to(path.absolute())
        yield Path(name)


def _has_mark(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def read_settings(path: Path) -> dict[str, Any]:
    """Read a `config.json`, and check that `generation_config.json` next to it can be read if it exists.

    Raises:
        UserError: one of them is not a JSON object, or a value in it has a wrong type.
    """
    content = read_json_object(path)
    names = content.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{path}: architectures is a list of names; given {names!r}")
    _check_token_ids(content, path, content)
    beside = path.with_name(GENERATION)
    if os.path.lexists(beside):
        _check_token_ids(read_json_object(beside), beside, content)
    return content


def _check_token_ids(settings: dict[str, Any], path: Path, config: dict[str, Any]) -> None:
    """Refuse ids of special tokens that no vocabulary has; a few above the vocabulary are common in tiny models."""
    text = config.get("text_config")
    sizes = [each.get("vocab_size") for each in (config, text) if isinstance(each, dict)]
    limit = max([MOST_IDS, *(size for size in sizes if isinstance(size, int))])
    for key, value in settings.items():
        for id_ in value if isinstance(value, list) else [value]:
            if key.endswith("_token_id") and not isinstance(id_, int | None):
                raise UserError(f"{path}: {key} is the id of a token or a list of them; given {value!r}")
            if key.endswith(("_token_id", "_tokens")) and isinstance(id_, int) and abs(id_) >= limit:
                raise UserError(f"{path}: {key} is {id_}, and the vocabulary has no such id")


def check_weights(folder: Path) -> Weights | None:
    """Check that the weights in a folder can be read, and count them.

    Returns:
        None for weights in another format than safetensors.

    Raises:
        UserError: no weights, or a file is damaged.
    """
    if os.path.lexists(folder / WEIGHTS):
        shapes = _shapes(folder / WEIGHTS)
        return Weights(WEIGHTS, len(shapes), sum(map(prod, shapes.values())))
    if not os.path.lexists(folder / WEIGHTS_INDEX):
        if any(folder.glob("pytorch_model*.bin")):
            return None
        raise UserError(f"cannot load {folder}: it holds no {WEIGHTS} and no {WEIGHTS_INDEX}; copy the weights there")
    index = folder / WEIGHTS_INDEX
    content = read_json_object(index)
    places, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(places, dict) or not places:
        raise UserError(f"{index} is damaged: weight_map and metadata are no mappings")
    found = {}
    for name in dict.fromkeys(map(str, places.values())):
        if not name or Path(name).name != name or not os.path.lexists(folder / name):
            raise UserError(f"{index} names the file {name!r}, which is not in the folder; copy it there")
        found[name] = _shapes(folder / name)
    for tensor, name in places.items():
        if tensor not in found[str(name)]:
            raise UserError(f"{folder / name} holds no {tensor}, which {index.name} says that it does; it is damaged")
    sizes = [prod(shape) for shapes in found.values() for shape in shapes.values()]
    return Weights(f"{WEIGHTS_INDEX} with its files", len(sizes), sum(sizes))


def _shapes(path: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    with blaming(path):
        if path.exists() and not path.is_file():
            raise UserError("it is not a file")
        with safe_open(path, "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)


def check_counts(content: Any, weights: Weights | None = None, key: str = "") -> None:
    """Refuse a configuration of so many layers that it would take hours to build.

    Args:
        content: the configuration.
        weights: that are to be loaded into its layers.
        key: under which `content` stands in it.

    Raises:
        UserError: names the key.
    """
    if isinstance(content, dict):
        for name, value in content.items():
            check_counts(value, weights, str(name))
    elif isinstance(content, list):
        if len(content) > MOST_MODULES:
            raise UserError(f"{key} is a list of {len(content)}; at most {MOST_MODULES} are built")
        for value in content:
            check_counts(value, weights, key)
    elif isinstance(content, int) and _REPEATED.fullmatch(key):
        if weights is None and content > MOST_MODULES:
            raise UserError(f"{key} is {content}; at most {MOST_MODULES} are built")
        if weights is not None and content > weights.tensors + _MODULES:
            raise UserError(f"{key} is {content}, but {weights.files} holds {weights.tensors} tensors")


def check_size(model: Any, weights: Weights) -> None:
    """Refuse a model that is far larger than its weights, which transformers would fill with zeros first.

    Args:
        model: as configured, on the meta device.
        weights: that are to be loaded into it.

    Raises:
        UserError: with both sizes.
    """
    tensors = {id(tensor): tensor.numel() for tensor in (*model.parameters(), *model.buffers())}
    elements = sum(tensors.values())
    if elements > 4 * weights.elements + _ELEMENTS:
        raise UserError(f"it describes a model of {elements} numbers, but {weights.files} holds {weights.elements}")
