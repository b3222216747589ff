"""Compare dense and TT encoders in masked LM on Python code, at equal steps and at equal wall-clock time.

    python benchmarks/tensor_code.py sweep         one grid of learning rates for each form, one seed
    python benchmarks/tensor_code.py seeds         each at its best rate, 3 seeds, equal steps
    python benchmarks/tensor_code.py clock         step times in turns, as ratios to dense; at width 768, too
    python benchmarks/tensor_code.py timed         as many steps as fit into the time of the dense run, 3 seeds
    python benchmarks/tensor_code.py longer        each in four times the steps, to see if the TT model catches up
    python benchmarks/tensor_code.py report        all of it, from the raw lines alone

CoMERA (arXiv 2405.14377) pre-trains a CodeBERT-like model with 4.23 times fewer parameters and reports half the time.
Here an encoder of width 256 and 4 layers reads the Python standard library. As in optim_tasks.py, it is BERT with
rotary positions, because a model of this size with learned positions hardly learns anything in minutes. The embedding
and the output layer tied to it are dense, with 512 ids. The rival of equal size is a dense model of width 120. The
optimizer is AdamW. For TT layers, two ratios of the cores' rate to that of the run are swept, and for the dense model
two; `tt, gain 10` has a gain of exp(10 g) instead of exp(30 g). All first weights have BERT's standard deviation of
0.02. Scaled to this width, 0.035, they are worse for the dense model: 3.17 instead of 2.95 after 500 steps at a rate of
2e-3. Results are in benchmarks/results/tensor-code.jsonl; no run is repeated. Its lines of `cores` are of TT layers
without a gain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dated import RESULTS
from equal_clock import Comparison, training_step
from resumable import Grid, Spec
from small_models import text

from scantling.tensor import layer

CONFIG = Path(__file__).with_name("bert-rotary.json")
WIDE = {"hidden_size": 256, "embedding_size": 256, "intermediate_size": 1024}
RANKS = {"*attention*": 35, "*.dense": 55}
"""Ranks with 4.24 times fewer parameters in total: 794,216 instead of 3,366,144."""
FULL = {"hidden_size": 768, "embedding_size": 768, "intermediate_size": 3072}
FULL_RANKS = {"*attention*": 100, "*.dense": 150}
"""Ranks with the same factor at the width of CodeBERT, where only step times are measured."""
AT_FULL = ", width 768"
NARROW = {"hidden_size": 120, "embedding_size": 120, "intermediate_size": 480}
LAYERS = {"dense, third": 1 / 3, "tt": 1 / 3, "tt, ninth": 1 / 9, "tt, gain 10": 1 / 3}
"""Learning rate of the layers as a multiple of `lr`, 1 if not given."""
SEQ_LEN, BATCH = 128, 16


def prepare(spec: Spec) -> None:
    if spec["form"] == "tt, gain 10":
        layer.GAIN_RATE = 10.0


def build_recipe(spec: Spec) -> dict[str, Any]:
    form, ratio = spec["form"], LAYERS.get(spec["form"], 1.0)
    is_tt = form.startswith("tt")
    # A dense model's layers have the rate of the run, and its embedding a multiple of it.
    rate, embedding = (spec["lr"], 1.0) if is_tt else (spec["lr"] * ratio, 1.0 / ratio)
    shape = NARROW if form == "narrow" else WIDE
    recipe = {
        "name": "code",
        "model": {"task": "masked-lm", "hf": str(CONFIG), "attention": "eager", "overrides": shape},
        "data": {**text("python"), "tokenizer": {"bpe": 512}, "seq_len": SEQ_LEN},
        "optim": {
            "name": "adamw",
            "betas": [0.9, 0.98],
            "lr": rate,
            "embedding_lr_scale": embedding,
            "weight_decay": 0.0,
        },
        "train": {
            "steps": spec["steps"],
            "batch_size": BATCH,
            "warmup": 0.1,
            "schedule": "linear",
            "eval_samples": 1000,
            "seed": spec["seed"],
            "device": "cpu",
        },
    }
    return {**recipe, "tensor": {"rank": RANKS, "lr_scale": ratio}} if is_tt else recipe


def make_step(form: str) -> Callable[[], object]:
    import torch
    from transformers import AutoModelForMaskedLM, RoFormerConfig

    import scantling as sc

    config = RoFormerConfig.from_json_file(str(CONFIG))
    full = form.endswith(AT_FULL)
    config.update(FULL if full else NARROW if form == "narrow" else WIDE)
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    if form.startswith("tt"):
        sc.tensorize(model, FULL_RANKS if full else RANKS)
    ids = torch.randint(config.vocab_size, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    return training_step(model, {"input_ids": ids, "labels": ids})


COMPARISON = Comparison(
    script=Path(__file__),
    results=RESULTS / "tensor-code.jsonl",
    forms=("dense", "tt", "narrow"),
    grid=Grid([0.125e-3, 0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3], start=4),
    steps=500,
    seeds=range(1, 4),
    fixed={"text": "python", "ranks": RANKS, "model": WIDE, "batch": BATCH},
    build_recipe=build_recipe,
    prepare=prepare,
    make_step=make_step,
    longer=2000,
    tried=("tt, ninth", "tt, gain 10", "dense, third"),
    clocked=(f"dense{AT_FULL}", f"tt{AT_FULL}"),
)

if __name__ == "__main__":
    sys.exit(COMPARISON.main(__doc__))
