"""Count the launches of a momentum exchange on a GPU, without one.

    python benchmarks/comm_launches.py

A launch is a dispatched operation that computes something: no view and no allocation. A Triton kernel counts as one,
and here it computes nothing: all messages are zeros. Each of N processes exchanges the momentum of a decoder with the
tensors of the 1.35B Llama (24 layers, embedding and head apart) at a width of 64, in as many block groups as the large
one has. Gradients are in bf16. The step counted is the third: the first two make residuals and tables. Of local steps,
a synchronization is counted, with the outer step and the start of the next round.

`operations` is the exchange in PyTorch operations, as with SCANTLING_NATIVE=0: those that a GPU takes, where they
differ from a CPU's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # read at the first import of Triton

import torch
from dated import dated, write
from launches import NO_LAUNCH, CountLaunches, CountOperations

HIDDEN = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 24, "num_attention_heads": 4}
VOCABULARY = 128
LARGE_NUMEL = 1_345_423_360
"""Parameters of the 1.35B Llama with 32,000 rows."""
REPLICAS = (2, 8)
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "topk 8, signs": {"topk": 8, "values": "sign", "dense": "sign"},
    "topk 8, signs, owners": {"topk": 8, "values": "sign", "dense": "sign", "exchange": "owner"},
    "local steps": {},
}
STEPS = 3


@contextmanager
def as_on_a_gpu(launched: Counter[str], *, kernels: bool) -> Iterator[None]:
    """Run the operations that a GPU runs, with kernels or without, and count the kernels."""
    from scantling.comm import layout
    from scantling.comm.codec import blocks, dct, quantize, topk, triton
    from scantling.comm.codec import kernels as own
    from scantling.numerics import bits, elias_fano

    def pack(values: torch.Tensor, width: int) -> torch.Tensor:
        size = bits.packed_bytes(values.shape[-1], width)
        return bits.pack(values, width) if width in (4, 8) else bits._pack_bits(values, width, size)

    def unpack(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
        return bits.unpack(packed, count, width) if width in (4, 8) else bits._unpack_bits(packed, count, width)

    most = int(layout.MAX_GROUP_NUMEL_CUDA * numel() / LARGE_NUMEL)
    with ExitStack() as stack:
        stack.enter_context(patch.object(layout, "MAX_GROUP_NUMEL", most))
        for module in (elias_fano, quantize):
            stack.enter_context(patch.multiple(module, pack=pack, unpack=unpack))
        stack.enter_context(patch.object(topk, "_topk_by_group", topk._topk))
        for module in (blocks, dct, topk):
            stack.enter_context(patch.object(module, "split_for_cache", lambda value: [value]))
        if kernels:
            stack.enter_context(patch.object(triton, "DEVICES", ("cpu",)))
            counted = {
                name: CountLaunches(name, launched)
                for name, kernel in vars(own).items()
                if not name.startswith("_") and getattr(getattr(kernel, "fn", None), "__module__", "") == own.__name__
            }
            stack.enter_context(patch.multiple(own, **counted))
            stack.enter_context(patch.object(torch, "empty", uncounted_zeros))
        yield


def uncounted_zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return zeros where no kernel will write, as an allocation, which is no launch."""
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.zeros(*args, **kwargs)


def make_model() -> Any:
    import transformers

    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **HIDDEN)
    return transformers.LlamaForCausalLM(config)


def numel() -> int:
    return sum(param.numel() for param in make_model().parameters())


def count(case: str, *, kernels: bool) -> dict[str, Any]:
    """Return the launches of one exchange in the current process group, by the kind of operation."""
    import torch.distributed as dist

    import scantling as sc
    from scantling.comm.config import OUTER_LR
    from scantling.comm.local_steps import OuterOptimizer, outer_exchange
    from scantling.numerics.torch_private import foreach_zero_

    torch.manual_seed(0)
    model = make_model().bfloat16()
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # of the gradients
    launched: Counter[str] = Counter()
    with as_on_a_gpu(launched, kernels=kernels):
        groups, options = sc.param_groups(model), {"check_every": None, **CASES[case]}
        outer = None
        if case == "local steps":
            made = outer_exchange("sparseloco", groups, **options)
            outer = OuterOptimizer(made, sync_every=1, outer_lr=OUTER_LR)
        else:
            made = sc.MomentumExchange(groups, **options)
        made.announces = False
        for step in range(STEPS):
            for param in model.parameters():
                if outer is None:
                    param.grad = torch.randn_like(param)
                else:
                    param.data.copy_(torch.randn_like(param))
            if outer is not None:
                foreach_zero_(outer.anchors)  # kernels that compute nothing leave them undefined
            launched.clear()
            with CountOperations() if step == STEPS - 1 else ExitStack() as operations:
                if outer is None:
                    made.exchange()
                else:
                    outer.advance()
                    outer.begin_round()
        groups = len(made._update_layout().block_groups)
    found = {name: times for name, times in operations.counts.items() if name not in NO_LAUNCH}
    total = sum(found.values()) + sum(launched.values())
    return {
        "launches": total,
        "kernels": sum(launched.values()),
        "block_groups": groups,
        "by_name": {**found, **launched},
    }


def replica(rank: int, world: int, port: int, out: str) -> None:
    """Run one process; rank 0 writes the counts."""
    from comm_methods import group

    torch.set_num_threads(1)
    with group(f"127.0.0.1:{port}", rank, world):
        found = {
            f"{case}, {name}": count(case, kernels=name == "kernels")
            for case in CASES
            for name in ("operations", "kernels")
        }
        if rank == 0:
            Path(out).write_text(json.dumps(found))


def run(world: int) -> dict[str, dict[str, Any]]:
    """Return the counts of rank 0 among this many processes."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = f"{folder}/counts.json"
        torch.multiprocessing.spawn(replica, (world, port, out), nprocs=world)
        return json.loads(Path(out).read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", nargs="+", type=int, default=[*REPLICAS])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    results = {}
    for world in options.replicas:
        results[world] = run(world)
        for name, row in results[world].items():
            print(
                f"N={world} {name:34} {row['launches']:6} launches, {row['kernels']:3} kernels, "
                f"{row['block_groups']} block groups",
                flush=True,
            )
    print(write(dated(__file__, results=results), "comm-launches", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
