"""Compare small Llamas with smaller layers at equal tokens and at equal time: novels, 8,192 tokens, 5.5 M parameters.

    python benchmarks/lm_accuracy.py prepare             tokenize the novels, on the CPU, into one file
    python benchmarks/lm_accuracy.py plan                parameters and operations of all models
    python benchmarks/lm_accuracy.py clock seeds timed --seconds 150 --at-once 4
    python benchmarks/lm_accuracy.py report              the table, from the raw lines alone

    clock      step times of all forms, in turns, as ratios to dense
    seeds      each form at its best rate, at 4, 2 and 8 times fewer parameters in the layers, several seeds
    timed      as many steps as take the time of the dense run
    sweep      the learning rates alone; otherwise, each form is swept when its first run is due

All phases of a command line run in one process, which starts no run after `--seconds`, the most important runs first.
Each run is one line of benchmarks/results/lm-accuracy.jsonl, appended when it ends; no run is repeated. `--at-once`
trains several models on separate streams, because small kernels leave a GPU idle. How a run works without the host is
in `lm_runs.py`.

The learning rate of the layers is tuned for each form, in short runs with seed 0 at 4 times fewer parameters. Gates
have a multiple of it. The embedding, which is also the output layer, and the norms have the same rate in all forms. The
rate rises for a twentieth of the run and then falls linearly to 0. AdamW has no weight decay, because the decay of
several factors decays their product more. All forms with the same seed see the same windows in the same order.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import RESULTS
from interleaved import disturbed, ratio, take_turns
from lm_models import FORMS, Ops, Shape, build_model, count_parameters, fused_ops, step_flops
from lm_runs import CAPTURE_AFTER, Run, describe_run, read_tokens, write_tokens
from resumable import Grid, Ledger, Line, Spec, interval, spec_key

PHASES = ("prepare", "plan", "sweep", "seeds", "clock", "timed", "report")
RESULT_FILE = RESULTS / "lm-accuracy.jsonl"
RATES = [0.25e-3 * 2**power for power in range(8)]
START = {**dict.fromkeys(FORMS, 3), "dense": 2, "low rank": 2, "tt silu": 4, "galore": 5}
"""Index of the first rate of each form's sweep."""
CLOCK = "seconds of a step"
RESERVED = 40 * 2**30
"""Bytes of reserved device memory from which it is freed after a run."""
SMALL = Shape(width=128, intermediate=384, length=128)
"""A model that a CPU trains in minutes: 0.85 M parameters in its layers, 1.9 M in all."""
SWEEP_FEWER = 4
MAIN = ("dense", "tt", "low rank", "cola", "dense narrow", "tt gates")
OTHERS = ("tt without gain", "tt silu", "tt silu gates", "low rank gates", "cola gates", "galore")
SEEDS = (1, 2, 3)


class Plan:
    """Order of all runs, given the results so far.

    Args:
        options: command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.steps, self.sweep_steps, self.batch = options.steps, options.sweep_steps, options.batch
        self.shape, self.eval_windows = (SMALL, 400) if options.small else (Shape(), None)
        self.gate_scale, self.rest_lr = options.gate_scale, options.rest_lr
        self.forms, self.device = options.forms, options.device

    def spec(self, form: str, fewer: float, lr: float, seed: int, steps: int) -> Spec:
        return {
            "form": form,
            "fewer": 1 if form in ("dense", "galore") else fewer,
            "lr": lr,
            "gate_scale": self.gate_scale if FORMS[form].gates else 0.0,
            "rest_lr": self.rest_lr,
            "seed": seed,
            "steps": steps,
            "batch": self.batch,
            "shape": asdict(self.shape),
            "eval_windows": self.eval_windows,
        }

    def clock_spec(self, names: Sequence[str]) -> Spec:
        setting = {"batch": self.batch, "shape": asdict(self.shape), "device_type": self.device}
        return {"measure": CLOCK, **setting, "models": [*names]}

    def step_times(self, lines: dict[str, Line]) -> dict[str, dict[str, Any]]:
        """Return the measured step times of all models by name, with their ratios to dense."""
        times: dict[str, dict[str, Any]] = {}
        for line in lines.values():
            if line.get("measure") == CLOCK and line["key"] == spec_key(self.clock_spec(line["models"])):
                times |= line["times"]
        return times

    def grid(self, form: str) -> Grid:
        return Grid(RATES, start=START[form])

    def swept(self, lines: dict[str, Line], form: str) -> list[float | None]:
        return self.grid(form).results(
            lines, lambda lr: self.spec(form, SWEEP_FEWER, lr, 0, self.sweep_steps), "eval_loss"
        )

    def best_rate(self, lines: dict[str, Line], form: str) -> float | None:
        return self.grid(form).best(self.swept(lines, form))

    def sweep_spec(self, lines: dict[str, Line], form: str) -> Spec | None:
        """Return the next run of a form's sweep; None if it has ended."""
        index = self.grid(form).next(self.swept(lines, form))
        return None if index is None else self.spec(form, SWEEP_FEWER, RATES[index], 0, self.sweep_steps)

    def models(self) -> list[tuple[str, float]]:
        """Return the compared models in the order of the report."""
        order = [(form, SWEEP_FEWER) for form in (*MAIN, *OTHERS)]
        order += [(form, fewer) for fewer in (2, 8) for form in MAIN if form not in ("dense", "tt gates")]
        return [(form, fewer) for form, fewer in order if form in self.forms]

    def runs(self) -> Iterator[tuple[str, str, float, int]]:
        """Yield the phase, form, size and seed of all runs, the most important ones first."""
        main = [one for one in self.models() if one[0] in MAIN and one[1] == SWEEP_FEWER]
        others = [one for one in self.models() if one[0] in OTHERS]
        sizes = [one for one in self.models() if one[1] != SWEEP_FEWER]
        first, *more = SEEDS
        for phase, models, seeds in (
            ("seeds", main, [first]),
            ("seeds", sizes, [first]),
            ("timed", main, [first]),
            ("seeds", main, more),
            ("seeds", others, [first]),
            ("seeds", sizes, more),
            ("timed", main, more),
            ("seeds", others, more),
            ("timed", others, SEEDS),
        ):
            yield from ((phase, *model, seed) for seed in seeds for model in models)

    def wanted(self, phases: Sequence[str], lines: dict[str, Line], running: Sequence[Spec]) -> Iterator[Spec]:
        """Yield the specifications that can be run now, in order, done or not."""
        sweeping = {spec["form"] for spec in running if spec["seed"] == 0}
        if "sweep" in phases:
            yield from (spec for form in self.forms if form not in sweeping and (spec := self.sweep_spec(lines, form)))
        times = self.step_times(lines)
        for phase, form, fewer, seed in self.runs():
            if phase not in phases or form in sweeping:
                continue
            if (spec := self.sweep_spec(lines, form)) is not None:
                yield spec
                continue
            lr = self.best_rate(lines, form)
            steps = self.steps if phase == "seeds" else self.steps_in_time(times, form, fewer)
            if lr is not None and steps is not None:
                yield self.spec(form, fewer, lr, seed, steps)

    def steps_in_time(self, times: dict[str, dict[str, Any]], form: str, fewer: float) -> int | None:
        """Return the number of steps in the time of the dense run; None without a measured step time."""
        found = times.get(model_name(form, fewer))
        return None if found is None else round(self.steps / found["ratio"])

    def next(
        self, phases: Sequence[str], lines: dict[str, Line], running: Sequence[Spec], failed: Set[str] = frozenset()
    ) -> Spec | None:
        """Return the next run that is neither done nor running nor failed."""
        taken = {*lines, *map(spec_key, running), *failed}
        return next((spec for spec in self.wanted(phases, lines, running) if spec_key(spec) not in taken), None)


def model_name(form: str, fewer: float) -> str:
    return form if form in ("dense", "galore") else f"{form} {fewer:g}x"


class Trainer:
    """Runs on one device, several at once.

    Args:
        options: command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._plan, self._ledger = Plan(options), Ledger(options.results, Path(__file__))
        self._lines, self._failed = self._ledger.lines(), set[str]()
        self._deadline, cuda = time.time() + options.seconds, options.device == "cuda"
        self._tokens = {name: ids.to(options.device) for name, ids in read_tokens(options.tokens).items()}
        self._ops = fused_ops() if cuda and not options.no_compile else Ops()
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each shape; flash attention needs none
        self._streams = [torch.cuda.Stream() if cuda else None for _ in range(options.at_once)]
        if cuda:
            torch.cuda.synchronize()  # the tokens are read on other streams

    def train(self, phases: Sequence[str]) -> None:
        """Run the phases until all is done or the time is over."""
        slots: dict[int, Run] = {}
        while True:
            spec = None
            free = next((slot for slot in range(len(self._streams)) if slot not in slots), None)
            if free is not None and time.time() < self._deadline:
                spec = self._plan.next(phases, self._lines, [run.spec for run in slots.values()], self._failed)
            if spec is not None:
                assert free is not None
                with self._catching(spec):
                    slots[free] = Run(spec, self._tokens, self._streams[free], self._ops)
            elif not slots:
                return
            if not self._advance(slots) and spec is None:
                time.sleep(5e-4)

    def _advance(self, slots: dict[int, Run]) -> bool:
        """Launch steps of all runs that have few in flight, and end those that are done; False if none had to wait."""
        acted = False
        for slot, run in [*slots.items()]:
            if run.in_flight >= (1 if run.all_launched else 2):
                continue
            acted = True
            with self._catching(run.spec):
                if run.all_launched:
                    self._append(run.line())
                else:
                    run.advance()
            if spec_key(run.spec) in {*self._lines, *self._failed}:
                del slots[slot], run
                gc.collect()
                # the pools of ended graphs stay reserved
                if torch.cuda.is_available() and torch.cuda.memory_reserved() > RESERVED:
                    torch.cuda.empty_cache()
        return acted

    @contextmanager
    def _catching(self, spec: Spec) -> Iterator[None]:
        """Print the error of a run, and never try it again in this process."""
        try:
            yield
        except Exception:
            print(f"failed: {spec}\n{traceback.format_exc()}", flush=True)
            self._failed.add(spec_key(spec))

    def _append(self, line: Line) -> None:
        self._lines[line["key"]] = line
        self._ledger.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._ledger.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        names = ("form", "fewer", "lr", "seed", "steps", "eval_loss", "seconds")
        left = self._deadline - time.time()
        print(" ".join(f"{name}={line[name]}" for name in names if name in line), f"{left:.0f} s left", flush=True)

    def clock(self) -> None:
        """Measure step times in turns, with one model in each form at the size of the sweep."""
        models = [one for one in self._plan.models() if one[1] == SWEEP_FEWER]
        names = [model_name(*one) for one in models]
        spec, began = self._plan.clock_spec(names), time.time()
        if spec_key(spec) in self._lines:
            return
        rounds, repeats = 10, 5
        work: dict[str, Callable[[], object]] = {}
        # the first model twice: its ratio to itself shows disturbances
        for (form, fewer), name in [*zip(models, names, strict=True), (models[0], f"{names[0]} again")]:
            # more steps than are measured
            own = self._plan.spec(form, fewer, RATES[0], 0, CAPTURE_AFTER + 1 + repeats * (rounds + 10))
            with self._catching(own):
                run = Run(own, self._tokens, self._streams[0], self._ops)
                run.advance(CAPTURE_AFTER + 1)
                work[name] = partial(run.finish, repeats)
        times = take_turns(work, rounds)
        ratios = {name: ratio(own, times[names[0]]) for name, own in times.items()}
        for name, row in ratios.items():
            row["step_s"] = float(np.median(times[name])) / repeats
            print(f"{name:20} {1e3 * row['step_s']:8.2f} ms a step, {row['ratio']:.2f} of {names[0]}", flush=True)
        if (refused := disturbed(ratios[f"{names[0]} again"])) is not None:
            print(refused)
        else:
            self._append({"key": spec_key(spec), **spec, "times": ratios, **describe_run(began)})


def show_plan(plan: Plan) -> None:
    """Print parameters and operations of all models."""
    tokens = plan.batch * plan.shape.length
    for form, fewer in plan.models():
        model, _ = build_model(FORMS[form], plan.shape, fewer, torch.float32)
        counts, flops = count_parameters(model), step_flops(model, tokens, plan.shape.length)
        print(
            f"{model_name(form, fewer):20} {counts['layer_parameters']:>10,} in layers {counts['num_parameters']:>10,} "
            f"in all {plan.steps * tokens / counts['num_parameters']:6.1f} tokens a parameter "
            f"{flops / tokens / 1e6:7.1f} MFLOP a token {flops * plan.steps / 1e15:6.2f} PFLOP a run"
        )


def report(plan: Plan, lines: dict[str, Line]) -> None:
    """Print the sweep, then step times and the held-out loss at equal tokens and at equal time."""
    print(f"held-out nats a token by learning rate, seed 0, {plan.sweep_steps} steps\n{plan.grid('dense').header()}")
    for form in plan.forms:
        print(plan.grid(form).row(form, plan.swept(lines, form)))
    times = plan.step_times(lines)

    def finished_runs(form: str, fewer: float, steps: int | None) -> dict[int, Line]:
        lr = plan.best_rate(lines, form)
        if lr is None or steps is None:
            return {}
        runs = {seed: lines.get(spec_key(plan.spec(form, fewer, lr, seed, steps))) for seed in SEEDS}
        return {seed: line for seed, line in runs.items() if line is not None and line["eval_loss"] is not None}

    dense = finished_runs("dense", 1, plan.steps)
    for form, fewer in plan.models():
        parts = [f"{model_name(form, fewer):20}"]
        equal = finished_runs(form, fewer, plan.steps)
        if equal:
            line = next(iter(equal.values()))
            parts.append(f"{line['layer_parameters']:>9,} in layers {line['num_parameters']:>9,} in all")
        if (name := model_name(form, fewer)) in times:
            parts.append(f"{times[name]['ratio']:5.2f} of dense's step")
        timed = {} if form == "dense" else finished_runs(form, fewer, plan.steps_in_time(times, form, fewer))
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
    parser.add_argument(
        "--tokens", type=Path, default=Path("lm-tokens.npz"), help="file that `prepare` writes; one for each vocabulary"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no run starts")
    parser.add_argument("--at-once", type=int, default=1, help="models that train at once")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--sweep-steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128, help="windows of 256 tokens in a step")
    parser.add_argument("--forms", nargs="+", choices=[*FORMS], default=[*MAIN, *OTHERS], metavar="FORM")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the elementwise parts on a GPU")
    parser.add_argument("--small", action="store_true", help="width 128 and windows of 128 tokens, for a CPU")
    parser.add_argument("--gate-scale", type=float, default=10.0, help="rate of gates, relative to that of the cores")
    parser.add_argument("--rest-lr", type=float, default=4e-3, help="rate of the embedding and the norms")
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
        if "clock" in phases:
            trainer.clock()  # before the training that it gives the time for
        trainer.train([phase for phase in phases if phase in ("sweep", "seeds", "timed")])
    if "report" in phases:
        report(plan, Ledger(options.results, Path(__file__)).lines())
    return 0


if __name__ == "__main__":
    sys.exit(main())
