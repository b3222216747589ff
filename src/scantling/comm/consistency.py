"""Check that replicas are in sync.

Replicas with different weights, or with different blocks, would train without an error. Before the first exchange they
compare a hash of the options and of every parameter; an error names the tensor and the rank. They also compare
everything that affects the last bits of matrix products, since all must decode the same bytes to the same values: the
PyTorch version, on a CPU the number of threads, on a GPU the kernels and the precision of fp32 products. Different GPU
models cause a warning. Local steps without a transform have no products after the exchange, so that replicas may have
different processors and numbers of threads.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scantling.comm.ddp_guard import Averaging, find_averaging, find_wrappers
from scantling.comm.transport.group import ReplicaGroup
from scantling.comm.transport.shards import all_finite, check_meshes, to_local
from scantling.errors import UserError
from scantling.numerics.bits import checksum
from scantling.numerics.device import has_kernels

logger = logging.getLogger(__name__)

SKETCH = 256
_SEPARATOR = "; "
"""Between the properties in a description of a parameter."""
_ADVICE = (
    ". The same bytes would decode to different last bits: use the same versions, OMP_NUM_THREADS (or "
    "torch.set_num_threads), SCANTLING_NATIVE and precision of products (torch.backends.fp32_precision, or "
    "torch.set_float32_matmul_precision) on all ranks"
)


def check_replicas(
    replicas: ReplicaGroup,
    descriptions: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    params: Sequence[Tensor],
    *,
    has_products: bool,
) -> int:
    """Raise if replicas differ. Collectives: two all-gathers, and another if the options differ.

    Args:
        replicas: group of the replicas.
        descriptions: properties of each parameter and of its encoding, by name.
        names: of the parameters.
        params: the parameters.
        has_products: True if what replicas compute from the same bytes may have matrix products or sums over elements,
            whose last bits depend on the processor.

    Returns:
        A 32-bit hash of the descriptions.

    Raises:
        UserError: replicas differ; on all ranks.
    """
    device = params[0].device
    # Hashes first: strings are gathered only to name a difference.
    texts = [describe_decoder(device, has_products=has_products), *map(_describe, names, descriptions)]
    own = zlib.crc32("\n".join(texts).encode())
    if replicas.world_size == 1:
        return own
    # A separate hash: different GPU models are a warning, not an error.
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" and has_products else ""
    hashes = torch.stack(replicas.all_gather(torch.tensor([own, zlib.crc32(gpu.encode())], device=device))).tolist()
    if len({gpu_hash for _, gpu_hash in hashes}) > 1:
        gpus = [each for (each,) in replicas.all_gather_strings([gpu], device)]
        if replicas.rank == 0:
            logger.warning(
                "replicas are on different GPU models (%s), whose products may differ in the last bits, so that "
                "parameters may differ after some steps",
                ", ".join(dict.fromkeys(gpus)),
            )
    if len({text_hash for text_hash, _ in hashes}) > 1:
        all_texts = replicas.all_gather_strings(texts, device)
        # The most common texts are the reference, so that the error names the rank that deviates.
        usual = Counter(map(tuple, all_texts)).most_common(1)[0][0]
        rank, theirs = next((rank, each) for rank, each in enumerate(all_texts) if tuple(each) != usual)
        # Text 0 describes the decoder, and text i + 1 parameter i.
        if len(theirs) != len(usual):
            raise UserError(f"rank {rank} exchanges {len(theirs) - 1} parameters, others {len(usual) - 1}")
        idx, one, other = next((i, a, b) for i, (a, b) in enumerate(zip(theirs, usual, strict=True)) if a != b)
        if not idx:
            raise UserError(f"rank {rank} differs from the others: it has {one}; they have {other}{_ADVICE}")
        one, other = _differing_properties(one, other)
        raise UserError(f"rank {rank} differs from the others in {names[idx - 1]}: it has {one}; they have {other}")
    # Values last: from here on, all ranks have the same parameters in the same order.
    mismatch = find_mismatch(replicas, params)
    if mismatch is not None:
        raise UserError(
            f"rank {mismatch.rank} differs from the others: {names[mismatch.param]} has other values there. Start all "
            "replicas from the same weights: the same seed, the same checkpoint, or a broadcast from rank 0"
        )
    return own


def describe_decoder(device: torch.device, *, has_products: bool) -> str:
    """Return everything that affects the last bits of decoded momentum."""
    version = f"PyTorch {torch.__version__}"
    if device.type == "cpu":
        return f"{version}, {torch.get_num_threads()} threads" if has_products else version
    kernels = "no kernels"
    if has_kernels(device):
        import triton

        kernels = f"kernels of Triton {triton.__version__}"
    if not has_products:
        return f"{version}, {kernels}"
    precision = torch.backends.cuda.matmul.fp32_precision  # older calls set it too
    return f"{version}, {kernels}, fp32 products of precision {'ieee' if precision == 'none' else precision}"


def _describe(name: str, properties: Mapping[str, Any]) -> str:
    return _SEPARATOR.join([name, *(f"{key} {value}" for key, value in properties.items())])


def _differing_properties(one: str, other: str) -> tuple[str, str]:
    """Return the properties in which two descriptions differ, or both in full if their lengths differ."""
    ours, theirs = one.split(_SEPARATOR), other.split(_SEPARATOR)
    if len(ours) != len(theirs):
        return one, other
    pairs = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    return ", ".join(our for our, _ in pairs), ", ".join(their for _, their in pairs)


def refuse_averaged(replicas: ReplicaGroup, params: Sequence[Tensor], wrappers: Sequence[nn.Module]) -> None:
    """Raise if gradients were averaged over the replicas; warn if they are the same for another reason.

    Args:
        replicas: group of the replicas.
        params: the parameters; those without a gradient are ignored.
        wrappers: of `find_wrappers`.

    Collective: one all-gather.

    Raises:
        UserError: a wrapper around the model averages gradients; on all ranks.
    """
    if replicas.world_size == 1:
        return
    gradients = [to_local(param.grad) for param in params if param.grad is not None and not param.grad.is_sparse]
    sums = [checksum(gradient) for gradient in gradients]
    # One hash of all gradients; int64 sums may wrap.
    own = torch.stack(sums).sum(0) if sums else torch.zeros(1, dtype=torch.int64, device=params[0].device)
    certainty = max(map(find_averaging, wrappers), default=Averaging.NO)
    reports = torch.stack(replicas.all_gather(torch.cat([own.flatten(), own.new_tensor([certainty])]))).tolist()
    # All ranks know all reports, so that all of them raise.
    highest = max(certainty for _, certainty in reports)
    # Gradients of zero are equal on all replicas without averaging.
    are_equal = len({gradient_hash for gradient_hash, _ in reports}) == 1 and any(map(torch.any, gradients))
    if highest == Averaging.YES or (highest == Averaging.PERHAPS and are_equal):
        raise averaging_error(wrappers)
    if are_equal and replicas.rank == 0:
        logger.warning(
            "the gradients of all %d replicas are the same: all read the same data, or your loop reduces gradients "
            "before the exchange. Give each replica its own share of the data, and do not reduce gradients",
            replicas.world_size,
        )


def averaging_error(wrappers: Sequence[nn.Module]) -> UserError:
    """Return the error that names wrappers which average gradients, and the ways out."""
    names = sorted({type(wrapper).__name__ for wrapper in wrappers})
    return UserError(
        f"the model is in {', '.join(names) or 'a wrapper on another rank'}, which averages gradients over all "
        "processes before the exchange sees them, so that everything is sent. Train the bare model, or run every "
        "forward and backward pass in model.no_sync() (with accelerate: accelerator.no_sync(model)); in the "
        "Trainer of transformers use sc.hf.attach(trainer)"
    )


class AveragingGuard:
    """Check that nothing averages gradients over the replicas before the exchange.

    Wrappers of the model are searched once, in the first step of this process. In the first check, replicas compare
    their gradients. Later checks ask the wrappers only: a loop may leave out `no_sync()` later.
    """

    def __init__(self) -> None:
        self._wrappers: list[weakref.ref[nn.Module]] | None = None
        self._is_compared = False

    def find_wrappers(self, replicas: ReplicaGroup, params: Sequence[Tensor]) -> None:
        """Search for wrappers of the model unless that was done before. No communication."""
        if self._wrappers is not None:
            return
        if replicas.is_static:
            check_meshes(params, replicas.ranks)  # again: accelerate replaces the parameters of an optimizer
        found = [] if replicas.world_size == 1 else find_wrappers(params, replicas.ranks)
        # Weak references: the guard must not keep a dropped model alive.
        self._wrappers = [weakref.ref(wrapper) for wrapper in found]

    def check(self, replicas: ReplicaGroup, params: Sequence[Tensor], step: int) -> None:
        """Raise if gradients were averaged.

        Collective in the first check of this process: one all-gather. Over a `TorchFTGroup` only in the first step of
        all replicas, since a replica that joins later would be alone in it.

        Raises:
            UserError: a wrapper averages gradients.
        """
        self.find_wrappers(replicas, params)
        wrappers = [wrapper for reference in self._wrappers or () if (wrapper := reference()) is not None]
        if not self._is_compared and (replicas.is_static or step == 1):
            refuse_averaged(replicas, params, wrappers)
            self._is_compared = True
            return
        averaging = [wrapper for wrapper in wrappers if find_averaging(wrapper) is Averaging.YES]
        if averaging:
            raise averaging_error(averaging)


def residual_divergence(replicas: ReplicaGroup, values: Iterable[Tensor], seed: int) -> float:
    """Return the relative distance between the replicas' values: 0 if they are equal, near 1 if they are unrelated.

    The root of (mean over replicas of |x_i - mean x|^2) / (mean of |x_i|^2), over all values. The norms are those of
    random sketches with `SKETCH` elements (Charikar, Chen and Farach-Colton, 2002), so that little is sent; the
    error is about 10 %. Collective: one all-gather.

    Args:
        replicas: group of the replicas.
        values: of this replica, with the same shapes on all.
        seed: of the sketch, the same on all.
    """
    # Random signs are drawn on the CPU, so that they are the same for all devices.
    generator = torch.Generator().manual_seed(seed)
    sketch: Tensor | None = None
    for value in values:
        if sketch is None:
            # fp64: the distance below is a difference of nearly equal sums.
            sketch = torch.zeros(SKETCH, dtype=torch.float64, device=value.device)
        # (numel,) -> (rows, SKETCH); the sum over rows with random signs has E |sketch|^2 = |value|^2.
        rows = -(-value.numel() // SKETCH)
        bits = torch.randint(0, 2, (rows, SKETCH), generator=generator, dtype=torch.int8, device="cpu")
        signs = bits.to(value.device) * 2 - 1
        flat = torch.nn.functional.pad(value.flatten(), (0, rows * SKETCH - value.numel())).view(rows, SKETCH)
        sketch += (flat * signs).sum(0, dtype=torch.float64)
    if sketch is None:
        return 0.0
    sketches = torch.stack(replicas.all_gather(sketch))  # (replicas, SKETCH)
    # A sketch is linear: sketch(x) - sketch(y) = sketch(x - y).
    apart = (sketches - sketches.mean(0)).square().sum()
    total = sketches.square().sum()
    return float((apart / total).sqrt()) if float(total) > 0.0 else 0.0


class Mismatch(NamedTuple):
    """Parameter that differs between replicas.

    Attributes:
        rank: the first rank that differs from the reference.
        param: index of the first parameter that differs there.
        reference: the rank that most ranks agree with, among those with finite parameters; the lowest if there are
            several.
    """

    rank: int
    param: int
    reference: int


def find_mismatch(replicas: ReplicaGroup, params: Sequence[Tensor]) -> Mismatch | None:
    """Compare the hashes of all parameters between replicas; None if all are equal.

    Collectives: one all-gather of 8 bytes per parameter, and 8 more.
    """
    finite = all_finite(map(to_local, params))
    sums = torch.cat([checksum(to_local(param)) for param in params])
    gathered = torch.stack(replicas.all_gather(torch.cat([sums, sums.new_tensor([finite])]))).cpu()
    hashes, is_finite = gathered[:, :-1], gathered[:, -1].bool()  # (replicas, params), (replicas,)
    if (hashes == hashes[0]).all():
        return None
    agreeing = (hashes[:, None] == hashes[None]).sum(1)  # number of ranks that agree with each, by parameter
    # The reference agrees with the majority in most parameters.
    votes = (agreeing == agreeing.amax(0)).sum(1)
    # A rank with NaN or Inf is no reference, even if most ranks have the same.
    votes[~is_finite] = -1
    reference = int(votes.argmax())
    # `nonzero` is in row-major order: the first rank, and there the first parameter.
    rank, param = (hashes != hashes[reference]).nonzero()[0].tolist()
    return Mismatch(rank, param, reference)
