"""The part of a tensor that this process holds."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, without a gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def as_gradient(value: Tensor, param: Tensor) -> Tensor:
    """A local tensor as the gradient of a parameter: of its dtype, and placed as it is."""
    cast = value.to(param.dtype)
    if isinstance(param, DTensor):
        return DTensor.from_local(
            cast, param.device_mesh, param.placements, shape=param.shape, stride=param.stride(), run_check=False
        )
    return cast
