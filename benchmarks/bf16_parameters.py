"""Compare the loss of weights stored in bf16 with that of fp32 weights, on English novels.

    python benchmarks/bf16_parameters.py run                all runs that have no line yet; stop it at any time
    python benchmarks/bf16_parameters.py report             the differences, from the raw lines alone

A Llama of half a million parameters learns with CAME at a rate from optim_quality.py. Products are in bf16 in all
runs. `fp32` is the control: weights and gradients in fp32, multiplied in bf16. The other runs store weight matrices and
embeddings in bf16 alone, with gradients in bf16: rounded stochastically or with the error kept, over micro-batches, or
with each gradient freed in the backward pass, whose control has no gradient clipping, too. Runs of one seed have the
same initial weights and data. Each run is one line of benchmarks/results/bf16-parameters.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dated import RESULTS
from optim_quality import BATCH, MODEL, SEQ_LEN
from resumable import Ledger, Line, Spec, command_line, interval, side_by_side, spec_key, threads_a_job
from small_models import OPTIMIZERS, printed, text, train_line

LR = 4e-3
"""The best rate of CAME on a quarter of the tokens of optim_quality.py."""
TOKENS = 1_000_000
SEEDS = range(5)
BF16 = {"parameters": "bf16", "rounding": "stochastic"}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "fp32": {"precision": {"compute": "bf16"}},
    "stochastic": {"precision": BF16},
    "compensated": {"precision": {**BF16, "rounding": "compensated"}},
    "stochastic, 8 micro-batches": {"precision": BF16, "train": {"micro_batch_size": BATCH // 8}},
    "fp32 without clipping": {"precision": {"compute": "bf16"}, "train": {"clip": None}},
    "stochastic, released": {"precision": BF16, "optim": {"release_gradients": True}, "train": {"clip": None}},
}
CONTROLS = {"stochastic, released": "fp32 without clipping"}
"""Control of each run; `fp32` if it is not given here."""


def run_spec(name: str, seed: int, tokens: int = TOKENS) -> Spec:
    """Return one run as plain values; their hash decides whether it has already been run."""
    return {"run": name, **RUNS[name], "lr": LR, "seed": seed, "tokens": tokens}


def build_recipe(spec: Spec) -> dict[str, Any]:
    """Return the recipe of a run."""
    own = {name: spec.get(name, {}) for name in ("precision", "optim", "train")}
    train = {"steps": spec["tokens"] // (BATCH * SEQ_LEN), "batch_size": BATCH, "eval_samples": 512, "device": "cpu"}
    return {
        "name": "bf16-parameters",
        "model": {"preset": "llama-1m", "overrides": MODEL},
        "data": {**text("novels"), "tokenizer": {"bpe": 512}, "seq_len": SEQ_LEN},
        "optim": {"weight_decay": 0.1, **OPTIMIZERS["came"], "lr": spec["lr"], **own["optim"]},
        "precision": own["precision"],
        "train": {**train, "seed": spec["seed"], **own["train"]},
    }


def report(lines: dict[str, Line]) -> None:
    """Print the held-out loss of each run, and its difference to its control, paired by seed."""
    losses = {
        name: {seed: lines[key]["eval_loss"] for seed in SEEDS if (key := spec_key(run_spec(name, seed))) in lines}
        for name in RUNS
    }
    print(f"{'weights':30}{'held-out loss':>15}   minus its control, nats")
    for name, own in losses.items():
        if not own:
            continue
        control = losses[CONTROLS.get(name, "fp32")]
        differences = [own[seed] - control[seed] for seed in own if seed in control]
        row = f"{name:30}{sum(own.values()) / len(own):15.4f}   "
        if differences and control is not own:
            mean, width = interval(differences)
            row += f"{mean:+.4f} ± {width:.4f} ({len(differences)} seeds)"
        print(row)


def main() -> int:
    options = command_line(__doc__, ["run", "report"], RESULTS / "bf16-parameters.jsonl").parse_args()
    if options.phase == "one":
        spec = json.loads(options.spec)
        printed(train_line(spec, build_recipe(spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    if options.phase == "report":
        report(ledger.lines())
    else:
        side_by_side(options.jobs, ledger.run, [run_spec(name, seed) for name in RUNS for seed in SEEDS])
    return 0


if __name__ == "__main__":
    sys.exit(main())
