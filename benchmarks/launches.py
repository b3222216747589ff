"""Count the launches of a forward and backward pass of the six-encoder transformer, as on a GPU, without one.

    python benchmarks/launches.py

A launch is a dispatched operation that computes something: no view and no allocation; a Triton kernel counts as one,
and here it computes nothing. Batch 1 of 128 tokens, fp32, loss included, without dropout, which takes other operations
on a CPU. The lookup of unique ids counts as the CPU's few operations; a GPU takes more.

`before` merges the cores of each layer alone, in the orders of a CPU, as all TT layers did at first. In other rows the
costs of products are those of a typical GPU (`scantling.tensor.costs`), and all kernels count as faster than torch's
operations. `removed ranks` has other ranks in each layer, as after rank adaptation.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # read at the first import of Triton

import torch
from dated import dated, write
from encoder_models import FULL, Shape, build_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scantling.tensor import costs, kernels, launches, merging
from scantling.tensor.layer import TTLayer
from scantling.tensor.merging import merge_alone
from scantling.trainer.models.checkpointing import checkpoint_activations

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
NO_LAUNCH = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"),
    *("detach", "alias", "split", "split_with_sizes", "unbind", "as_strided", "narrow", "_reshape_alias", "diagonal"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "is_same_size"),
}
"""Operations that make views or allocate memory."""


class CountOperations(TorchDispatchMode):
    """Dispatch mode that counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class CountLaunches:
    """Kernel that counts its launches and computes nothing."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self._name, self._counts = name, counts

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: self._counts.update([self._name])


@contextmanager
def as_on_a_gpu(launched: Counter[str], *, fused: bool) -> Iterator[None]:
    """Choose orders and kernels as on a GPU, and count the launches of kernels."""
    names = [name for name in vars(kernels) if hasattr(getattr(kernels, name), "run") and not name.startswith("_")]
    with ExitStack() as stack:
        stack.enter_context(patch.object(costs, "CPU", costs.TYPICAL_GPU))
        stack.enter_context(patch.object(merging, "_max_numel", lambda _: merging.MAX_NUMEL))
        stack.enter_context(patch.object(merging, "is_in_dispatch_mode", lambda: False))  # that of the count
        if fused:
            stack.enter_context(patch.object(launches, "DEVICES", ("cpu",)))
            stack.enter_context(patch.object(launches, "is_faster", lambda *_: True))
            stack.enter_context(patch.object(launches, "_is_watched", lambda _: False))
            stack.enter_context(patch.multiple(kernels, **{name: CountLaunches(name, launched) for name in names}))
        yield


def remove_ranks(model: nn.Module) -> None:
    """Remove another fraction of the ranks, up to 60 %, in each layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, TTLayer)]
    for number, layer in enumerate(layers):
        kept = 0.4 + 0.6 * (number * 7 % len(layers)) / len(layers)
        index = [torch.arange(max(1, round(kept * rank))) for rank in layer.ranks[1:-1]]
        with torch.no_grad():
            for parameter, dim, own in layer.rank_slices(index):
                parameter.data = parameter.index_select(dim, own)


def count(
    name: str,
    shape: Shape = FULL,
    *,
    gpu: bool = False,
    alone: bool = False,
    fused: bool = False,
    ranks: bool = False,
) -> dict[str, Any]:
    """Return the launches of one pass by the kind of operation.

    Args:
        name: a configuration of encoder_models.py.
        shape: sizes of the model.
        gpu: orders of a GPU.
        alone: each layer merges its cores alone.
        fused: kernels.
        ranks: other ranks in each layer.
    """
    torch.manual_seed(0)
    model, _ = build_model(name, shape)
    if ranks:
        remove_ranks(model)
    if alone:
        merge_alone(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    launched: Counter[str] = Counter()
    ids = torch.randint(min(1000, shape.vocabulary), (1, shape.length))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(input_ids=ids).logits, torch.zeros(1, dtype=torch.long))
        loss.backward()

    with ExitStack() as stack:
        if gpu:
            stack.enter_context(as_on_a_gpu(launched, fused=fused))
        if fused:
            checkpoint_activations(model, "feed_forward")
        step()
        launched.clear()
        with CountOperations() as operations:
            step()
    found = {name: times for name, times in operations.counts.items() if name not in NO_LAUNCH}
    products = sum(found.get(name, 0) for name in PRODUCTS)
    kernel_launches = sum(launched.values())
    total = sum(found.values()) + kernel_launches
    return {"launches": total, "products": products, "kernels": kernel_launches, "by_name": {**found, **launched}}


ROWS: dict[str, dict[str, Any]] = {
    "dense": {"name": "dense"},
    "TT, before": {"name": "cores", "alone": True},
    "TT": {"name": "cores", "gpu": True},
    "TT with kernels": {"name": "cores", "gpu": True, "fused": True},
    "TT, removed ranks, before": {"name": "cores", "alone": True, "ranks": True},
    "TT, removed ranks": {"name": "cores", "gpu": True, "ranks": True},
    "TT, removed ranks, with kernels": {"name": "cores", "gpu": True, "fused": True, "ranks": True},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    results = {}
    for name, settings in ROWS.items():
        results[name] = count(**settings)
        row = results[name]
        print(f"{name:34} {row['launches']:5} launches, {row['products']:4} products, {row['kernels']:3} kernels")
    print(write(dated(__file__, results=results), "launches", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
