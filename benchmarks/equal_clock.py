"""Compare several forms of one model at equal steps and at equal wall-clock time.

A script that defines a comparison has these phases on its command line:

    sweep      one grid of learning rates for every form, seed 0
    seeds      each form at its best, the same data order, seeds from 1 on, equal steps
    clock      step time of all forms, in turns (`interleaved.py`), as a ratio to the first form
    timed      as many steps as fit into the time that the first form takes for a run
    longer     each form in more steps, if the comparison sets a number, at the same rates and seeds
    report     all of it, from the raw lines alone

The clock uses as many threads as a run. It is refused, and must be measured again, if other work disturbed it. Each run
is one line of results, as in `resumable.py`; no run is repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interleaved import disturbed, ratio, take_turns
from resumable import Grid, Ledger, Line, Spec, command_line, interval, side_by_side, spec_key, threads_a_job
from small_models import printed, run_facts, train_line

Lines = dict[str, Line]
PHASES = ["sweep", "seeds", "clock", "timed", "longer", "report"]


@dataclass(frozen=True)
class Comparison:
    """Definition of a comparison.

    Attributes:
        script: the script whose command line this is.
        results: the file of result lines.
        forms: names of the forms; the first one is the control.
        grid: learning rates.
        steps: length of a run.
        seeds: seeds of the compared runs; the sweep has seed 0.
        fixed: further constant keys of a run's specification, next to form, rate, seed and steps.
        build_recipe: returns the recipe of a specification.
        prepare: called with the specification before a run, in its process.
        make_step: returns a callable that runs one whole training step of a form.
        longer: steps of the phase `longer`.
        tried: further forms that are only swept, to check that the first one is at its best.
        clocked: further forms whose step time is measured without training them; the first one is their control.
    """

    script: Path
    results: Path
    forms: tuple[str, ...]
    grid: Grid
    steps: int
    seeds: range
    fixed: Mapping[str, Any]
    build_recipe: Callable[[Spec], dict[str, Any]]
    make_step: Callable[[str], Callable[[], object]]
    prepare: Callable[[Spec], None] = lambda spec: None
    longer: int | None = None
    tried: tuple[str, ...] = ()
    clocked: tuple[str, ...] = ()

    def spec(self, form: str, rate: float, seed: int, steps: int | None = None) -> Spec:
        """Return the specification of one run, as plain values."""
        return {
            **self.fixed,
            "form": form,
            "lr": rate,
            "seed": seed,
            "steps": self.steps if steps is None else steps,
        }

    def clock_spec(self, forms: Sequence[str] | None = None) -> Spec:
        """Return the specification of a step-time measurement of some forms; of the trained forms by default."""
        return {**self.fixed, "measure": "seconds of a step", "forms": list(forms or self.forms)}

    def run(self, spec: Spec) -> Line:
        """Train or measure the step times, in this process."""
        if "measure" not in spec:
            self.prepare(spec)
            return train_line(spec, self.build_recipe(spec))
        began = time.time()
        first = spec["forms"][0]
        work = {name: self.make_step(name.removesuffix(" again")) for name in (*spec["forms"], f"{first} again")}
        times = take_turns(work, rounds=30)
        ratios = {name: ratio(own, times[first]) for name, own in times.items()}
        if (refused := disturbed(ratios[f"{first} again"])) is not None:
            raise SystemExit(refused)
        return {"key": spec_key(spec), **spec, "times": ratios, **run_facts(began)}

    def swept(self, lines: Lines, form: str) -> list[float | None]:
        """Return the held-out loss of each learning rate with seed 0."""
        return self.grid.results(lines, lambda rate: self.spec(form, rate, 0), "eval_loss")

    def tuned(self, lines: Lines, form: str) -> float:
        """Return the best learning rate.

        Raises:
            SystemExit: the sweep has not ended, or all of its runs failed.
        """
        rate = self.grid.best(self.swept(lines, form))
        if rate is None:
            raise SystemExit(f"run the sweep of {form} first")
        return rate

    def steps_in_time(self, lines: Lines, form: str) -> int:
        """Return the number of steps that a form takes in the time of the first form's run."""
        line = lines.get(spec_key(self.clock_spec()))
        if line is None:
            raise SystemExit("run the phase clock first")
        return round(self.steps / float(line["times"][form]["ratio"]))

    def report(self, lines: Lines) -> None:
        """Print the sweep, then parameters, step times, and the held-out loss at equal steps and at equal time."""
        print(f"held-out nats a token by learning rate, seed 0\n{self.grid.header()}")
        for form in (*self.forms, *self.tried):
            print(self.grid.row(form, self.swept(lines, form)))
        clock = lines.get(spec_key(self.clock_spec()))
        rates = {form: self.grid.best(self.swept(lines, form)) for form in self.forms}
        first, numbers = self.forms[0], None
        equal = self._runs(lines, first, rates[first], self.steps)
        for form, rate in rates.items():
            if rate is None:
                continue
            own = lines[spec_key(self.spec(form, rate, 0))]["num_parameters"]
            numbers = numbers or own
            parts = [f"{form:12} {own:>10,} parameters, {numbers / own:.2f} times fewer"]
            budgets = {"steps": self.steps}
            if self.longer is not None:
                budgets[f"{self.longer} steps"] = self.longer
            if clock is not None:
                parts.append(f"{clock['times'][form]['ratio']:5.2f} of the control's step")
                budgets["time"] = self.steps_in_time(lines, form)
            for label, steps in budgets.items():
                found = self._runs(lines, form, rate, steps)
                control = self._runs(lines, first, rates[first], steps) if steps == self.longer else equal
                if found:
                    mean, width = interval([*found.values()])
                    parts.append(f"at equal {label} {mean:.4f} ± {width:.4f} ({len(found)} seeds)")
                    pairs = [loss - control[seed] for seed, loss in found.items() if seed in control]
                    if form != first and pairs:
                        parts[-1] += ", minus the control {:+.4f} ± {:.4f}".format(*interval(pairs))
            print("  ".join(parts))
        alone = lines.get(spec_key(self.clock_spec(self.clocked)))
        if self.clocked and alone is not None:
            ratios = (f"{form} {alone['times'][form]['ratio']:.2f}" for form in self.clocked)
            print(f"{', '.join(ratios)}: time of a step")

    def _runs(self, lines: Lines, form: str, rate: float | None, steps: int) -> dict[int, float]:
        """Return the held-out loss of each seed that was run."""
        if rate is None:
            return {}
        found = {seed: lines.get(spec_key(self.spec(form, rate, seed, steps))) for seed in self.seeds}
        return {s: line["eval_loss"] for s, line in found.items() if line is not None and line["eval_loss"] is not None}

    def main(self, description: str | None) -> int:
        """Run the command line."""
        parser = command_line(description, PHASES, self.results)
        options = parser.parse_args()
        if options.phase == "one":
            printed(self.run(json.loads(options.spec)))
            return 0
        ledger = Ledger(options.results, self.script, threads_a_job(options.jobs))
        lines = ledger.lines()
        if options.phase == "report":
            self.report(lines)
        elif options.phase == "sweep":
            side_by_side(
                options.jobs,
                lambda form: self.grid.sweep(ledger, lambda rate: self.spec(form, rate, 0), "eval_loss"),
                (*self.forms, *self.tried),
            )
        elif options.phase == "clock":
            for forms in filter(None, (self.forms, self.clocked)):
                if not ledger.run(self.clock_spec(forms)):
                    return 1
        else:
            if options.phase == "longer" and self.longer is None:
                raise SystemExit("this comparison has no longer runs")
            time_steps: dict[str, Callable[[str], int | None]] = {
                "seeds": lambda form: self.steps,
                "timed": lambda form: self.steps_in_time(lines, form),
                "longer": lambda form: self.longer,
            }
            runs = [
                self.spec(form, self.tuned(lines, form), seed, time_steps[options.phase](form))
                for seed in self.seeds
                for form in self.forms
            ]
            side_by_side(options.jobs, ledger.run, runs)
        return 0


def training_step(model: Any, batch: Mapping[str, Any]) -> Callable[[], object]:
    """Return a callable that runs forward, backward and AdamW's update of a transformers model on one batch."""
    import torch

    import scantling as sc

    optimizer = torch.optim.AdamW(sc.param_groups(model), lr=1e-3, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
