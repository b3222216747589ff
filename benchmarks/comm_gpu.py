"""Measure the codec of the momentum exchange on a GPU, and its share of a training step.

    python benchmarks/comm_gpu.py                      a Llama of 1.3 billion parameters, 16,384 tokens per step
    python benchmarks/comm_gpu.py --tiny --device cpu  a tiny model, only to try the script

The parts cover the parameters of the whole model. They run as in one of two processes, but no message is sent:

    encode     gradients into residuals, blocks, cosine transform, selection
    pack       quantization, bit packing, checksum, message
    decode     checksum test, unpacking, dequantization, mean over both, inverse transform
    exchange   `MomentumExchange.exchange` of one process: all parts, and the sent values are subtracted from residuals

Times are device times from events. Each part takes turns with a control that copies as many fp32 elements; ratios are
medians over the rounds. `compute` is a forward and backward pass without an optimizer. It is measured with two and with
four layers of the full width and extrapolated linearly to all layers. The share is exchange / (compute + exchange); the
aim is below 2 %. Every case encodes, packs and decodes twice, which must give the same bytes. On a GPU the profiler
counts the launches of an exchange.

`local steps` is the synchronization after local steps with the library's defaults: pseudo-gradients, exchange, outer
step, and the start of the next round. Its share is that of one step, a fifteenth.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import dated, write
from interleaved import ratio
from optim_gpu import SIZES, time_in_turns
from torch import Tensor, nn

import scantling as sc
from scantling.comm.codec import triton
from scantling.comm.codec.message import Header, pack_message, unpack_messages
from scantling.comm.collectives import Sparse, _mean
from scantling.comm.config import LOCAL_STEPS, OUTER_LR
from scantling.comm.exchange import MomentumExchange
from scantling.comm.layout import all_block_groups, make_buckets
from scantling.comm.local_steps import OuterOptimizer, outer_exchange
from scantling.numerics.torch_private import foreach_add_

REPLICAS = 2
CONTROL = "copy"
AIM = 0.02
LAYERS = (2, 4)
CASES: list[dict[str, Any]] = [
    *({"topk": topk, "residual": "fp32", "dtype": "bfloat16"} for topk in (1, 8, 32)),
    {"topk": 8, "residual": "int8", "dtype": "bfloat16"},
    {"topk": 8, "residual": "fp32", "dtype": "float32"},
]
"""Cases: coefficients selected of each 64 x 64 block, format of the residuals, dtype of parameters and gradients."""


def language_model(shape: dict[str, int], vocab_size: int, device: str) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(vocab_size=vocab_size, max_position_embeddings=2048, **shape)
    with torch.device(device):
        return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def make_groups(shape: dict[str, int], vocab_size: int, dtype: torch.dtype, device: str) -> list[dict[str, Any]]:
    """Return groups of parameters of zeros with a model's shapes."""
    groups = []
    for group in sc.param_groups(language_model(shape, vocab_size, "meta")):
        pairs = []
        for name, like in group["params"]:
            pairs.append((name, nn.Parameter(torch.zeros(like.shape, dtype=dtype, device=device))))
        groups.append({**group, "params": pairs})
    return groups


def build_exchange(shape: dict[str, int], vocab_size: int, case: dict[str, Any], device: str) -> MomentumExchange:
    """Return an exchange over parameters with a model's shapes, after two calls."""
    groups = make_groups(shape, vocab_size, getattr(torch, case["dtype"]), device)
    made = MomentumExchange(
        groups, topk=case["topk"], residual=case["residual"], values="sign", dense="sign", check_every=None
    )
    for seed in range(2):
        stepped(made, make_gradients(made, seed))
    return made


def make_gradients(made: MomentumExchange, seed: int) -> list[Tensor]:
    params = parameters(made)
    generator = torch.Generator(params[0].device).manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device) for p in params]


def parameters(made: MomentumExchange) -> list[Tensor]:
    return [param for group in made.param_groups for param in group["params"]]


def stepped(made: MomentumExchange, gradients: list[Tensor]) -> None:
    for param, gradient in zip(parameters(made), gradients, strict=True):
        param.grad = gradient
    made.exchange()


class Codec:
    """The parts of an exchange on the state of one process, one after the other.

    Args:
        made: the exchange, after a few calls; its residuals are copied.
    """

    def __init__(self, made: MomentumExchange, gradients: list[Tensor]) -> None:
        self.made, self.gradients, self.params = made, gradients, parameters(made)
        self.block_groups = all_block_groups(make_buckets(made.param_groups, made.config))
        self.residuals: list[Tensor] = []
        self.begin()
        self.selected = self.encode()
        self.messages = [self.pack(rank) for rank in range(REPLICAS)]

    def begin(self) -> None:
        """Restore the initial residuals."""
        self.residuals = [self.made.residuals.read(param).clone() for param in self.params]

    @torch.no_grad()
    def encode(self) -> list[Sparse]:
        """Encode the gradients; changes the residuals, as an exchange does."""
        found: list[Sparse] = []
        for block_group in self.block_groups:
            places = [slot.param for slot in block_group.slots]
            residuals, gradients = ([each[place] for place in places] for each in (self.residuals, self.gradients))
            if triton.can_accumulate(block_group, residuals, gradients):
                found.append(triton.accumulate_and_select(block_group, residuals, gradients))
                continue
            for residual, gradient in zip(residuals, gradients, strict=True):
                torch.add(gradient, residual, alpha=block_group.spec.decay, out=residual)
            values = dict(zip(places, residuals, strict=True))
            found.append(block_group.spec.codec.select(block_group.to_blocks(values)))
        return found

    @torch.no_grad()
    def pack(self, rank: int = 0) -> Tensor:
        pairs = zip(self.block_groups, self.selected, strict=True)
        body = torch.cat([block_group.spec.codec.pack(*one) for block_group, one in pairs])
        return pack_message(Header(valid=True, epoch=0, step=1, rank=rank, configuration=0), body)

    @torch.no_grad()
    def decode(self) -> list[Tensor]:
        """Decode the messages of all replicas into the momentum of every parameter."""
        _, bodies = unpack_messages(self.messages)
        sizes = [block_group.num_bytes for block_group in self.block_groups]
        found = []
        for block_group, parts in zip(
            self.block_groups, zip(*(torch.split(body, sizes) for body in bodies), strict=True), strict=True
        ):
            unpacked = [block_group.spec.codec.unpack(part, block_group.count) for part in parts]
            mean = _mean(block_group.spec, unpacked, over_senders=False)
            found += [value for _, value in block_group.decode_sparse(*mean)]
        return found

    def is_repeatable(self) -> bool:
        """Return True if equal inputs give equal bytes, and equal bytes decode to equal values."""
        packed = []
        for _ in range(2):
            self.begin()
            self.selected = self.encode()
            packed.append(self.pack())
        decoded = self.decode()
        return torch.equal(*packed) and all(map(torch.equal, decoded, self.decode()))


def codec(case: dict[str, Any], model: dict[str, Any], rounds: int, device: str) -> dict[str, Any]:
    """Return the times of the parts of one case, and the bytes it sends."""
    made = build_exchange(case=case, device=device, **model)
    gradients = make_gradients(made, seed=1)
    parts = Codec(made, gradients)
    numbers = sum(param.numel() for param in parameters(made))
    source, target = (torch.zeros(numbers, device=device) for _ in range(2))
    work: dict[str, Callable[[], Any]] = {
        CONTROL: lambda: target.copy_(source),
        "encode": parts.encode,
        "pack": parts.pack,
        "decode": parts.decode,
    }
    repeatable = parts.is_repeatable()
    work["exchange"] = lambda: stepped(made, gradients)  # last, because it changes the residuals
    for one in work.values():
        one()
    rows = compare_to_control(work, rounds, device)
    sent = made.planned_wire_bytes(REPLICAS)
    print(
        f"topk {case['topk']:2}, residual {case['residual']}, {case['dtype']}: {sent:,} bytes, "
        f"{'the same bytes twice' if repeatable else 'OTHER BYTES THE SECOND TIME'}"
    )
    for name, row in rows.items():
        print(f"  {name:10} {1e3 * row['median_s']:9.3f} ms  {row['ratio']:7.2f} of a copy", flush=True)
    launches = count_launches(work["exchange"], device)
    found = {"wire_bytes": sent, "repeatable": repeatable, "numbers": numbers, "launches": launches, "parts": rows}
    return {**case, **found}


def local_steps(model: dict[str, Any], rounds: int, device: str) -> dict[str, Any]:
    """Return the times of a synchronization after local steps, with the defaults of the library."""
    exchange = outer_exchange("sparseloco", make_groups(dtype=torch.bfloat16, device=device, **model), check_every=None)
    outer = OuterOptimizer(exchange, sync_every=LOCAL_STEPS, outer_lr=OUTER_LR)
    generator = torch.Generator(device).manual_seed(0)
    params = parameters(exchange)
    moves = [1e-3 * torch.randn(p.shape, generator=generator, dtype=p.dtype, device=device) for p in params]
    numbers = sum(param.numel() for param in params)
    source, target = (torch.zeros(numbers, device=device) for _ in range(2))

    @torch.no_grad()
    def synchronize() -> None:
        foreach_add_(params, moves)
        outer.synchronize()
        outer.begin_round()

    work: dict[str, Callable[[], Any]] = {CONTROL: lambda: target.copy_(source), "synchronization": synchronize}
    for _ in range(2):
        for one in work.values():
            one()
    rows = compare_to_control(work, rounds, device)
    row = rows["synchronization"]
    print(f"local steps: {1e3 * row['median_s']:.3f} ms, {row['ratio']:.2f} of a copy", flush=True)
    launches = count_launches(synchronize, device)
    sent = exchange.planned_wire_bytes(REPLICAS)
    return {"every": LOCAL_STEPS, "wire_bytes": sent, "numbers": numbers, "launches": launches, "parts": rows}


def compare_to_control(work: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, dict[str, Any]]:
    """Return the median seconds of each work, measured in turns, and their ratio to those of the control."""
    times = time_in_turns(work, rounds, device)
    return {name: {**ratio(own, times[CONTROL]), "median_s": float(np.median(own))} for name, own in times.items()}


def count_launches(work: Callable[[], Any], device: str) -> int | None:
    """Return and print the number of kernels, copies and fills that some work starts on a GPU; None without one."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    launches = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or ())
    print(f"  {launches} launches", flush=True)
    return launches


def compute(model: dict[str, Any], tokens: tuple[int, int], rounds: int, device: str) -> dict[str, Any]:
    """Return the seconds of a forward and backward pass for `LAYERS`, extrapolated to all layers by their difference.

    Args:
        tokens: number and length of the sequences.
    """
    shape, vocab_size = model["shape"], model["vocab_size"]
    ids = torch.randint(vocab_size, tokens, device=device)
    work = {}
    for layers in LAYERS:
        net = language_model({**shape, "num_hidden_layers": layers}, vocab_size, device)
        if device == "cuda":
            net.compile()

        def run(net: nn.Module = net) -> None:
            net.zero_grad()
            net(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        work[str(layers)] = run
        for _ in range(2):
            run()
    times = time_in_turns(work, rounds, device)
    few, more = (float(np.median(times[str(layers)])) for layers in LAYERS)
    each = (more - few) / (LAYERS[1] - LAYERS[0])
    whole = few + (shape["num_hidden_layers"] - LAYERS[0]) * each
    print(f"compute: {1e3 * whole:.1f} ms of {shape['num_hidden_layers']} layers, {1e3 * each:.2f} ms each")
    found = {"tokens": tokens[0] * tokens[1], "compiled": device == "cuda", "raw_s": times}
    return {**found, "layer_s": each, "compute_s": whole}


def share_of_step(seconds: float, cost: dict[str, Any]) -> float:
    """Return and print the share of an exchange in a step that takes `seconds` for it."""
    share: float = seconds / (seconds + cost["compute_s"])
    print(f"  {share:.2%} of a step of {cost['tokens']:,} tokens; the aim is below {AIM:.0%}")
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="1.3b")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens, to try the script")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = {"shape": SIZES["tiny" if options.tiny else options.size], "vocab_size": 320 if options.tiny else 32000}
    tokens = (2, 32) if options.tiny else (8, 2048)
    cost = compute(model, tokens, options.rounds, options.device)
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    rows = []
    for case in CASES:
        row = codec(case, model, options.rounds, options.device)
        row["share_of_step"] = share_of_step(row["parts"]["exchange"]["median_s"], cost)
        rows.append(row)
    outer = local_steps(model, options.rounds, options.device)
    outer["share_of_step"] = share_of_step(outer["parts"]["synchronization"]["median_s"] / LOCAL_STEPS, cost)
    measured = {"compute": cost, "cases": rows, "local_steps": outer}
    report = dated(__file__, replicas=REPLICAS, control=CONTROL, aim=AIM, **measured)
    print(write(report, f"comm-{options.device}", options.out))
    return 0 if all(row["repeatable"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
