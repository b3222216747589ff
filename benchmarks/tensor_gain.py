"""Compare gains of TT layers, exp(rate g) with one trainable g per layer, on two small models.

    python benchmarks/tensor_gain.py sweep       learning rates of each gain and model, one seed
    python benchmarks/tensor_gain.py seeds       each at its best rate, three more seeds
    python benchmarks/tensor_gain.py report      both tables, from the raw lines alone

The models have first weights with BERT's standard deviation of 0.02, which is small for their widths; with larger ones
the gain makes little difference (`intent_accuracy.py variants`). `tensor_code.py` has a third model.

    demo         the decoder of recipes/demo-lean.yaml: width 256, CAME, 200 steps
    banking77    the classifier of intent_accuracy.py of size `tiny`: width 64, AdamW, 1,000 steps

A gain of 0 is fixed at 1. Results are lines of benchmarks/results/tensor-gain.jsonl; no run is repeated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import intent_accuracy
from dated import RESULTS
from resumable import Grid, Ledger, Line, Spec, command_line, interval, side_by_side, spec_key, threads_a_job
from small_models import ROOT, printed, train_line

from scantling.tensor import layer
from scantling.trainer.recipe.loading import load_recipe

GAINS = (30.0, 10.0, 0.0)
RATES = [0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]
GRIDS = {"demo": Grid(RATES, start=2), "banking77": Grid(RATES, start=5)}
SEEDS = (1, 2, 3)
TINY = {
    "data": "banking77",
    "dev": True,
    "steps": 1000,
    "init_std": 0.02,
    "layers_ratio": 1 / 9,
    "embedding_ratio": 1.0,
}


def make_spec(model: str, gain: float, lr: float, seed: int) -> Spec:
    return {"model": model, "gain": gain, "lr": lr, "seed": seed}


def run(spec: Spec) -> Line:
    """Train one model in this process."""
    layer.GAIN_RATE = spec["gain"]
    if spec["model"] == "banking77":
        rest = {"lr": spec["lr"], "seed": spec["seed"]}
        line = intent_accuracy.run_training(intent_accuracy.make_spec(intent_accuracy.TT, rest, "tiny", **TINY))
        return {**line, "key": spec_key(spec), **spec}
    recipe = load_recipe(ROOT / "recipes" / "demo-lean.yaml").model_dump(exclude_unset=True)
    recipe["optim"]["lr"] = spec["lr"]
    recipe["train"] |= {"seed": spec["seed"], "device": "cpu"}
    return train_line(spec, recipe)


def swept(lines: dict[str, Line], model: str, gain: float) -> list[float | None]:
    return GRIDS[model].results(lines, lambda lr: make_spec(model, gain, lr, 0), "eval_loss")


def report(lines: dict[str, Line]) -> None:
    """Print the sweep, then losses of all seeds and their differences to the largest gain."""
    for model, grid in GRIDS.items():
        print(f"{model}: held-out loss by learning rate, seed 0\n{grid.header()}")
        control: dict[int, float] = {}
        rows = []
        for gain in GAINS:
            results = swept(lines, model, gain)
            print(grid.row(f"gain {gain:g}", results))
            lr = grid.best(results)
            if lr is None:
                continue
            found = {seed: lines.get(spec_key(make_spec(model, gain, lr, seed))) for seed in SEEDS}
            losses = {seed: line["eval_loss"] for seed, line in found.items() if line and line["eval_loss"] is not None}
            control = control or losses
            if losses:
                row = f"gain {gain:<4g} rate {lr:g}: {interval([*losses.values()])[0]:.3f} ({len(losses)} seeds)"
                pairs = [loss - control[seed] for seed, loss in losses.items() if seed in control]
                rows.append(row + (", {:+.3f} ± {:.3f}".format(*interval(pairs)) if pairs else ""))
        print(*rows, sep="\n")


def main() -> int:
    parser = command_line(__doc__, ("sweep", "seeds", "report"), RESULTS / "tensor-gain.jsonl")
    parser.add_argument("--only", nargs="+", choices=[*GRIDS], default=[*GRIDS], help="models")
    options = parser.parse_args()
    if options.phase == "one":
        printed(run(json.loads(options.spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    items = [(model, gain) for model in options.only for gain in GAINS]

    def sweep(item: tuple[str, float]) -> None:
        model, gain = item
        GRIDS[model].sweep(ledger, lambda lr: make_spec(model, gain, lr, 0), "eval_loss")

    def seeds(item: tuple[str, float]) -> None:
        lr = GRIDS[item[0]].best(swept(ledger.lines(), *item))
        for seed in SEEDS if lr is not None else ():
            ledger.run(make_spec(*item, lr, seed))

    if options.phase == "report":
        report(ledger.lines())
    else:
        side_by_side(options.jobs, sweep if options.phase == "sweep" else seeds, items)
    return 0


if __name__ == "__main__":
    sys.exit(main())
