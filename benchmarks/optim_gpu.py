"""Measure time and memory of optimizer steps on a GPU, and training throughput: CAME against existing optimizers.

    python benchmarks/optim_gpu.py --size 350m                 steps alone
    python benchmarks/optim_gpu.py --size 350m --end-to-end    training steps of the same Llama
    python benchmarks/optim_gpu.py --size 350m --sharded       steps of one of two ranks of FSDP2, without all-reduces

All optimizers step the same parameters (those of a Llama of the given size) in turns, rounds in random order. Times are
device times from events, after three steps of each optimizer. Ratios are medians over the rounds, relative to fused
AdamW in the same round, once with bf16 and once with fp32 moments. "captured" replays the step from a CUDA graph.
`scratch_bytes` is the memory that a step allocates in addition to parameters, gradients and state. With `--end-to-end`,
`peak_bytes` is the peak of a training step without the state of the other optimizers, which stay in memory. The report
lists peers that are not installed.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import dated, write
from torch import nn

import scantling as sc
from scantling.optim import state_bytes

CONTROLS = ("AdamW fused, bf16 moments", "AdamW fused, fp32 moments")
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4},
    "350m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1.3b": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16},
}
OPTIONS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95, 0.995), "debias": True}

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def peers() -> tuple[dict[str, tuple[Make, torch.dtype]], dict[str, str]]:
    """Return optimizers by name with the dtype of the weights they step, and why others are missing."""
    fp32, bf16 = torch.float32, torch.bfloat16
    adamw, came = torch.optim.AdamW, sc.CAME
    capturable = torch.cuda.is_available()  # AdamW can be captured in a CUDA graph only if told so; CAME always can
    found: dict[str, tuple[Make, torch.dtype]] = {
        # torch keeps AdamW's moments in the weights' dtype
        CONTROLS[0]: (lambda p: adamw(p, lr=1e-5, fused=True, capturable=capturable), bf16),
        CONTROLS[1]: (lambda p: adamw(p, lr=1e-5, fused=True, capturable=capturable), fp32),
        "AdamW foreach, bf16 moments": (lambda p: adamw(p, lr=1e-5, foreach=True), bf16),
        "Adafactor foreach": (lambda p: torch.optim.Adafactor(p, lr=1e-5, foreach=True), bf16),
        "CAME fp32, fp32 weights": (lambda p: came(p, **OPTIONS), fp32),
        "CAME fp32, stochastic": (lambda p: came(p, rounding="stochastic", **OPTIONS), bf16),
        "CAME bf16, stochastic": (lambda p: came(p, momentum="bf16", rounding="stochastic", **OPTIONS), bf16),
        "CAME int8, stochastic": (lambda p: came(p, momentum="int8", rounding="stochastic", **OPTIONS), bf16),
        "CAME int4, stochastic": (lambda p: came(p, momentum="int4", rounding="stochastic", **OPTIONS), bf16),
        "CAME int8, stochastic, operations": (
            lambda p: came(p, momentum="int8", rounding="stochastic", foreach=False, **OPTIONS),
            bf16,
        ),
    }
    missing = {}
    try:
        from torchao.optim import AdamW8bit

        found["torchao AdamW8bit, stochastic"] = (lambda p: AdamW8bit(p, lr=1e-5, bf16_stochastic_round=True), bf16)
    except ImportError as error:
        missing["torchao AdamW8bit"] = str(error)
    try:
        from came_pytorch import CAME as Published

        found["came-pytorch"] = (lambda p: Published(p, lr=1e-5), bf16)
    except ImportError as error:
        missing["came-pytorch"] = str(error)
    return found, missing


def language_model(size: str, device: str) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(vocab_size=32000, max_position_embeddings=2048, **SIZES[size])
    with torch.device(device):
        return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


class Clock:
    """Seconds between two moments: device events on a GPU, the clock on a CPU."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = [self._mark()]

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> float:
        begin, end = self._marks[0], self._mark()
        if not self._on_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def capture_graph(step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a callable that replays a step from a CUDA graph and keeps its inputs, such as a batch, alive."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    kept = graph, step

    def replay() -> None:
        kept[0].replay()

    return replay


def prepare(
    names: dict[str, tuple[Make, torch.dtype]], params: dict[torch.dtype, list[nn.Parameter]], device: str
) -> tuple[dict[str, Callable[[], Any]], dict[str, dict[str, Any]]]:
    """Return each optimizer's step, after three steps, and its measured values; or the error if it fails."""
    steps: dict[str, Callable[[], Any]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, (make, dtype) in names.items():
        try:
            began = time.perf_counter()
            optimizer = make(params[dtype])
            for _ in range(3):
                optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            facts[name] = {"first_three_steps_s": time.perf_counter() - began, "state_bytes": state_bytes(optimizer)}
            if device == "cuda":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                optimizer.step()
                torch.cuda.synchronize()
                facts[name]["scratch_bytes"] = torch.cuda.max_memory_allocated() - before
            steps[name] = optimizer.step
            if device == "cuda" and name.startswith(("CAME", "AdamW fused")):
                facts[f"{name}, captured"] = {"state_bytes": facts[name]["state_bytes"]}
                steps[f"{name}, captured"] = capture_graph(optimizer.step)
        except Exception as error:  # an unsupported peer is a result too
            facts.setdefault(name, {})["error"] = f"{type(error).__name__}: {error}"[:500]
    return steps, facts


def time_in_turns(steps: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            clock = Clock(device)
            steps[name]()
            times[name].append(clock.stop())
    return times


def time_steps(size: str, device: str, rounds: int) -> dict[str, Any]:
    names, missing = peers()
    model = language_model(size, device)
    shapes = [tuple(param.shape) for param in model.parameters()]
    del model
    params: dict[torch.dtype, list[nn.Parameter]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        params[dtype] = [nn.Parameter(torch.randn(s, device=device).mul_(0.02).to(dtype)) for s in shapes]
        for param in params[dtype]:
            param.grad = torch.randn(param.shape, device=device).mul_(1e-3).to(dtype)
    steps, facts = prepare(names, params, device)
    return {
        "num_parameters": sum(param.numel() for param in params[torch.float32]),
        "missing": missing,
        "results": summary(time_in_turns(steps, rounds, device), facts),
    }


def time_sharded(size: str, device: str, rounds: int) -> dict[str, Any]:
    """Measure the steps of one of two ranks that hold shards of all parameters; nothing is sent."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    names, missing = peers()
    kept = [CONTROLS[0], *(name for name in names if name.startswith("CAME"))]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh(device, (2,))
    model = language_model(size, device)
    sharded = [distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None) for param in model.parameters()]
    params: dict[torch.dtype, list[nn.Parameter]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        params[dtype] = [nn.Parameter(value.to(dtype)) for value in sharded]
        for param in params[dtype]:
            param.grad = torch.randn_like(param).mul_(1e-3)
            param.grad._spec = param._spec  # type: ignore[attr-defined]  # FSDP2 shares it
    steps, facts = prepare({name: names[name] for name in kept}, params, device)
    results = summary(time_in_turns(steps, rounds, device), facts)
    dist.destroy_process_group()
    return {"num_parameters": sum(value.numel() for value in sharded), "missing": missing, "results": results}


def time_training(size: str, device: str, rounds: int) -> dict[str, Any]:
    """Measure training steps of one model, optimizers in turns, with bf16 weights and random tokens."""
    names, missing = peers()
    kept = [CONTROLS[0], "torchao AdamW8bit, stochastic", "came-pytorch"]
    kept += [f"CAME {momentum}, stochastic" for momentum in ("fp32", "bf16", "int8", "int4")]
    model = language_model(size, device)
    batch, length = (8, 1024) if device == "cuda" else (2, 32)
    tokens = torch.randint(0, 32000, (batch, length), device=device)
    if device == "cuda":
        model.compile()

    def gradients() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    gradients()
    params = {torch.bfloat16: list(model.parameters())}
    own, facts = prepare({name: names[name] for name in kept if name in names}, params, device)

    def training_step(step: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            gradients()
            step()
            model.zero_grad()

        return run

    steps = {name: training_step(step) for name, step in own.items() if not name.endswith("captured")}
    model.zero_grad()
    states = {name: facts[name]["state_bytes"] for name in steps}
    for name, step in steps.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
            facts[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - sum(states.values()) + states[name]
    results = summary(time_in_turns(steps, rounds, device), facts)
    for row in results.values():
        if "median_s" in row:
            row["tokens_per_s"] = batch * length / row["median_s"]
    return {
        "num_parameters": sum(param.numel() for param in model.parameters()),
        "tokens_a_step": batch * length,
        "missing": missing,
        "results": results,
    }


def summary(times: dict[str, list[float]], facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for name, own in times.items():
        facts[name] |= {"median_s": float(np.median(own)), "raw_s": own}
        for control in CONTROLS:
            if control in times:
                facts[name][f"ratio to {control}"] = float(np.median(np.array(own) / np.array(times[control])))
    for name, row in facts.items():
        if "error" in row:
            print(f"{name:46} {row['error'][:100]}")
            continue
        ratios = "  ".join(f"{row[f'ratio to {c}']:6.2f}x" for c in CONTROLS if f"ratio to {c}" in row)
        scratch = row.get("scratch_bytes", 0) / 2**20
        sizes = f"state {row['state_bytes'] / 2**20:8.0f} MiB  scratch {scratch:7.0f} MiB"
        sizes += f"  peak {row['peak_bytes'] / 2**20:8.0f} MiB" if "peak_bytes" in row else ""
        print(f"{name:46} {row.get('median_s', 0) * 1e3:9.3f} ms  {ratios}  {sizes}")
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="350m")
    parser.add_argument("--end-to-end", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    measure = time_training if options.end_to_end else time_sharded if options.sharded else time_steps
    found = measure(options.size, options.device, options.rounds)
    gc.collect()
    kind = "tokens" if options.end_to_end else "sharded" if options.sharded else "step"
    print(f"missing: {', '.join(found['missing']) or 'nothing'}")
    print(write(dated(__file__, controls=CONTROLS, **found), f"optim-{kind}-gpu-{options.size}", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
