"""Compare weight formats at equal parameters and at equal wall-clock time, in a causal LM on English novels.

    python benchmarks/tensor_formats.py sweep      one grid of learning rates for every format, one seed
    python benchmarks/tensor_formats.py seeds      each format at its best, 3 seeds, equal steps
    python benchmarks/tensor_formats.py clock      step times of all formats in turns, as ratios to dense
    python benchmarks/tensor_formats.py timed      as many steps as fit into the time of the dense run, 3 seeds
    python benchmarks/tensor_formats.py report     all of it, from the raw lines alone

The model is a decoder of width 256 and 4 layers. In every format, its linear layers have a quarter of the dense
parameters, as close as integer ranks allow. The sweep varies the learning rate of the replaced layers, because formats
differ in the rate they tolerate. The embedding, tied to the output layer, learns at the same rate in all of them.
`dense small` is a dense decoder of width 140 with the same total number of parameters. All use AdamW without weight
decay, because decaying each of several factors decays their product more. Results are in
benchmarks/results/tensor-formats.jsonl; no run is repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dated import RESULTS
from equal_clock import Comparison, training_step
from formats import register, replace_linears
from resumable import Grid, Spec
from small_models import text

SHARE = 0.25
EMBEDDING_RATE = 4e-3
VOCABULARY, SEQ_LEN, BATCH = 1024, 128, 16
DENSE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
SMALL = {**DENSE, "hidden_size": 140, "intermediate_size": 280, "num_attention_heads": 5, "num_key_value_heads": 5}


def build_recipe(spec: Spec) -> dict[str, Any]:
    rate = spec["lr"] if spec["form"].startswith("dense") else EMBEDDING_RATE
    return {
        "name": "formats",
        "model": {"preset": "llama-1m", "overrides": SMALL if spec["form"] == "dense small" else DENSE},
        "data": {**text("novels"), "tokenizer": {"bpe": VOCABULARY}, "seq_len": SEQ_LEN},
        "optim": {
            "name": "adamw",
            "betas": [0.9, 0.95],
            "lr": rate,
            "embedding_lr_scale": EMBEDDING_RATE / rate,
            "weight_decay": 0.0,
        },
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
        register(spec["form"], spec["share"], spec["lr"])


def make_step(form: str) -> Callable[[], object]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **(SMALL if form == "dense small" else DENSE)))
    if not form.startswith("dense"):
        replace_linears(model, form, SHARE)
    ids = torch.randint(VOCABULARY, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    return training_step(model, {"input_ids": ids, "labels": ids})


COMPARISON = Comparison(
    script=Path(__file__),
    results=RESULTS / "tensor-formats.jsonl",
    forms=("dense", "dense small", "tt", "tt silu", "low rank", "cola", "btt"),
    grid=Grid([62.5e-6 * 2**power for power in range(9)], start=3),
    steps=300,
    seeds=range(1, 4),
    fixed={"text": "novels", "share": SHARE, "embedding_rate": EMBEDDING_RATE, "model": DENSE, "batch": BATCH},
    build_recipe=build_recipe,
    prepare=prepare,
    make_step=make_step,
)

if __name__ == "__main__":
    sys.exit(COMPARISON.main(__doc__))
