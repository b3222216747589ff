"""`sc.load`: load models that `save_pretrained` wrote, of transformers or Scantling, including packed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from scantling.checksums import check_checksums
from scantling.precision.packed_files import is_quantized_folder, read_quantized
from scantling.tensor import pretrained
from scantling.trainer.models.dlrm import register


def load(folder: str | Path, *, dtype: torch.dtype | None = None, device_map: Any = None) -> Any:
    """Load a dense or TT model that `save_pretrained` wrote, as the class that was saved.

    After `from scantling import hf`, which registers the TT layers, the Auto classes of transformers do the same.
    Folders written by `scantling quantize` are unpacked: the model holds its weights in the dtype it was trained in
    (4 bytes per weight in fp32), not in the bits of the file. It uses as much memory as before quantization and is
    not faster.

    Folders written by `scantling export` and `scantling quantize` contain checksums, which are verified before
    loading.

    Args:
        folder: contains `config.json` and the weights.
        dtype: dtype of the parameters; default: the file's.
        device_map: as in `from_pretrained`.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: the folder does not exist, its class is in neither transformers nor Scantling, weights are missing,
            or files are damaged.

    Example:
        >>> model = sc.load("my-model")  # doctest: +SKIP
    """
    # click models are no architecture of transformers
    register()
    # before any file is parsed
    check_checksums(Path(folder))
    state = read_quantized(folder) if is_quantized_folder(folder) else None
    return pretrained.load(folder, dtype=dtype, device_map=device_map, state=state)
