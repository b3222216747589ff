"""Compare the loss of weights stored in bf16 with that of fp32 weights, on English novels.

    python benchmarks/bf16_parameters.py start              the model that the runs continue, in build/
    python benchmarks/bf16_parameters.py run                all runs that have no line yet; stop it at any time
    python benchmarks/bf16_parameters.py scratch            the same from random weights, fp32 and stochastic alone
    python benchmarks/bf16_parameters.py report             the differences, from the raw lines alone

A Llama of half a million parameters learns with CAME at a rate from optim_quality.py on 2 million tokens, with weights
in fp32. Each run continues it on half a million tokens in another order, at a quarter of the rate. From random weights,
the step at which the loss begins to fall differs between runs by more than the formats do. Products are in bf16 in all
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
from small_models import OPTIMIZERS, ROOT, printed, text, train_line

LR = 4e-3
"""The best rate of CAME on a quarter of the tokens of optim_quality.py."""
TOKENS = 1_000_000
"""Of a run from random weights."""
START = {"lr": LR, "seed": 100, "tokens": 2_000_000}
START_MODEL = ROOT / "build" / "bf16-start"
CONTINUED = {"start": START, "lr": LR / 4, "tokens": 500_000}
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


def run_spec(name: str, seed: int, *, is_scratch: bool = False) -> Spec:
    """Return one run as plain values; their hash decides whether it has already been run."""
    length = {"lr": LR, "tokens": TOKENS} if is_scratch else CONTINUED
    return {"run": name, **RUNS[name], "seed": seed, **length}


def build_recipe(spec: Spec) -> dict[str, Any]:
    """Return the recipe of a run."""
    own = {name: spec.get(name, {}) for name in ("precision", "optim", "train")}
    train = {"steps": spec["tokens"] // (BATCH * SEQ_LEN), "batch_size": BATCH, "eval_samples": 512, "device": "cpu"}
    model = {"hf": str(START_MODEL)} if "start" in spec else {"preset": "llama-1m", "overrides": MODEL}
    return {
        "name": "bf16-parameters",
        "model": model,
        "data": {**text("novels"), "tokenizer": {"bpe": 512}, "seq_len": SEQ_LEN},
        "optim": {"weight_decay": 0.1, **OPTIMIZERS["came"], "lr": spec["lr"], **own["optim"]},
        "precision": own["precision"],
        "train": {**train, "seed": spec["seed"], **own["train"]},
    }


def train_start() -> None:
    """Train the model that the runs continue, and write it as a model folder."""
    from small_models import register

    import scantling as sc
    from scantling.trainer.training.trained_run import export_hf

    register()
    run_dir = START_MODEL.with_name("bf16-start-run")
    result = sc.train(build_recipe({"precision": {"compute": "bf16"}, **START}), run_dir=run_dir, force=True)
    export_hf(run_dir, START_MODEL)
    print(f"{START_MODEL}: held-out loss {result.metrics['eval_loss']:.4f}")


def report(lines: dict[str, Line], *, is_scratch: bool) -> None:
    """Print the held-out loss of each run, and its difference to its control, paired by seed."""
    losses: dict[str, dict[int, float]] = {}
    for name in RUNS:
        keys = {seed: spec_key(run_spec(name, seed, is_scratch=is_scratch)) for seed in SEEDS}
        losses[name] = {seed: lines[key]["eval_loss"] for seed, key in keys.items() if key in lines}
    print(f"{'from random weights' if is_scratch else 'continued':30}{'held-out loss':>15}   minus its control, nats")
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
    phases = ["start", "run", "scratch", "report"]
    options = command_line(__doc__, phases, RESULTS / "bf16-parameters.jsonl").parse_args()
    if options.phase == "one":
        spec = json.loads(options.spec)
        printed(train_line(spec, build_recipe(spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    if options.phase == "report":
        for is_scratch in (False, True):
            report(ledger.lines(), is_scratch=is_scratch)
    elif options.phase == "start":
        train_start()
    elif options.phase == "scratch":
        names = ("fp32", "stochastic")
        side_by_side(options.jobs, ledger.run, [run_spec(name, s, is_scratch=True) for name in names for s in SEEDS])
    else:
        side_by_side(options.jobs, ledger.run, [run_spec(name, seed) for name in RUNS for seed in SEEDS])
    return 0


if __name__ == "__main__":
    sys.exit(main())
