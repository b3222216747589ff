"""Checks of `save_pretrained` folders before transformers reads them, so that an error names the file."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
"""Keys of configurations for the number of modules in a model."""
MAX_MODULES = 10_000
"""Largest number of layers and experts of a model without weights."""
_EXTRA_MODULES = 1000
MAX_TOKEN_ID = 1 << 20
"""Token ids below this are accepted for any vocabulary."""
_EXTRA_ELEMENTS = 1 << 26
"""Modules beyond the number of tensors, and elements beyond those of the weights, that a configuration may have."""


@dataclass(frozen=True)
class StoredTensor:
    """Place and shape of a tensor in a safetensors file."""

    file: Path
    shape: list[int]


@dataclass(frozen=True)
class Weights:
    """Weights in a folder.

    Attributes:
        files: names of their files, as text.
        tensors: number of tensors.
        elements: number of elements in all tensors.
        stored: the tensors in safetensors files, by name.
    """

    files: str
    tensors: int
    elements: int
    stored: dict[str, StoredTensor] = field(default_factory=dict)

    @classmethod
    def of_files(cls, files: str, stored: dict[str, StoredTensor]) -> Weights:
        """Count the tensors in safetensors files."""
        return cls(files, len(stored), sum(prod(tensor.shape) for tensor in stored.values()), stored)


@contextmanager
def blame(file: object) -> Iterator[None]:
    """Turn every exception into a UserError that names a file.

    Args:
        file: the file, or a text that names it.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
    except Exception as error:  # transformers documents no set of errors
        text = f"{type(error).__name__} {error}" if isinstance(error, LookupError) else first_line(error)
    else:
        return
    raise UserError(f"cannot load {file}: {text}")


@contextmanager
def without_byte_order_marks(folder: Path) -> Iterator[Path]:
    """Yield a folder whose texts have no byte-order mark: this one, or a temporary one with links and copies."""
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


def read_model_config(path: Path) -> dict[str, Any]:
    """Read a `config.json`, and check the `generation_config.json` next to it, if it exists.

    Raises:
        UserError: one of them is not a JSON object, or a value in it has a wrong type.
    """
    content = read_json_object(path)
    names = content.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{path}: architectures must be a list of names; given {names!r}")
    _check_token_ids(content, path, content)
    generation = path.with_name(GENERATION)
    if os.path.lexists(generation):
        _check_token_ids(read_json_object(generation), generation, content)
    return content


def _check_token_ids(settings: dict[str, Any], path: Path, config: dict[str, Any]) -> None:
    """Raise a UserError for impossible ids of special tokens; ids slightly above a tiny vocabulary are common."""
    text = config.get("text_config")
    sizes = [each.get("vocab_size") for each in (config, text) if isinstance(each, dict)]
    limit = max([MAX_TOKEN_ID, *(size for size in sizes if isinstance(size, int))])
    for key, value in settings.items():
        for id_ in value if isinstance(value, list) else [value]:
            if key.endswith("_token_id") and not isinstance(id_, int | None):
                raise UserError(f"{path}: {key} must be the id of a token or a list of ids; given {value!r}")
            if key.endswith(("_token_id", "_tokens")) and isinstance(id_, int) and abs(id_) >= limit:
                raise UserError(
                    f"{path}: {key} must be below {limit}, since the vocabulary has no larger id; given {id_}"
                )


def check_weights(folder: Path) -> Weights | None:
    """Check that the weights in a folder can be read, and count them.

    Returns:
        The counts; None for weights in another format than safetensors.

    Raises:
        UserError: the folder has no weights, or a file is damaged.
    """
    if os.path.lexists(folder / WEIGHTS):
        return Weights.of_files(WEIGHTS, _read_tensors(folder / WEIGHTS))
    if not os.path.lexists(folder / WEIGHTS_INDEX):
        if any(folder.glob("pytorch_model*.bin")):
            return None
        raise UserError(f"cannot load {folder}: it has neither {WEIGHTS} nor {WEIGHTS_INDEX}; copy the weights there")
    index = folder / WEIGHTS_INDEX
    content = read_json_object(index)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} is damaged: weight_map and metadata must be mappings; copy it again")
    tensors_by_file = {}
    for name in dict.fromkeys(map(str, weight_map.values())):
        if not name or Path(name).name != name or not os.path.lexists(folder / name):
            raise UserError(f"{index} names the file {name!r}, which is not in the folder; copy it there")
        tensors_by_file[name] = _read_tensors(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in tensors_by_file[str(name)]:
            raise UserError(
                f"{folder / name} has no {tensor}, which {index.name} lists; one is damaged, copy both again"
            )
    tensors = {name: each for tensors in tensors_by_file.values() for name, each in tensors.items()}
    return Weights.of_files(f"{WEIGHTS_INDEX} with its files", tensors)


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    from safetensors import safe_open

    with blame(path):
        if path.exists() and not path.is_file():
            raise UserError("it is not a file")
        with safe_open(path, "pt") as file:
            names = file.keys()
            return {name: StoredTensor(path, file.get_slice(name).get_shape()) for name in names}


def check_layer_counts(content: Any, weights: Weights | None = None, key: str = "") -> None:
    """Refuse a configuration with so many layers that building it would take hours.

    Args:
        content: the configuration, or a value in it.
        weights: weights to load into its layers; None for a new model.
        key: key of the value.

    Raises:
        UserError: too many layers; the message names the key.
    """
    if isinstance(content, dict):
        for name, value in content.items():
            check_layer_counts(value, weights, str(name))
    elif isinstance(content, list):
        if len(content) > MAX_MODULES:
            raise UserError(f"{key} must be a list of at most {MAX_MODULES} values; given {len(content)}")
        for value in content:
            check_layer_counts(value, weights, key)
    elif isinstance(content, int) and _REPEATED.fullmatch(key):
        if weights is None and content > MAX_MODULES:
            raise UserError(f"{key} must be at most {MAX_MODULES}; given {content}")
        if weights is not None and content > weights.tensors + _EXTRA_MODULES:
            raise UserError(f"{key} is {content}, but {weights.files} has only {weights.tensors} tensors")


def check_model_size(model: Any, weights: Weights) -> None:
    """Refuse a model that is far larger than its weights, which transformers would allocate first.

    Args:
        model: the configured model, on the meta device.
        weights: weights to load into it.

    Raises:
        UserError: the model is too large; the message has both sizes.
    """
    # tied weights count once, as in the file
    tensors = {id(tensor): tensor.numel() for tensor in (*model.parameters(), *model.buffers())}
    elements = sum(tensors.values())
    if elements > 4 * weights.elements + _EXTRA_ELEMENTS:
        raise UserError(f"it describes a model of {elements} parameters, but {weights.files} has {weights.elements}")
