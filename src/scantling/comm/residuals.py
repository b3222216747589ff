"""What a replica has accumulated and not said yet, one number for each of a parameter, in fp32 or in int8.

In int8 it takes 1.03 bytes a number in place of 4: rows of `ROW` numbers have one scale, their largest magnitude m, and

    code = floor(127 v / m + noise),  noise uniform in [0, 1)

is right on average, so that what is too small for the steps of its row is kept too. A row's largest number keeps its
code, so that codes come back to the bit from what they stand for.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

Format: TypeAlias = Literal["fp32", "int8"]
FORMATS: tuple[Format, ...] = get_args(Format)
KEYS = ("residual", "residual_scale")
ROW = 128
"""Numbers that have one scale."""


class Residuals:
    """The residuals in the state of an optimizer or an exchange.

    Args:
        state: by parameter; entries of `KEYS` are read and written.
    """

    def __init__(self, state: MutableMapping[Tensor, dict[str, Any]]) -> None:
        self.state = state

    def __contains__(self, param: Tensor) -> bool:
        return "residual" in self.state.get(param, {})

    def read(self, param: Tensor, like: Tensor) -> Tensor:
        """What is there, in fp32, zeros where nothing is; the stored tensor itself where it is in fp32.

        Args:
            param: whose residual.
            like: a tensor of its shape and device.
        """
        if param not in self:
            return torch.zeros_like(like, dtype=torch.float32)
        state = self.state[param]
        residual: Tensor = state["residual"]
        return residual if residual.dtype == torch.float32 else _decoded(residual, state["residual_scale"])

    def write(self, param: Tensor, value: Tensor, form: Format, seed: int | None = None) -> None:
        """Keep a value.

        Args:
            param: whose residual.
            value: in fp32; kept as it is where the format is fp32.
            form: the format.
            seed: of the noise of int8; None rounds to the nearest, which gives back the codes of what was read.
        """
        state = self.state.setdefault(param, {})
        if form == "fp32":
            state["residual"] = value
            state.pop("residual_scale", None)
        else:
            state["residual"], state["residual_scale"] = _encoded(value, seed)

    def drop(self, param: Tensor) -> None:
        """Forget all of a parameter's."""
        for key in KEYS:
            self.state.get(param, {}).pop(key, None)


def residual_bytes(numel: int, form: Format) -> int:
    """Bytes of the residual of so many numbers."""
    return 4 * numel if form == "fp32" else numel + 4 * num_rows(numel)


def num_rows(numel: int) -> int:
    """Scales that so many numbers have in int8."""
    return -(-numel // ROW)


def _encoded(value: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    rows = num_rows(value.numel())
    flat = torch.nn.functional.pad(value.flatten(), (0, rows * ROW - value.numel())).view(rows, ROW)
    scale = flat.abs().amax(1)
    steps = flat / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None] * 127
    if seed is None:
        codes = steps.round()
    else:
        generator = torch.Generator(value.device).manual_seed(seed)
        codes = (steps + torch.rand(steps.shape, generator=generator, device=value.device)).floor()
    codes = codes.clamp(-127, 127).to(torch.int8).flatten()[: value.numel()]
    return codes.view(value.shape).clone(), scale


def _decoded(codes: Tensor, scale: Tensor) -> Tensor:
    rows = len(scale)
    flat = torch.nn.functional.pad(codes.flatten(), (0, rows * ROW - codes.numel())).view(rows, ROW)
    values = (flat / 127) * scale[:, None]
    return values.flatten()[: codes.numel()].view(codes.shape)
