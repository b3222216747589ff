"""Compare small Llamas with smaller layers at equal tokens and at equal time: novels, 8,192 tokens, 5.5 M parameters.

    python benchmarks/lm_accuracy.py prepare                          tokenize the novels, on the CPU, into one file
    python benchmarks/lm_accuracy.py plan                             parameters and operations of all models
    python benchmarks/lm_accuracy.py sweep seeds clock timed --device cuda --seconds 150 --at-once 4
    python benchmarks/lm_accuracy.py report                           the table, from the raw lines alone

    sweep      learning rates of each form at 4 times fewer parameters in the layers, short runs, seed 0
    seeds      each form at its best rate, at 4, 2 and 8 times fewer parameters, the same windows in the same order
    clock      step times of all forms, in turns, as ratios to dense
    timed      as many steps as take the time of the dense run

All phases of a command line run in one process, which starts no run after `--seconds`. Each run is one line of
benchmarks/results/lm-accuracy.jsonl, appended when it ends; no run is repeated.

A run is a loop without the host: windows, learning rates, losses and the step count are tensors on the device, and a
CUDA graph replays the step. The first three steps, before the capture, are steps of the run. `--at-once` trains several
models on separate streams, because small kernels leave a GPU idle.

The learning rate of the layers is tuned for each form. Gates have a multiple of it; the embedding, which is also the
output layer, and the norms have the same rate in all forms. AdamW without weight decay, because the decay of several
factors decays their product more. The rate rises for a twentieth of the run and then falls linearly to 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import RESULTS
from interleaved import disturbed, ratio, take_turns
from lm_models import (
    FORMS,
    Ops,
    Projections,
    Shape,
    build_groups,
    build_model,
    count_parameters,
    fused_ops,
    step_flops,
)
from resumable import Grid, Ledger, Line, Spec, interval, spec_key
from small_models import run_facts, text
from torch import Tensor

from scantling.tensor.layer import keep_merged

PHASES = ("prepare", "plan", "sweep", "seeds", "clock", "timed", "report")
RESULT_FILE = RESULTS / "lm-accuracy.jsonl"
RATES = [0.25e-3 * 2**power for power in range(8)]
START = dict.fromkeys(FORMS, 3)
"""Index of the first rate of each form's sweep."""
REST_RATE, GATE_SCALE = 4e-3, 10.0
SWEEP_FEWER = 4
MAIN = ("dense", "tt gates", "low rank", "cola", "dense narrow")
OTHERS = ("tt", "tt silu", "tt silu gates", "low rank gates", "galore")
SEEDS = (1, 2, 3)
WARM_UP_SHARE = 0.05
CAPTURE_AFTER = 3
"""Steps without a graph: they compile kernels and allocate the optimizer's state."""
CHUNK = 25
"""Steps between two looks of the host at a run."""


def read_tokens(path: Path) -> dict[str, Tensor]:
    """Return the token ids of both texts; int16 holds all of them."""
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in ("train", "valid")}


def write_tokens(path: Path, vocabulary: int) -> None:
    """Tokenize the novels with a BPE trained on them, and write the ids of both texts to one compressed file."""
    from scantling.trainer.data.prepare import prepare
    from scantling.trainer.recipe.schema import DataSection

    source = {**text("novels"), "max_bytes": None, "tokenizer": {"bpe": vocabulary}}
    prepared = prepare(DataSection(**source), seed=0)
    assert prepared.heldout is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    stores = {"train": prepared.train, "valid": prepared.heldout}
    np.savez_compressed(path, **{name: store.tokens[:].astype(np.int16) for name, store in stores.items()})
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, {prepared.info}")


def window_starts(num_tokens: int, length: int, count: int, seed: int) -> Tensor:
    """Return the starts of windows of length + 1 tokens in random order, each epoch with another offset: (count)."""
    generator = torch.Generator().manual_seed(seed)
    parts, total = [], 0
    while total < count:
        offset = int(torch.randint(length, (), generator=generator))
        windows = (num_tokens - 1 - offset) // length
        parts.append(offset + length * torch.randperm(windows, generator=generator))
        total += windows
    return torch.cat(parts)[:count]


def rate_factors(steps: int) -> Tensor:
    """Return the learning rate of each step as a fraction of its peak: (steps)."""
    warm = max(1, round(WARM_UP_SHARE * steps))
    done = torch.arange(steps, dtype=torch.float32)
    return torch.minimum((done + 1) / warm, (steps - done) / max(1, steps - warm))


class Run:
    """One training run, which the host only launches.

    Args:
        spec: specification.
        tokens: result of `read_tokens`, on the device.
        stream: stream of all its work; None on a CPU.
        ops: elementwise parts of the decoder.
    """

    def __init__(self, spec: Spec, tokens: dict[str, Tensor], stream: torch.cuda.Stream | None, ops: Ops) -> None:
        self.spec, self.tokens, self.began = spec, tokens, time.time()
        self._stream, self._launched, self._marks = stream, 0, list[Any]()
        self._graph: torch.cuda.CUDAGraph | None = None
        device = tokens["train"].device
        shape, steps, form = Shape(**spec["shape"]), spec["steps"], FORMS[spec["form"]]
        self._shape = shape
        with self._on_stream():
            torch.manual_seed(spec["seed"])
            dtype = torch.bfloat16 if stream else torch.float32
            self.model, self._adapter = build_model(form, shape, spec["fewer"], dtype)
            self.model.ops = ops
            self.counts = count_parameters(self.model)
            self.model.to(device)
            rates = {"layers": spec["lr"], "gates": spec["gate_scale"] * spec["lr"], "rest": spec["rest_lr"]}
            groups = build_groups(self.model, rates)
            self._projections: Projections | None = None
            if form.projected:
                (matrices,) = (group for group in groups if group["role"] == "matrix")
                names, params = zip(*matrices["params"], strict=True)
                self._projections = Projections(list(params), shape.width // 4)
                matrices["params"] = list(zip(names, self._projections.small, strict=True))
            peaks = torch.tensor([group["lr"] for group in groups])
            self._peaks, self.rates = peaks.to(device), peaks.to(device, copy=True)
            for index, group in enumerate(groups):
                group["lr"] = self.rates[index]  # a view
            self._optimizer = torch.optim.AdamW(
                groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=stream is not None
            )
            starts = window_starts(len(tokens["train"]), shape.length, steps * spec["batch"], spec["seed"])
            self._starts = starts.view(steps, spec["batch"]).to(device)
            self._factors = rate_factors(steps).to(device)
            self._window = torch.arange(shape.length + 1, device=device)
            self.losses = torch.zeros(steps, device=device)
            self._done = torch.zeros(1, dtype=torch.long, device=device)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _loss(self, ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._stream is not None):
            return self.model(ids)

    def backward(self) -> Tensor:
        """Compute the gradients of the current batch; return its loss."""
        starts = self._starts.index_select(0, self._done).view(-1, 1)
        self.model.zero_grad(set_to_none=True)
        loss = self._loss(self.tokens["train"][starts + self._window].long())
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """Run one training step, without a word to the host."""
        loss = self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        torch.mul(self._peaks, self._factors.index_select(0, self._done), out=self.rates)
        if self._projections is not None:
            self._projections.project()
        self._optimizer.step()
        if self._projections is not None:
            self._projections.expand()
        self.losses.index_copy_(0, self._done, loss.view(1))
        self._done.add_(1)

    def advance(self, limit: int = CHUNK) -> None:
        """Launch some steps."""
        with self._on_stream():
            for _ in range(min(limit, self.spec["steps"] - self._launched)):
                if self._projections is not None and self._launched % Projections.GAP == 0:
                    if self._launched == 0:
                        self.backward()
                    self._projections.refresh()
                if self._stream is not None and self._graph is None and self._launched == CAPTURE_AFTER:
                    self._capture()
                if self._graph is None:
                    self.step()
                else:
                    self._graph.replay()
                self._launched += 1
            if self._stream is not None:
                self._marks.append(torch.cuda.Event())
                self._marks[-1].record()

    def _capture(self) -> None:
        # Unlike torch.cuda.graph, this does not wait for the runs on other streams. A garbage collection could free
        # the graph of another run, which is forbidden during a capture.
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            self.step()
            graph.capture_end()
        finally:
            gc.enable()
        self._graph = graph

    @property
    def all_launched(self) -> bool:
        return self._launched == self.spec["steps"]

    @property
    def in_flight(self) -> int:
        """Number of calls of `advance` whose steps have not ended."""
        self._marks = [mark for mark in self._marks if not mark.query()]
        return len(self._marks)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss of the held-out text with the gates folded into the cores."""
        length = self._shape.length
        with self._on_stream(), keep_merged(self.model):
            if self._adapter is not None:
                self._adapter.detach()
            self.model.ops = Ops()
            ids = self.tokens["valid"].unfold(0, length + 1, length)[: self.spec["eval_windows"]]
            total = sum(self._loss(part.long()) * len(part) for part in ids.split(self.spec["batch"]))
            return float(total / len(ids))

    def line(self) -> Line:
        """Return the result line of a run that has ended."""
        loss = self.evaluate()
        losses = self.losses.cpu().numpy()
        spec, tokens = self.spec, self.spec["steps"] * self.spec["batch"] * self._shape.length
        return {
            "key": spec_key(spec),
            **spec,
            "eval_loss": loss if np.isfinite(loss) else None,
            "curve": [round(float(np.mean(part)), 4) for part in np.array_split(losses, min(100, len(losses)))],
            "tokens": tokens,
            "epochs": round(tokens / len(self.tokens["train"]), 3),
            **self.counts,
            **facts(self.began),
        }


def facts(began: float) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {**run_facts(began), "device": device, "command": sys.argv[1:]}


class Plan:
    """Order of all runs, given the results so far.

    Args:
        options: command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.steps, self.sweep_steps, self.batch = options.steps, options.sweep_steps, options.batch
        self.shape, self.eval_windows = (Shape(512, 32, 64, 2, 32), 16) if options.tiny else (Shape(), None)
        self.forms = options.forms

    def spec(self, form: str, fewer: float, lr: float, seed: int, steps: int, gate_scale: float = GATE_SCALE) -> Spec:
        return {
            "form": form,
            "fewer": 1 if form in ("dense", "galore") else fewer,
            "lr": lr,
            "gate_scale": gate_scale if FORMS[form].gates else 0.0,
            "rest_lr": REST_RATE,
            "seed": seed,
            "steps": steps,
            "batch": self.batch,
            "shape": asdict(self.shape),
            "eval_windows": self.eval_windows,
        }

    def clock_spec(self) -> Spec:
        return {"measure": "seconds of a step", "batch": self.batch, "shape": asdict(self.shape), "forms": self.forms}

    def grid(self, form: str) -> Grid:
        return Grid(RATES, start=START[form])

    def swept(self, lines: dict[str, Line], form: str) -> list[float | None]:
        return self.grid(form).results(
            lines, lambda lr: self.spec(form, SWEEP_FEWER, lr, 0, self.sweep_steps), "eval_loss"
        )

    def best_rate(self, lines: dict[str, Line], form: str) -> float | None:
        return self.grid(form).best(self.swept(lines, form))

    def compared(self) -> Iterator[tuple[str, float]]:
        """Yield the compared models, the most important ones first."""
        for forms, sizes in ((MAIN, (4,)), (OTHERS, (4,)), (MAIN, (2, 8))):
            for fewer in sizes:
                for form in forms:
                    if form in self.forms and (fewer == SWEEP_FEWER or form != "dense"):
                        yield form, fewer

    def wanted(self, phase: str, lines: dict[str, Line], running: Sequence[Spec]) -> Iterator[Spec]:
        """Yield the specifications of a phase that can be run now, in order."""
        if phase == "sweep":
            for form in self.forms:
                if any(spec["form"] == form and spec["seed"] == 0 for spec in running):
                    continue
                index = self.grid(form).next(self.swept(lines, form))
                if index is not None:
                    yield self.spec(form, SWEEP_FEWER, RATES[index], 0, self.sweep_steps)
            return
        for seed in SEEDS:
            for form, fewer in self.compared():
                lr = self.best_rate(lines, form)
                if lr is None:
                    continue
                if phase == "seeds":
                    yield self.spec(form, fewer, lr, seed, self.steps)
                elif form != "dense" and (steps := self.steps_in_time(lines, form, fewer)) is not None:
                    yield self.spec(form, fewer, lr, seed, steps)

    def steps_in_time(self, lines: dict[str, Line], form: str, fewer: float) -> int | None:
        """Return the number of steps in the time of the dense run; None without a measured step time."""
        times = lines.get(spec_key(self.clock_spec()), {}).get("times", {})
        found = times.get(clock_name(form, fewer))
        return None if found is None else round(self.steps / found["ratio"])

    def next(self, phases: Sequence[str], lines: dict[str, Line], running: Sequence[Spec]) -> Spec | None:
        """Return the next run that is neither done nor running."""
        taken = {*lines, *map(spec_key, running)}
        wanted = (spec for phase in phases for spec in self.wanted(phase, lines, running))
        return next((spec for spec in wanted if spec_key(spec) not in taken), None)


def clock_name(form: str, fewer: float) -> str:
    return form if form in ("dense", "galore") else f"{form} {fewer:g}x"


class Trainer:
    """Runs on one device, several at once.

    Args:
        options: command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._plan, self._ledger = Plan(options), Ledger(options.results, Path(__file__))
        self._deadline, cuda = time.time() + options.seconds, options.device == "cuda"
        self._tokens = {name: ids.to(options.device) for name, ids in read_tokens(options.tokens).items()}
        self._ops = fused_ops() if cuda and not options.no_compile else Ops()
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each shape; flash attention needs none
        self._streams: list[torch.cuda.Stream | None] = [
            torch.cuda.Stream() if cuda else None for _ in range(options.at_once)
        ]
        if cuda:
            torch.cuda.synchronize()  # the tokens are read on other streams

    def train(self, phases: Sequence[str]) -> None:
        """Run the phases until all is done or the time is over."""
        slots: dict[int, Run] = {}
        while True:
            lines, free = self._ledger.lines(), [slot for slot in range(len(self._streams)) if slot not in slots]
            if free and time.time() < self._deadline:
                spec = self._plan.next(phases, lines, [run.spec for run in slots.values()])
                if spec is not None:
                    slots[free[0]] = Run(spec, self._tokens, self._streams[free[0]], self._ops)
            if not slots:
                return
            if not self._advance(slots):
                time.sleep(5e-4)

    def _advance(self, slots: dict[int, Run]) -> bool:
        """Launch steps of all runs that have few in flight, and end those that are done; False if nothing was to do."""
        acted = False
        for slot, run in list(slots.items()):
            if run.all_launched and not run.in_flight:
                self._append(run.line())
                del slots[slot], run
                gc.collect()
                if torch.cuda.is_available() and torch.cuda.memory_reserved() > 40 * 2**30:
                    torch.cuda.empty_cache()
            elif not run.all_launched and run.in_flight < 2:
                run.advance()
            else:
                continue
            acted = True
        return acted

    def _append(self, line: Line) -> None:
        self._ledger.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._ledger.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        names = ("form", "fewer", "lr", "seed", "steps", "eval_loss", "seconds")
        left = self._deadline - time.time()
        print(" ".join(f"{name}={line[name]}" for name in names if name in line), f"{left:.0f} s left", flush=True)

    def clock(self) -> None:
        """Measure step times in turns, with one model in each form and size."""
        spec = self._plan.clock_spec()
        if spec_key(spec) in self._ledger.lines():
            return
        began, rounds, repeats = time.time(), 10, 5
        work: dict[str, Callable[[], object]] = {}
        models = [*self._plan.compared()]
        for form, fewer in [*models, models[0]]:
            steps = self._plan.spec(form, fewer, RATES[0], 0, (rounds + 4) * repeats + CAPTURE_AFTER + 1)
            run = Run(steps, self._tokens, self._streams[0], self._ops)
            run.advance(CAPTURE_AFTER + 1)
            name = clock_name(form, fewer)
            work[f"{name} again" if name in work else name] = lambda run=run: finished(run, repeats)
        times = take_turns(work, rounds)
        ratios = {name: ratio(own, times[clock_name(*models[0])]) for name, own in times.items()}
        refused = disturbed(ratios[f"{clock_name(*models[0])} again"])
        if refused is not None:
            print(refused)
            return
        for name, row in ratios.items():
            row["step_s"] = float(np.median(times[name])) / repeats
            print(f"{name:20} {1e3 * row['step_s']:8.2f} ms a step, {row['ratio']:.2f} of dense")
        self._append({"key": spec_key(spec), **spec, "times": ratios, **facts(began)})


def finished(run: Run, steps: int) -> None:
    """Run some steps and wait for them."""
    run.advance(steps)
    while run.in_flight:
        time.sleep(0)


def show_plan(plan: Plan) -> None:
    """Print parameters and operations of all models."""
    tokens = plan.batch * plan.shape.length
    for form, fewer in plan.compared():
        model, _ = build_model(FORMS[form], plan.shape, fewer, torch.float32)
        counts, flops = count_parameters(model), step_flops(model, tokens, plan.shape.length)
        print(
            f"{clock_name(form, fewer):20} {counts['layer_parameters']:>10,} in layers {counts['num_parameters']:>10,} "
            f"in all {plan.steps * tokens / counts['num_parameters']:6.1f} tokens a parameter "
            f"{flops / tokens / 1e6:7.1f} MFLOP a token {flops * plan.steps / 1e15:6.2f} PFLOP a run"
        )


def report(plan: Plan, lines: dict[str, Line]) -> None:
    """Print the sweep, then step times and the held-out loss at equal tokens and at equal time."""
    print(f"held-out nats a token by learning rate, seed 0, {plan.sweep_steps} steps\n{plan.grid('dense').header()}")
    for form in plan.forms:
        print(plan.grid(form).row(form, plan.swept(lines, form)))
    times = lines.get(spec_key(plan.clock_spec()), {}).get("times", {})

    def found(form: str, fewer: float, steps: int | None) -> dict[int, Line]:
        lr = plan.best_rate(lines, form)
        if lr is None or steps is None:
            return {}
        runs = {seed: lines.get(spec_key(plan.spec(form, fewer, lr, seed, steps))) for seed in SEEDS}
        return {seed: line for seed, line in runs.items() if line is not None and line["eval_loss"] is not None}

    dense = found("dense", 1, plan.steps)
    for form, fewer in plan.compared():
        parts = [f"{clock_name(form, fewer):20}"]
        equal = found(form, fewer, plan.steps)
        if equal:
            line = next(iter(equal.values()))
            parts.append(f"{line['layer_parameters']:>9,} in layers {line['num_parameters']:>9,} in all")
        if (name := clock_name(form, fewer)) in times:
            parts.append(f"{times[name]['ratio']:5.2f} of dense's step")
        timed = {} if form == "dense" else found(form, fewer, plan.steps_in_time(lines, form, fewer))
        for label, runs in (("tokens", equal), ("time", timed)):
            if runs:
                mean, width = interval([line["eval_loss"] for line in runs.values()])
                pairs = [line["eval_loss"] - dense[seed]["eval_loss"] for seed, line in runs.items() if seed in dense]
                parts.append(f"at equal {label} {mean:.4f} ± {width:.4f} ({len(runs)} seeds)")
                if form != "dense" and pairs:
                    parts[-1] += ", minus dense {:+.4f} ± {:.4f}".format(*interval(pairs))
        print("  ".join(parts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phases", nargs="+", choices=PHASES, metavar="PHASE", help=", ".join(PHASES))
    parser.add_argument("--tokens", type=Path, default=Path("lm-tokens.npz"), help="file that `prepare` writes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no run starts")
    parser.add_argument("--at-once", type=int, default=1, help="models that train at once")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--sweep-steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128, help="windows of 256 tokens in a step")
    parser.add_argument("--forms", nargs="+", choices=[*FORMS], default=[*MAIN, *OTHERS], metavar="FORM")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the elementwise parts on a GPU")
    parser.add_argument("--tiny", action="store_true", help="a model of no interest, to try the script")
    parser.add_argument("--results", type=Path, default=RESULT_FILE)
    options = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # one hardware queue for each stream
    plan, phases = Plan(options), options.phases
    if "prepare" in phases:
        write_tokens(options.tokens, plan.shape.vocabulary)
    if "plan" in phases:
        show_plan(plan)
    if {"sweep", "seeds", "clock", "timed"} & {*phases}:
        trainer = Trainer(options)
        trainer.train([phase for phase in phases if phase in ("sweep", "seeds")])
        if "clock" in phases:
            trainer.clock()
        if "timed" in phases:
            trainer.train(["timed"])
    if "report" in phases:
        report(plan, Ledger(options.results, Path(__file__)).lines())
    return 0


if __name__ == "__main__":
    sys.exit(main())
