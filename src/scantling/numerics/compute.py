"""The compute format of a run: what matrix products are done in, while the weights stay fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(compute: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: none for "fp32", autocast for "bf16" and "fp16"."""
    return nullcontext() if compute == "fp32" else torch.autocast(device.type, dtype=_DTYPES[compute])
