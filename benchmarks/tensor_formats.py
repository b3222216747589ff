"""Formats of a weight at equal parameters and at equal wall clock: a causal LM on English novels.

    python benchmarks/tensor_formats.py sweep      one grid of learning rates for every format, one seed; its factors
                                                   at a third of the rate and at all of it
    python benchmarks/tensor_formats.py seeds      each format at its best, 3 seeds, equal steps
    python benchmarks/tensor_formats.py clock      what a step takes, all formats in turns, as a ratio to dense
    python benchmarks/tensor_formats.py timed      as many steps as fit into the time that dense takes, 3 seeds
    python benchmarks/tensor_formats.py report     all of it, from the raw lines alone

A decoder of width 256 and 4 layers whose linear layers have a quarter of the dense numbers in every format, as near as
whole ranks come. A weight moves by what all of its factors move, so that each format is swept with its factors at a
third of the rate, too; the better one counts. Embedding and output layer are dense. `dense small` is a dense decoder
with as many parameters in all, of width 140. AdamW for all; results in benchmarks/results/tensor-formats.jsonl, where
no run is made twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dated import RESULTS
from equal_clock import Comparison, training_step
from formats import Format, register
from resumable import Grid, Spec
from small_models import text

SHARE = 0.25
SCALES = (1 / 3, 1.0)
"""Shares of the rate that factors may learn at; the better one counts for each format."""
VOCABULARY, SEQ_LEN, BATCH = 1024, 128, 32
DENSE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
SMALL = {**DENSE, "hidden_size": 140, "intermediate_size": 280, "num_attention_heads": 5, "num_key_value_heads": 5}


def recipe_of(spec: Spec) -> dict[str, Any]:
    return {
        "name": "formats",
        "model": {"preset": "llama-1m", "overrides": SMALL if spec["form"] == "dense small" else DENSE},
        "data": {**text("novels"), "tokenizer": {"bpe": VOCABULARY}, "seq_len": SEQ_LEN},
        "optim": {"name": "adamw", "betas": [0.9, 0.95], "lr": spec["lr"], "weight_decay": 0.1},
        "train": {
            "steps": spec["steps"],
            "batch_size": BATCH,
            "warmup": 0.05,
            "eval_samples": 1000,
            "seed": spec["seed"],
            "device": "cpu",
        },
    }


def prepare(spec: Spec) -> None:
    if not spec["form"].startswith("dense"):
        register(spec["form"], spec["share"], spec["lr_scale"] * spec["lr"])


def step_of(form: str) -> Callable[[], object]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **(SMALL if form == "dense small" else DENSE)))
    if not form.startswith("dense"):
        Format(form, SHARE).prepare(model)
    ids = torch.randint(VOCABULARY, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    return training_step(model, {"input_ids": ids, "labels": ids})


COMPARISON = Comparison(
    script=Path(__file__),
    results=RESULTS / "tensor-formats.jsonl",
    forms=("dense", "dense small", "tt", "low rank", "cola", "btt"),
    grid=Grid([0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3], start=2),
    steps=300,
    seeds=3,
    fixed={"text": "novels", "share": SHARE},
    recipe_of=recipe_of,
    prepare=prepare,
    step_of=step_of,
    choices_of=lambda form: [{"lr_scale": scale} for scale in (SCALES[:1] if form.startswith("dense") else SCALES)],
)

if __name__ == "__main__":
    sys.exit(COMPARISON.main(__doc__))
