"""Compute the bytes of an exchange for the shapes of a 1.35B Llama, by the channel of its embeddings.

    python benchmarks/comm_bytes.py

Embedding and head are apart, with 32,000 or 128,000 rows. `dense` sends both in full; `sparse gradients`, the default,
sends the largest elements of their blocks. The baseline is a ring all-reduce of 16-bit gradients. No model is trained;
`comm_quality.py settings` measures the loss of both channels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from comm_methods import KEPT_TOPK, LOCAL_TOPK, SIGNS_EVERY, channels
from dated import dated, write
from optim_gpu import SIZES

import scantling as sc
from scantling.comm import allreduce_wire_bytes
from scantling.comm.local_steps import outer_exchange

ROWS = (32_000, 128_000)
REPLICAS = (2, 8)
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "topk 8, signs": {"topk": 8, "values": "sign", "dense": "sign"},
}
LOCAL = {"values": "sign", "dense": "sign"}
LOCAL_STEPS = {
    f"{every} local steps, topk {topk}, signs": (every, topk)
    for every, topk in ((5, LOCAL_TOPK["all_gather"]), *KEPT_TOPK.items(), (20, 4096), (SIGNS_EVERY, 4096))
}
"""Steps between exchanges and coefficients, by name."""


def build_model(rows: int) -> torch.nn.Module:
    import transformers

    config = transformers.LlamaConfig(vocab_size=rows, tie_word_embeddings=False, **SIZES["1.3b"])
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def times_fewer(model: torch.nn.Module, sent: float, replicas: int) -> float:
    """Return how many times fewer bytes these are than those of 16-bit gradients."""
    numel = sum(param.numel() for param in model.parameters())
    return allreduce_wire_bytes(2 * numel, replicas) / sent


def compute(rows: int) -> list[dict[str, Any]]:
    """Return a row for each setting, channel of the embeddings and number of replicas."""
    model, found = build_model(rows), []
    for replicas in REPLICAS:
        for channel in ("dense", "sparse gradients"):
            for name, options in SETTINGS.items():
                made = sc.MomentumExchange(channels(model, channel), check_every=None, **options)
                found.append((name, channel, replicas, made.planned_wire_bytes(replicas)))
            for name, (every, topk) in LOCAL_STEPS.items():
                local = outer_exchange("sparseloco", channels(model, channel), check_every=None, topk=topk, **LOCAL)
                found.append((name, channel, replicas, local.planned_wire_bytes_per_step(replicas) / every))
    return [
        {
            "rows": rows,
            "setting": name,
            "embeddings": channel,
            "replicas": replicas,
            "wire_bytes": sent,
            "times_fewer": times_fewer(model, sent, replicas),
        }
        for name, channel, replicas, sent in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    results = [row for rows in ROWS for row in compute(rows)]
    for row in results:
        print(
            f"{row['rows']:7,} rows, N={row['replicas']}  {row['setting']:32} embeddings {row['embeddings']:16} "
            f"{row['wire_bytes']:13,.0f} bytes  {row['times_fewer']:6.1f} times fewer"
        )
    print(write(dated(__file__, results=results), "comm-bytes", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
