"""Several forms of one model at equal steps and at equal wall clock: sweep, seeds, the clock, and runs as it says.

The script that defines a comparison has these phases on its command line:

    sweep      one grid of learning rates for every form and choice, one seed
    seeds      each form at its best, the same data order, several seeds, equal steps
    clock      what a step takes, all forms in turns (`interleaved.py`), as a ratio to the first one
    timed      as many steps as fit into the time that the first form takes for its own
    report     all of it, from the raw lines alone

Runs are kept as `resumable.py` says: one line each, none is made twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interleaved import ratio, take_turns
from resumable import Grid, Ledger, Line, Spec, command_line, interval, key_of, side_by_side, threads_a_job
from small_models import facts, printed, train_line

Lines = dict[str, Line]
PHASES = ["sweep", "seeds", "clock", "timed", "report"]


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        script: whose command line this is.
        results: the file of its lines.
        forms: their names; the first one is the control.
        grid: learning rates.
        steps: of a run.
        seeds: how many.
        fixed: what a run's specification has beside form, rate, seed, steps and choice.
        choices_of: what is tuned of a form beside its rate: each choice is swept, and the best run of all counts.
        recipe_of: the recipe of a specification.
        prepare: called with the specification before a run, in its process.
        step_of: makes a whole training step of a form.
    """

    script: Path
    results: Path
    forms: tuple[str, ...]
    grid: Grid
    steps: int
    seeds: int
    fixed: Mapping[str, Any]
    recipe_of: Callable[[Spec], dict[str, Any]]
    step_of: Callable[[str], Callable[[], object]]
    prepare: Callable[[Spec], None] = lambda spec: None
    choices_of: Callable[[str], Sequence[Spec]] = lambda form: ({},)

    def spec(self, form: str, tuned: Spec, seed: int, steps: int | None = None) -> Spec:
        """One run, as plain values; `tuned` has the rate, `lr`, and a choice."""
        return {**self.fixed, "form": form, **tuned, "seed": seed, "steps": steps or self.steps}

    @property
    def clock_spec(self) -> Spec:
        """What the measurement of the steps is known by."""
        return {**self.fixed, "measure": "seconds of a step", "forms": list(self.forms)}

    def run(self, spec: Spec) -> Line:
        """Train, or measure the steps, in this process."""
        if "measure" not in spec:
            self.prepare(spec)
            return train_line(spec, self.recipe_of(spec))
        began = time.time()
        first = self.forms[0]
        work = {name: self.step_of(name.removesuffix(" again")) for name in (*self.forms, f"{first} again")}
        times = take_turns(work, rounds=15)
        ratios = {name: ratio(own, times[first]) for name, own in times.items()}
        return {"key": key_of(spec), **spec, "times": ratios, **facts(began)}

    def swept(self, lines: Lines, form: str, choice: Spec) -> list[float | None]:
        """The held-out loss of each rate with seed 0."""
        return self.grid.results(lines, lambda rate: self.spec(form, {"lr": rate, **choice}, 0), "eval_loss")

    def best(self, lines: Lines, form: str) -> Spec | None:
        """The rate and choice with the lowest held-out loss; None while a sweep of the form has not ended."""
        found = []
        for choice in self.choices_of(form):
            results = self.swept(lines, form, choice)
            if self.grid.next(results) is not None:
                return None
            rate = self.grid.best(results)
            if rate is not None:
                tuned = {"lr": rate, **choice}
                found.append((lines[key_of(self.spec(form, tuned, 0))]["eval_loss"], tuned))
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def tuned(self, lines: Lines, form: str) -> Spec:
        """The best rate and choice.

        Raises:
            SystemExit: a sweep has not ended, or all of its runs failed.
        """
        tuned = self.best(lines, form)
        if tuned is None:
            raise SystemExit(f"run the sweep of {form} first")
        return tuned

    def steps_in_time(self, lines: Lines, form: str) -> int:
        """Steps of a form in the time that the first one takes for its own."""
        line = lines.get(key_of(self.clock_spec))
        if line is None:
            raise SystemExit("run the phase clock first")
        return round(self.steps / float(line["times"][form]["ratio"]))

    def report(self, lines: Lines) -> None:
        """The sweep; then parameters, the time of a step, the held-out loss at equal steps and at equal time."""
        print(f"held-out nats a token by learning rate, seed 0\n{self.grid.header()}")
        for form in self.forms:
            choices = self.choices_of(form)
            for choice in choices:
                told = "".join(f", {key} {value:.2g}" for key, value in choice.items() if len(choices) > 1)
                print(self.grid.row(form + told, self.swept(lines, form, choice)))
        clock = lines.get(key_of(self.clock_spec))
        for form in self.forms:
            tuned = self.best(lines, form)
            if tuned is None:
                continue
            first = lines[key_of(self.spec(form, tuned, 0))]
            parts = [f"{form:12} {first['num_parameters']:>10,} parameters"]
            if clock is not None:
                parts.append(f"{clock['times'][form]['ratio']:5.2f} of the control's step")
            for label, steps in (("steps", self.steps), ("time", self.steps_in_time(lines, form) if clock else 0)):
                found = [lines.get(key_of(self.spec(form, tuned, seed, steps))) for seed in range(self.seeds)]
                losses = [line["eval_loss"] for line in found if line is not None and line["eval_loss"] is not None]
                if losses:
                    mean, width = interval(losses)
                    parts.append(f"at equal {label} {mean:.4f} ± {width:.4f} ({len(losses)} seeds)")
            print("  ".join(parts))

    def main(self, description: str | None) -> int:
        """The command line."""
        parser = command_line(description, PHASES, self.results)
        options = parser.parse_args()
        if options.phase == "one":
            printed(self.run(json.loads(options.spec)))
            return 0
        ledger = Ledger(options.results, self.script, threads_a_job(1 if options.phase == "clock" else options.jobs))
        lines = ledger.lines()
        if options.phase == "report":
            self.report(lines)
        elif options.phase == "sweep":

            def sweep(pair: tuple[str, Spec]) -> None:
                form, choice = pair
                self.grid.sweep(ledger, lambda rate: self.spec(form, {"lr": rate, **choice}, 0), "eval_loss")

            pairs = [(form, choice) for form in self.forms for choice in self.choices_of(form)]
            side_by_side(options.jobs, sweep, pairs)
        elif options.phase == "clock":
            ledger.run(self.clock_spec)
        else:
            timed = options.phase == "timed"
            runs = [
                self.spec(form, self.tuned(lines, form), seed, self.steps_in_time(lines, form) if timed else None)
                for seed in range(self.seeds)
                for form in self.forms
            ]
            side_by_side(options.jobs, ledger.run, runs)
        return 0


def training_step(model: Any, batch: Mapping[str, Any]) -> Callable[[], object]:
    """Forward, backward and AdamW's update of a transformers model, on one batch."""
    import torch

    import scantling as sc

    optimizer = torch.optim.AdamW(sc.param_groups(model), lr=1e-3, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
