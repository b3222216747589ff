"""Models with quantised weights on disk: their codes, packed, and all else as transformers writes it.

`save_quantized` lets the model save itself, and then packs the weights whose codes are known: the file that
transformers wrote becomes `quantized.safetensors`, and `quantized.json` says how to unpack it. What comes back is that
file bit for bit, so that whatever transformers does with it (ties, names of its own, layers of cores) stays as it is.
transformers itself does not read the folder: there is no `model.safetensors` in it. `scantling.load` does.

For a packed weight NAME the file holds `NAME.patterns` (bytes) and `NAME.scale`: fp32 (fp64 for a model in fp64), or,
where there are few different ones, as those of block formats, their numbers in one byte each and `NAME.scales`.

`scantling.sha256` holds checksums of all files, which `scantling.load` compares. Folders are written aside, synced and
renamed: a full disk or a kill leaves no folder of that name. Reading runs no code.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from scantling.checksums import write_checksums
from scantling.errors import UserError
from scantling.files import check_is_free, read_json_object, written_aside
from scantling.precision.matrices import as_matrix, from_matrix
from scantling.precision.packing import PackedMatrix
from scantling.precision.quantizer import in_dtype
from scantling.precision.weights import QuantizedWeight, quantized_weights
from scantling.saved_models import blaming

logger = logging.getLogger(__name__)

INDEX, TENSORS = "quantized.json", "quantized.safetensors"
FORMAT = 1
_FEW = 256


@dataclass(frozen=True)
class SavedBytes:
    """Bytes of weights on disk.

    Attributes:
        written: of what is there now, with what says how to unpack it.
        plain: of the files that transformers wrote, before they were packed.
        num_numbers: numbers in them.
    """

    written: int
    plain: int
    num_numbers: int


def save_quantized(
    model: Any, folder: str | Path, *, packed: bool = True, also: Callable[[Path], None] | None = None
) -> SavedBytes:
    """Write a model after `quantize_weights` with its weights packed; `scantling.load` reads it.

    Needs room for the model as it is for a moment.

    Args:
        model: of transformers, with quantised weights.
        folder: to write; it must not exist or be empty.
        packed: whether weights take the bits of their format; else the folder is what `save_pretrained` writes, with
            the quantised values in the dtype of the model, which transformers loads.
        also: writes more files, such as a tokenizer, into the folder it is given; they have checksums, too.

    Returns:
        What it takes on disk, and what it would have taken.

    Raises:
        UserError: no quantised weights or changed ones, a model without `save_pretrained`, or a folder that holds
            something.
        RunError: the folder cannot be written; nothing is left of it.

    Example:
        >>> sc.precision.save_quantized(model, "my-model-int4")  # doctest: +SKIP
    """
    folder = Path(folder)
    weights = quantized_weights(model)
    if not weights:
        raise UserError("the model holds no quantised weights; call scantling.quantize_weights first")
    if not hasattr(model, "save_pretrained"):
        raise UserError(f"{type(model).__name__} has no save_pretrained; only models of transformers are saved packed")
    check_is_free(folder)
    with written_aside(folder) as aside:
        model.save_pretrained(aside)
        saved = _pack_folder(model, aside, weights) if packed else _plain_bytes(aside)
        if also is not None:
            also(aside)
        write_checksums(aside)
    return saved


def _pack_folder(model: Any, folder: Path, weights: dict[str, QuantizedWeight]) -> SavedBytes:
    """Put the one packed file in place of those that `save_pretrained` wrote."""
    known = _by_all_names(model, weights)
    tensors: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    index: dict[str, dict[str, Any]] = {}
    plain = _plain_bytes(folder)
    written = sorted(folder.glob("*.safetensors"))
    done: set[int] = set()

    def pack(name: str, tensor: Tensor, weight: QuantizedWeight) -> None:
        index[name] = _described(tensor, weight)
        parts = _packed(name, weight)
        if id(weight) in done:  # a tie by both names, and safetensors takes no tensor twice
            parts = {key: part.clone() for key, part in parts.items()}
        tensors.update(parts)
        done.add(id(weight))

    for path in written:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor, weight = file.get_tensor(name), known.get(name)
                if weight is not None and _is_what_it_stands_for(tensor, weight):
                    pack(name, tensor, weight)
                else:
                    whole[name] = tensor
    for weight in weights.values():  # transformers gives some models other names in files
        if id(weight) not in done:
            alike = (name for name, tensor in whole.items() if _is_what_it_stands_for(tensor, weight))
            if name := next(alike, None):  # of several that are equal each goes to a weight of its own
                pack(name, whole.pop(name), weight)
    tensors.update(whole)
    if left := [name for name, weight in weights.items() if id(weight) not in done]:
        logger.warning(
            "%d of %d quantised weights have another shape in files, where they are not packed: %s",
            *(len(left), len(weights), ", ".join(left[:3])),
        )
    for path in [*written, folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    content = {"format": FORMAT, "tensors": index}
    (folder / INDEX).write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    return replace(plain, written=sum((folder / name).stat().st_size for name in (TENSORS, INDEX)))


def _plain_bytes(folder: Path) -> SavedBytes:
    """Of what `save_pretrained` wrote."""
    size = numbers = 0
    for path in folder.glob("*.safetensors"):
        size += path.stat().st_size
        with safe_open(path, "pt") as file:
            numbers += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (no mapping)
    return SavedBytes(size, size, numbers)


def _by_all_names(model: Any, weights: dict[str, QuantizedWeight]) -> dict[str, QuantizedWeight]:
    """Quantised weights by every name that their parameters have."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_parameter = {id(parameters[name]): weight for name, weight in weights.items()}
    return {name: by_parameter[id(each)] for name, each in parameters.items() if id(each) in by_parameter}


def _is_what_it_stands_for(tensor: Tensor, weight: QuantizedWeight) -> bool:
    """Whether a tensor in the file is the parameter: transformers gives some other names or shapes there."""
    rows, columns = weight.packed.shape
    if tensor.numel() != rows * columns or tensor.ndim < 2 or not tensor.is_floating_point():
        return False
    return as_matrix(tensor, weight.channels_last).shape == (rows, columns) and torch.equal(
        weight.values(tensor), tensor
    )


def _described(tensor: Tensor, weight: QuantizedWeight) -> dict[str, Any]:
    packed = weight.packed
    return {
        "format": packed.format,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "matrix": list(packed.shape),
        "channels_last": weight.channels_last,
        "group_size": packed.group_size,
        "scale_shape": list(packed.scale.shape),
        "quantizer": weight.quantizer,
        "method": weight.method,
        "weight_error": weight.weight_error,
        "output_error": weight.output_error,
    }


def _packed(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors in place of a weight."""
    scale = weight.packed.scale
    found = {f"{name}.patterns": weight.packed.patterns}
    different, numbers = scale.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if len(different) <= _FEW and scale.numel() > 2 * _FEW:
        return found | {f"{name}.scale": numbers.to(torch.uint8), f"{name}.scales": different}
    return found | {f"{name}.scale": scale.contiguous()}


def is_quantized_folder(folder: str | Path) -> bool:
    """True if `save_quantized` wrote this folder, which may be damaged."""
    return any(os.path.lexists(Path(folder) / name) for name in (INDEX, TENSORS))


def read_quantized(folder: str | Path) -> dict[str, Tensor]:
    """The tensors that a model saved, unpacked, on the CPU.

    Args:
        folder: that `save_quantized` wrote.

    Raises:
        UserError: a folder that is damaged or of a newer version.
    """
    folder = Path(folder)
    path = folder / INDEX
    content = read_json_object(path)
    version, index = content.get("format"), content.get("tensors")
    if isinstance(version, int) and version > FORMAT:
        raise UserError(f"cannot load {path}: it was written by a newer scantling, in format {version}; upgrade")
    if version != FORMAT or not isinstance(index, dict):
        raise UserError(f"cannot load {path}: it is damaged (no format and tensors)")
    found: dict[str, Tensor] = {}
    scales: dict[str, tuple[Tensor, Tensor]] = {}
    with blaming(f"{folder / TENSORS}, as it is damaged or does not fit {INDEX}"):
        if (folder / TENSORS).exists() and not (folder / TENSORS).is_file():
            raise UserError("it is not a file")
        with safe_open(folder / TENSORS, "pt") as file:
            names = set(file.keys())
            parts = {f"{name}.{part}" for name in index for part in ("patterns", "scale", "scales")}
            found = {name: file.get_tensor(name) for name in sorted(names - parts)}
            for name in index:
                scale = file.get_tensor(f"{name}.scale")
                if f"{name}.scales" in names:
                    scale = file.get_tensor(f"{name}.scales")[scale.int()]
                scales[name] = file.get_tensor(f"{name}.patterns"), scale
    for name, entry in index.items():
        with blaming(f"{path}, as {name} in it is damaged or does not fit {TENSORS}"):
            found[name] = _unpacked(entry, *scales.pop(name))
    return found


def _unpacked(entry: dict[str, Any], patterns: Tensor, scale: Tensor) -> Tensor:
    rows, columns = entry["matrix"]
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"there is no dtype {entry['dtype']!r} of weights")
    packed = PackedMatrix(
        entry["format"], (rows, columns), entry["group_size"], patterns, scale.view(entry["scale_shape"])
    )
    return in_dtype(from_matrix(packed.decode(), entry["shape"], entry["channels_last"]), dtype).contiguous()
