"""Measure how many steps CAME needs to reach Adafactor's final loss, in small masked LM (BERT) and span corruption
(T5).

    python benchmarks/optim_tasks.py sweep              one grid of learning rates for each optimizer, one seed
    python benchmarks/optim_tasks.py seeds              each at its best rate, seeds 0, 1 and 2
    python benchmarks/optim_tasks.py report             steps to reach, from the raw lines alone

CAME's authors (arXiv 2307.02047) train BERT-Large and T5 and report that CAME reaches Adafactor's final loss after
about half of the steps. Their Adafactor has a momentum, and so has the one here, which comes from transformers. Models
of half a million parameters learn from real text, with a held-out evaluation at 20 points of a run; between points the
loss is interpolated linearly. All runs of a model have the same length, schedule and data order. So, as in the paper,
an optimizer reaches the target at a higher point of the learning-rate schedule than Adafactor. There is no dropout,
because no text is seen twice.

T5 initializes embeddings with a scale of 1 and matrices with a scale of 0.1 or less. This suits Adafactor, whose steps
are relative to a parameter's RMS. The rows with `-embeddings` give embeddings 16 times the learning rate, about the
ratio of these scales.

The encoder is BERT with rotary positions (RoFormer, arXiv 2104.09864). With BERT's own learned positions, a model of
this size hardly learns more than token frequencies in a run of minutes: 14 % of masked tokens are right after 4 million
tokens, compared with 31 % after 1 million with rotary positions. So there is little to compare. `--model bert` runs it
anyway; without `--model`, `bert-rotary` and `t5` run. Each run is one line of benchmarks/results/optim-tasks.jsonl; no
run is repeated.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dated import RESULTS
from resumable import (
    Grid,
    Ledger,
    Line,
    Spec,
    command_line,
    interval,
    side_by_side,
    spec_key,
    steps_to_reach,
    threads_a_job,
)
from small_models import OPTIMIZERS, printed, text, train_line

BERT = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
T5 = {"d_model": 96, "d_ff": 320, "d_kv": 24, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0}


@dataclass(frozen=True)
class Setting:
    """A model, and the settings that all of its runs share.

    Attributes:
        model: the recipe's model section.
        seq_len: tokens in a sequence; a batch has 16 sequences.
        tokens: tokens of a run, for three to four minutes on one thread.
        compared: the compared optimizers.
    """

    model: dict[str, Any]
    seq_len: int
    tokens: int
    compared: tuple[str, ...] = ("adafactor-momentum", "adamw", "came-reference", "came", "plain")


EMBEDDINGS = ("adamw-embeddings", "came-embeddings", "plain-embeddings")
SETTINGS = {
    "bert-rotary": Setting(
        {"task": "masked-lm", "hf": str(Path(__file__).with_name("bert-rotary.json")), "attention": "eager"},
        64,
        1_500_000,
    ),
    "t5": Setting({"preset": "t5-small", "overrides": T5}, 128, 2_000_000, Setting.compared + EMBEDDINGS),
    "bert": Setting({"preset": "bert-6-encoder", "overrides": BERT}, 64, 2_000_000),
}
BATCH, POINTS = 16, 20
GRID = Grid([0.125e-3 * 2**power for power in range(13)], start=5)
TARGETS = ("adafactor-momentum", "adamw")
SEEDS = (0, 1, 2)


def run_spec(model: str, optimizer: str, lr: float, seed: int, *, data: str, tokens: int | None = None) -> Spec:
    """Return one run as plain values; their hash decides whether it has already been run."""
    optim = {"weight_decay": 0.01, **OPTIMIZERS[optimizer], "lr": lr}
    tokens = tokens or SETTINGS[model].tokens
    return {"model": model, "data": data, "optimizer": optimizer, "optim": optim, "seed": seed, "tokens": tokens}


def build_recipe(spec: Spec) -> dict[str, Any]:
    setting = SETTINGS[spec["model"]]
    steps = spec["tokens"] // (BATCH * setting.seq_len)
    return {
        "name": "tasks",
        "model": setting.model,
        "data": {**text(spec["data"]), "tokenizer": {"bpe": 512}, "seq_len": setting.seq_len},
        "optim": spec["optim"],
        "train": {
            "steps": steps,
            "batch_size": BATCH,
            "warmup": 0.05,
            "eval_every": max(1, steps // POINTS),
            "eval_samples": 512,
            "seed": spec["seed"],
            "device": "cpu",
        },
    }


class Comparison:
    """The runs of one model on one text with one budget."""

    def __init__(self, model: str, data: str, tokens: int | None) -> None:
        self.model, self.data, self.tokens = model, data, tokens or SETTINGS[model].tokens
        self.compared = SETTINGS[model].compared

    def spec(self, optimizer: str, lr: float, seed: int) -> Spec:
        return run_spec(self.model, optimizer, lr, seed, data=self.data, tokens=self.tokens)

    def sweep_results(self, lines: dict[str, Line], optimizer: str) -> list[float | None]:
        """Return the last held-out loss of each learning rate with seed 0."""
        return GRID.results(lines, lambda rate: self.spec(optimizer, rate, 0), "eval_loss")

    def sweep(self, ledger: Ledger, optimizer: str) -> None:
        GRID.sweep(ledger, lambda rate: self.spec(optimizer, rate, 0), "eval_loss")

    def finalists(self, lines: dict[str, Line], seed: int) -> dict[str, Spec]:
        """Yield the run at the best rate of each optimizer whose sweep has ended."""
        rates = {name: GRID.best(self.sweep_results(lines, name)) for name in self.compared}
        return {name: self.spec(name, rate, seed) for name, rate in rates.items() if rate is not None}

    def report(self, lines: dict[str, Line]) -> None:
        print(f"\n{self.model}, {self.data}, {self.tokens / 1e6:g} M tokens: last held-out loss by rate, seed 0")
        print(GRID.header())
        for name in self.compared:
            print(GRID.row(name, self.sweep_results(lines, name)))
        by_seed = []
        for seed in SEEDS:
            runs = {name: lines.get(spec_key(spec)) for name, spec in self.finalists(lines, seed).items()}
            by_seed.append({n: line for n, line in runs.items() if line is not None and line["eval_loss"] is not None})
        for measure, sign in (("heldout", 1.0), ("accuracy", -1.0)):
            for target in TARGETS:
                for name in self.compared:
                    self._shares(by_seed, name, target, measure, sign)

    def _shares(self, by_seed: list[dict[str, Line]], name: str, target: str, measure: str, sign: float) -> None:
        """Print the share of its steps that `name` needs to reach the final loss of `target`, and both final losses."""
        shares, texts = [], []
        for runs in by_seed:
            if name == target or not all(measure in runs.get(each, {}) for each in (name, target)):
                continue
            goal, final = runs[target][measure][-1][1], runs[name][measure][-1][1]
            falling = [(step, sign * value) for step, value in runs[name][measure]]
            reached = steps_to_reach(falling, sign * goal)
            share = None if reached is None else reached / falling[-1][0]
            texts.append(f"{'never' if share is None else f'{share:.2f}'} ({final:.4f}, {goal:.4f})")
            shares.append(share)
        if not texts:
            return
        known = [share for share in shares if share is not None]
        mean = ""
        if len(known) == len(shares) > 1:
            value, width = interval(known)
            mean = f"   mean {value:.3f} ± {width:.3f}"
        what = "loss" if measure == "heldout" else measure
        print(f"{name:16} reaches {target}'s last {what} after: " + "  ".join(texts) + mean)


def main() -> int:
    parser = command_line(__doc__, ["sweep", "seeds", "report"], RESULTS / "optim-tasks.jsonl")
    parser.add_argument("--model", choices=list(SETTINGS), action="append", help="bert-rotary and t5 unless given")
    parser.add_argument("--data", choices=["python", "novels"], default="python")
    parser.add_argument("--tokens", type=int, help="tokens of a run")
    options = parser.parse_args()
    if options.phase == "one":
        spec = json.loads(options.spec)
        printed(train_line(spec, build_recipe(spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    comparisons = [Comparison(model, options.data, options.tokens) for model in options.model or ("bert-rotary", "t5")]
    if options.phase == "report":
        for comparison in comparisons:
            comparison.report(ledger.lines())
    elif options.phase == "sweep":
        pairs = [(comparison, name) for comparison in comparisons for name in comparison.compared]
        side_by_side(options.jobs, lambda pair: pair[0].sweep(ledger, pair[1]), pairs)
    else:
        lines = ledger.lines()
        runs = [spec for each in comparisons for seed in SEEDS for spec in each.finalists(lines, seed).values()]
        if not runs:
            raise SystemExit("run the sweep first")
        side_by_side(options.jobs, ledger.run, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
