"""Models with quantized weights on disk: packed codes, and everything else as transformers writes it.

`save_quantized` lets the model save itself, then packs the weights whose codes are known: the file that transformers
wrote becomes `quantized.safetensors`, and `quantized.json` says how to unpack it. Unpacking restores the original file
bit for bit, so everything that transformers does with it (tied weights, renamed keys, TT layers) keeps working.
transformers cannot read the folder, since it has no `model.safetensors`; `scantling.load` can.

For a packed weight NAME the file holds `NAME.patterns` (bytes) and `NAME.scale`: fp32 (fp64 for a model in fp64). If
there are at most 256 distinct scales, as in block formats, `NAME.scale` holds one-byte indices into `NAME.scales`.

`scantling.sha256` holds checksums of all files, which `scantling.load` compares. A folder is written under a temporary
name, synced and renamed: a full disk or a killed process leaves no folder of the final name. Reading runs no code.
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
from scantling.files import atomic_folder, check_new_folder, read_json_object
from scantling.precision.matrices import as_matrix, from_matrix
from scantling.precision.packing import PackedMatrix
from scantling.precision.quantizer import in_dtype
from scantling.precision.weights import QuantizedWeight, quantized_weights
from scantling.saved_models import blame

logger = logging.getLogger(__name__)

INDEX, TENSORS = "quantized.json", "quantized.safetensors"
FORMAT = 1
_MAX_SHARED_SCALES = 256


@dataclass(frozen=True)
class SavedBytes:
    """Size of weights on disk.

    Attributes:
        written: bytes of the tensor file and of the index that says how to unpack it.
        plain: bytes of the files that transformers wrote, before packing.
        num_elements: number of elements in these files.
    """

    written: int
    plain: int
    num_elements: int


def save_quantized(
    model: Any, folder: str | Path, *, packed: bool = True, also: Callable[[Path], None] | None = None
) -> SavedBytes:
    """Write a model after `quantize_weights` with its weights packed; `scantling.load` reads it.

    Temporarily needs disk space for the unpacked model.

    Args:
        model: model of transformers with quantized weights.
        folder: folder to write; it must not exist or must be empty.
        packed: True to store each weight in the bits of its format. False to write what `save_pretrained` writes: the
            quantized values in the dtype of the model, which transformers can load.
        also: function that writes more files, such as a tokenizer, into the folder it receives; they get checksums,
            too.

    Returns:
        The sizes on disk, with and without packing.

    Raises:
        UserError: if the model has no quantized weights, if they were changed, if the model has no `save_pretrained`,
            or if the folder is not empty.
        RunError: if the folder cannot be written; nothing is left of it.

    Example:
        >>> sc.precision.save_quantized(model, "my-model-int4")  # doctest: +SKIP
    """
    folder = Path(folder)
    weights = quantized_weights(model)
    if not weights:
        raise UserError("the model has no quantized weights; call scantling.quantize_weights first")
    if not hasattr(model, "save_pretrained"):
        raise UserError(f"{type(model).__name__} has no save_pretrained; give a model of transformers")
    check_new_folder(folder)
    with atomic_folder(folder) as aside:
        model.save_pretrained(aside)
        saved = _pack_folder(model, aside, weights) if packed else _plain_bytes(aside)
        if also is not None:
            also(aside)
        write_checksums(aside)
    return saved


def _pack_folder(model: Any, folder: Path, weights: dict[str, QuantizedWeight]) -> SavedBytes:
    """Replace the files that `save_pretrained` wrote by one packed file."""
    known = _weights_by_name(model, weights)
    tensors: dict[str, Tensor] = {}
    unpacked: dict[str, Tensor] = {}
    index: dict[str, dict[str, Any]] = {}
    plain = _plain_bytes(folder)
    written = sorted(folder.glob("*.safetensors"))
    done: set[int] = set()

    def pack(name: str, tensor: Tensor, weight: QuantizedWeight) -> None:
        index[name] = _index_entry(tensor, weight)
        parts = _packed_tensors(name, weight)
        if id(weight) in done:  # tied under both names; safetensors rejects a shared tensor
            parts = {key: part.clone() for key, part in parts.items()}
        tensors.update(parts)
        done.add(id(weight))

    for path in written:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor, weight = file.get_tensor(name), known.get(name)
                # transformers may reshape a parameter in the file: pack it only if the values are equal
                if weight is not None and _matches(tensor, weight):
                    pack(name, tensor, weight)
                else:
                    unpacked[name] = tensor
    # transformers renames some parameters in files; these are found by their values
    for weight in weights.values():
        if id(weight) not in done:
            matching = (name for name, tensor in unpacked.items() if _matches(tensor, weight))
            if name := next(matching, None):  # equal tensors each get their own weight
                pack(name, unpacked.pop(name), weight)
    tensors.update(unpacked)
    if left := [name for name, weight in weights.items() if id(weight) not in done]:
        logger.warning(
            "%d of %d quantized weights are not packed, since transformers writes them in another shape: %s",
            *(len(left), len(weights), ", ".join(left[:3])),
        )
    for path in [*written, folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    content = {"format": FORMAT, "tensors": index}
    (folder / INDEX).write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    return replace(plain, written=sum((folder / name).stat().st_size for name in (TENSORS, INDEX)))


def _plain_bytes(folder: Path) -> SavedBytes:
    """Return the size of the files that `save_pretrained` wrote."""
    size = num_elements = 0
    for path in folder.glob("*.safetensors"):
        size += path.stat().st_size
        with safe_open(path, "pt") as file:
            num_elements += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (no mapping)
    return SavedBytes(size, size, num_elements)


def _weights_by_name(model: Any, weights: dict[str, QuantizedWeight]) -> dict[str, QuantizedWeight]:
    """Return the quantized weights by every name of their parameters, including tied names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_parameter = {id(parameters[name]): weight for name, weight in weights.items()}
    return {name: by_parameter[id(each)] for name, each in parameters.items() if id(each) in by_parameter}


def _matches(tensor: Tensor, weight: QuantizedWeight) -> bool:
    """True if a tensor in the file holds this weight; transformers renames or reshapes some parameters in files."""
    rows, columns = weight.packed.shape
    if tensor.numel() != rows * columns or tensor.ndim < 2 or not tensor.is_floating_point():
        return False
    return as_matrix(tensor, weight.channels_last).shape == (rows, columns) and torch.equal(
        weight.values(tensor), tensor
    )


def _index_entry(tensor: Tensor, weight: QuantizedWeight) -> dict[str, Any]:
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


def _packed_tensors(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors that replace a weight in the file."""
    scale = weight.packed.scale
    tensors = {f"{name}.patterns": weight.packed.patterns}
    distinct, indices = scale.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if len(distinct) <= _MAX_SHARED_SCALES and scale.numel() > 2 * _MAX_SHARED_SCALES:  # one-byte indices pay off
        return tensors | {f"{name}.scale": indices.to(torch.uint8), f"{name}.scales": distinct}
    return tensors | {f"{name}.scale": scale.contiguous()}


def is_quantized_folder(folder: str | Path) -> bool:
    """True if `save_quantized` wrote this folder, even if it is damaged."""
    return any(os.path.lexists(Path(folder) / name) for name in (INDEX, TENSORS))


def read_quantized(folder: str | Path) -> dict[str, Tensor]:
    """Return the unpacked tensors of a saved model, on the CPU.

    Args:
        folder: folder that `save_quantized` wrote.

    Raises:
        UserError: if the folder is damaged or of a newer format version.
    """
    folder = Path(folder)
    path = folder / INDEX
    content = read_json_object(path)
    version, index = content.get("format"), content.get("tensors")
    if isinstance(version, int) and version > FORMAT:
        raise UserError(f"cannot load {path}: a newer scantling wrote it, in format {version}; upgrade scantling")
    if version != FORMAT or not isinstance(index, dict):
        raise UserError(f"cannot load {path}: it is damaged, without the keys format and tensors; copy it again")
    scales: dict[str, tuple[Tensor, Tensor]] = {}
    with blame(f"{folder / TENSORS}, as it is damaged or does not fit {INDEX}"):
        if (folder / TENSORS).exists() and not (folder / TENSORS).is_file():
            raise UserError("it is not a file")
        with safe_open(folder / TENSORS, "pt") as file:
            names = set(file.keys())
            parts = {f"{name}.{part}" for name in index for part in ("patterns", "scale", "scales")}
            tensors = {name: file.get_tensor(name) for name in sorted(names - parts)}
            for name in index:
                scale = file.get_tensor(f"{name}.scale")
                if f"{name}.scales" in names:
                    # uint8 indices would be read as a mask
                    scale = file.get_tensor(f"{name}.scales")[scale.int()]
                scales[name] = file.get_tensor(f"{name}.patterns"), scale
    for name, entry in index.items():
        with blame(f"{path}, as {name} in it is damaged or does not fit {TENSORS}"):
            # pop frees the packed parts of each weight as soon as it is unpacked
            tensors[name] = _unpack(entry, *scales.pop(name))
    return tensors


def _unpack(entry: dict[str, Any], patterns: Tensor, scale: Tensor) -> Tensor:
    rows, columns = entry["matrix"]
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"the dtype of weights must be a float dtype of torch; given {entry['dtype']!r}")
    packed = PackedMatrix(
        entry["format"], (rows, columns), entry["group_size"], patterns, scale.view(entry["scale_shape"])
    )
    return in_dtype(from_matrix(packed.decode(), entry["shape"], entry["channels_last"]), dtype).contiguous()
