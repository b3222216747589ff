"""Measure TT layers on a GPU: training steps of the six-encoder transformer, blocks of Llamas, and table lookups.

    python benchmarks/tensor_gpu.py steps      dense, TT and GaLore at batch 1, 32 and 128 of 128 tokens
    python benchmarks/tensor_gpu.py blocks     two blocks of width 2048 and 4096 with 16,384 tokens
    python benchmarks/tensor_gpu.py lookup     a table of ten million rows at batch 10,000, 20,000 and 40,000
    python benchmarks/tensor_gpu.py orders     60 cases: the chosen contraction order against the known orders

`steps`: the paper's baseline is dense in fp32 without TF32. `tuned` is dense in bf16, compiled and captured in a CUDA
graph; the best form of the TT model is too. `fused` has the kernels of feed-forward layers
(`train.activation_checkpointing: feed_forward`), `alone` merges the cores of each layer alone. Times are device times,
in turns, rounds in random order; ratios are medians over the rounds. Peak memory is the memory allocated between the
start of a model's construction and the end of its fourth step. GaLore needs the package galore-torch; its SVD every 200
steps counts in the peak memory but not in the times.

`blocks`: forward and backward pass of two decoder blocks, weights and inputs in bf16, compiled and captured, with ranks
of a sixteenth and a quarter of the width.

`lookup`: forward and backward on Zipf-distributed ids. `unoptimised` gathers core slices for each id and multiplies
them in order. `each id by itself` is the optimized lookup without deduplication of ids.

`orders`: forward and backward pass of one layer in bf16 in the cases of tensor_layers.py, captured. Ranks are not
padded in the known orders.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import dated, write
from encoder_models import FULL, Shape, Training
from interleaved import ratio
from optim_gpu import capture_graph, time_in_turns
from tensor_layers import GRID_RANKS, GRID_SHAPES, GRID_TOKENS, InOrder, forward_backward, known_orders
from torch import Tensor, nn

import scantling as sc
from scantling.tensor.costs import device_costs
from scantling.tensor.merging import merge_alone
from scantling.trainer.models.checkpointing import checkpoint_activations


@dataclass(frozen=True)
class Contender:
    """A row: the configuration, and the way its step is optimized."""

    name: str
    dtype: str = "float32"
    compiled: bool = False
    graph: bool = False
    alone: bool = False
    fused: bool = False


CONTENDERS = {
    "dense, fp32": Contender("dense"),
    "dense, tuned": Contender("dense", "bfloat16", compiled=True),
    "dense, tuned, graph": Contender("dense", "bfloat16", compiled=True, graph=True),
    "TT, fp32, graph": Contender("cores", graph=True),
    "TT, bf16, graph": Contender("cores", "bfloat16", graph=True),
    "TT, bf16, compiled, graph": Contender("cores", "bfloat16", compiled=True, graph=True),
    "TT fused, bf16, graph": Contender("cores", "bfloat16", graph=True, fused=True),
    "TT alone, bf16, graph": Contender("cores", "bfloat16", graph=True, alone=True),
    "TT alone, bf16, compiled, graph": Contender("cores", "bfloat16", compiled=True, graph=True, alone=True),
    "TT adapting, bf16, graph": Contender("cores-adapting", "bfloat16", graph=True),
    "TT at 0.2, bf16, graph": Contender("cores-0.2", "bfloat16", graph=True),
    "GaLore, fp32": Contender("galore"),
}
CONTROLS = ("dense, fp32", "dense, tuned, graph", "GaLore, fp32")
BLOCKS = {2048: (128, 512), 4096: (256, 1024)}
"""Width of the blocks, and ranks of their layers."""


def allocated(device: str, *, peak: bool = False) -> int:
    if device != "cuda":
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def built(contender: Contender, batch: int, shape: Shape, device: str) -> tuple[Callable[[], object], dict[str, Any]]:
    """Return a step that is ready to be timed, and its memory and sizes."""
    gc.collect()
    before = allocated(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    options = {"capturable": True} if contender.graph and device == "cuda" else {}
    training = Training(contender.name, shape, contender.dtype, device, **options)
    if contender.alone:
        merge_alone(training.model)
    if contender.fused:
        checkpoint_activations(training.model, "feed_forward")
    if contender.compiled and device == "cuda":
        training.model.compile()
    step = training.step(batch)
    for _ in range(4):
        step()
    if contender.graph and device == "cuda":
        step = capture_graph(step)
    step()
    # includes the graph's own memory pool
    return step, {"peak_bytes": allocated(device, peak=True) - before, **training.sizes()}


def measure_rows(
    made: dict[str, Callable[[], tuple[Callable[[], object], dict[str, Any]]]], rounds: int, device: str
) -> dict[str, dict[str, Any]]:
    """Build all contenders, time them in turns, and report the failed ones."""
    work: dict[str, Callable[[], object]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, build in made.items():
        try:
            work[name], rows[name] = build()
        except (Exception, SystemExit) as error:  # a missing or unsupported peer is a result too
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    for name, own in time_in_turns(work, rounds, device).items():
        rows[name] |= {"median_s": float(np.median(own)), "raw_s": own}
    return rows


def compared(rows: dict[str, dict[str, Any]], controls: tuple[str, ...]) -> None:
    """Add speed-ups and memory ratios over the controls, and print the rows."""
    for name, row in rows.items():
        if "error" in row:
            print(f"  {name:30} {row['error'][:110]}", flush=True)
            continue
        parts = [f"{row['median_s'] * 1e3:9.3f} ms  {row['peak_bytes'] / 2**20:9.1f} MiB"]
        for control in controls:
            if "raw_s" in rows.get(control, {}):
                faster = ratio(rows[control]["raw_s"], row["raw_s"])["ratio"]
                smaller = rows[control]["peak_bytes"] / max(1, row["peak_bytes"])
                row[f"to {control}"] = {"faster": faster, "less_memory": smaller}
                parts.append(f"{control}: {faster:6.2f}x faster, {smaller:6.2f}x less memory")
        print(f"  {name:30} " + "   ".join(parts), flush=True)


def steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield all results so far, after each batch size."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = Shape(1, 16, width=96, vocabulary=300) if options.device == "cpu" else FULL
    found = {}
    for batch in options.batches or ((1, 2) if options.device == "cpu" else (1, 32, 128)):
        print(f"batch {batch}")
        made = {name: partial(built, one, batch, shape, options.device) for name, one in CONTENDERS.items()}
        found[f"batch {batch}"] = measure_rows(made, options.rounds, options.device)
        compared(found[f"batch {batch}"], CONTROLS)
        yield found


def built_block(
    settings: dict[str, Any] | None, width: int, tokens: tuple[int, int], device: str
) -> tuple[Callable[[], object], dict[str, Any]]:
    """Return a forward and backward pass of two Llama blocks, ready to be timed, and its memory and size.

    Args:
        settings: arguments of `sc.tensorize`; None for dense layers.
        width: width of the model.
        tokens: sequences and tokens of each.
        device: device of the model.
    """
    from transformers import LlamaConfig, LlamaModel

    gc.collect()
    before = allocated(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 128) * 128,
        num_hidden_layers=2,
        num_attention_heads=max(1, width // 128),
        max_position_embeddings=tokens[1],
    )
    torch.manual_seed(0)
    model = LlamaModel(config)
    if settings is not None:
        sc.tensorize(model, {"*_proj": settings["rank"]}, format=settings["format"])
    model.to(device, torch.bfloat16).train()
    if device == "cuda":
        model.compile()
    x = torch.randn(*tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(x)

    def run() -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)
        model(inputs_embeds=x, use_cache=False).last_hidden_state.backward(upstream)

    for _ in range(3):
        run()
    step = capture_graph(run) if device == "cuda" else run
    step()
    numbers = sum(param.numel() for param in model.parameters())
    return step, {"peak_bytes": allocated(device, peak=True) - before, "num_parameters": numbers}


def blocks(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield all results so far, after each width."""
    found: dict[str, Any] = {}
    is_dry = options.device == "cpu"
    for width, ranks in ({64: (4, 16)} if is_dry else BLOCKS).items():
        print(f"width {width}")
        tokens = (2, 16) if is_dry else (16, 1024)
        settings: dict[str, dict[str, Any] | None] = {"dense": None}
        for rank in ranks:
            forms = {"TT": "tt", "CoLA": "cola", "low rank": "low-rank"}
            settings |= {f"{name}, rank {rank}": {"rank": rank, "format": form} for name, form in forms.items()}
        made = {name: partial(built_block, one, width, tokens, options.device) for name, one in settings.items()}
        found[f"width {width}"] = measure_rows(made, options.rounds, options.device)
        compared(found[f"width {width}"], ("dense",))
        yield found


class OneByOne(sc.TTMEmbedding):
    """TT embedding without optimizations: each id separately, cores multiplied in order."""

    def forward(self, ids: Tensor) -> Tensor:
        rest = ids.reshape(-1)
        digits = []
        for core in reversed(list(self.cores)):
            digits.insert(0, rest % core.shape[1])
            rest = rest // core.shape[1]
        state = torch.ones(ids.numel(), 1, 1, dtype=self.cores[0].dtype, device=ids.device)
        for core, digit in zip(self.cores, digits, strict=True):
            slices = core.transpose(0, 1)[digit].flatten(2)  # (ids, r, columns r')
            state = torch.bmm(state, slices).view(ids.numel(), -1, core.shape[-1])
        return state.reshape(*ids.shape, -1)[..., : self.embedding_dim]


class NotDistinct(sc.TTMEmbedding):
    """TT embedding with the cheapest contraction order, but without deduplication of ids."""

    def _distinct(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return ids.reshape(-1), None


def looked_up(
    kind: Callable[..., nn.Module], rows: int, batch: int, device: str
) -> tuple[Callable[[], object], dict[str, Any]]:
    gc.collect()
    before = allocated(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    table = kind(rows, 128, 32) if issubclass(kind, sc.TTMEmbedding) else kind(rows, 128)  # type: ignore[arg-type]
    table.to(device)
    # drawn as zipf_clicks.py does for many tables, here for one: p(k) ~ 1/k, by the inverse of its integral
    uniform = torch.rand(batch, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = (torch.exp(uniform * np.log(rows)) - 1).long().clamp(max=rows - 1).to(device)
    upstream = torch.randn(batch, 128, device=device)

    def run() -> None:
        for parameter in table.parameters():
            parameter.grad = None
        table(ids).backward(upstream)

    for _ in range(3):
        run()
    distinct = len(torch.unique(ids))
    return run, {"peak_bytes": allocated(device, peak=True) - before, "distinct_ids": distinct}


def lookup(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield all results so far, after each batch size."""
    rows = 10_000 if options.device == "cpu" else 10_131_227
    kinds = {
        "unoptimised": OneByOne,
        "each id by itself": NotDistinct,
        "TT": sc.TTMEmbedding,
        "nn.Embedding": nn.Embedding,
    }
    found = {}
    for batch in options.batches or ((100,) if options.device == "cpu" else (10_000, 20_000, 40_000)):
        print(f"batch {batch}")
        made = {name: partial(looked_up, kind, rows, batch, options.device) for name, kind in kinds.items()}
        found[f"batch {batch}"] = measure_rows(made, options.rounds, options.device)
        compared(found[f"batch {batch}"], ("unoptimised", "nn.Embedding"))
        yield found


def orders(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the times of the chosen order relative to the best of the known ones in all cases, and their maximum."""
    cases, over_best = {}, []
    cuda = options.device == "cuda"
    for (inputs, outputs), rank, tokens in list(product(GRID_SHAPES, GRID_RANKS, GRID_TOKENS))[: None if cuda else 2]:
        torch.manual_seed(0)
        layer = sc.TTLinear(inputs, outputs, rank, bias=False, device=options.device, dtype=torch.bfloat16)
        x = torch.randn(tokens, inputs, device=options.device, dtype=torch.bfloat16, requires_grad=True)
        modules = {name: InOrder(layer, steps) for name, steps in known_orders(layer.network).items()}
        work = {name: forward_backward(module, x) for name, module in {**modules, "chosen": layer}.items()}
        for run in work.values():
            run()
        if cuda:
            work = {name: capture_graph(run) for name, run in work.items()}
        times = time_in_turns(work, options.rounds, options.device)
        best = min(modules, key=lambda name: float(np.median(times[name])))
        over_best.append(ratio(times["chosen"], times[best])["ratio"])
        label = f"{inputs}x{outputs}, rank {rank}, {tokens} tokens"
        cases[label] = {"plan": str(layer.plan(tokens)), "best": best, "chosen_over_best": over_best[-1], "raw": times}
        print(f"  {label:36} {over_best[-1]:.2f} of {best}", flush=True)
    worst = {"worst_over_best": max(over_best), "costs": asdict(device_costs(x.device)), "cases": cases}
    yield {f"{len(cases)} cases": worst}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=["steps", "blocks", "lookup", "orders"])
    parser.add_argument("--batches", type=int, nargs="*", help="default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script, small")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    measures = {"steps": steps, "blocks": blocks, "lookup": lookup, "orders": orders}
    for found in measures[options.measure](options):
        print(write(dated(__file__, results=found), f"tensor-{options.measure}-gpu", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
