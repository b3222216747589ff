"""`sc.load`: models that `save_pretrained` wrote, of transformers and of this package, also with packed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from scantling.checksums import check_checksums
from scantling.models.dlrm import register
from scantling.precision.packed_files import is_quantized_folder, read_quantized
from scantling.tensor import pretrained


def load(folder: str | Path, *, dtype: torch.dtype | None = None, device_map: Any = None) -> Any:
    """Load a model that `save_pretrained` wrote, dense or of cores, as the class that was saved.

    With `from scantling import hf`, which registers the cores, the Auto classes of transformers do the same. Folders of
    `scantling quantize` are unpacked: the model holds its weights in the dtype it was trained in (4 bytes a weight in
    fp32), not in the bits of the file. It takes as much memory as before it was quantized, and is not faster.

    Folders of `scantling export` and `scantling quantize` have checksums, which are compared before anything is loaded.

    Args:
        folder: with `config.json` and the weights.
        dtype: of the parameters; default that of the file.
        device_map: as of `from_pretrained`.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: no such folder, a class that neither transformers nor scantling has, weights that are missing, or
            files that are damaged.

    Example:
        >>> model = sc.load("my-model")  # doctest: +SKIP
    """
    register()
    check_checksums(Path(folder))
    state = read_quantized(folder) if is_quantized_folder(folder) else None
    return pretrained.load(folder, dtype=dtype, device_map=device_map, state=state)
