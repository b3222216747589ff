"""Measure how much of a residual each channel of an exchange delivers: embeddings, head and matrices of a small Llama.

    python benchmarks/comm_energy.py                             about five minutes on one core
    python benchmarks/comm_energy.py --vocabulary 32768 131072   about an hour

The decoder of comm_quality.py's `novels-8k`, with a tied and an untied head, is trained by AdamW on one process. With
`--vocabulary` of more than 32,768 rows, the text uses the first 32,768. At the same time each channel keeps its own
residual r with error feedback, as one replica would:

    r <- decay r + g,   q = message(r),   r <- r - q

g is the gradient (`momentum`, decay 0.95, or 1 for `everything`), or the way of five AdamW steps (`local steps`). The
energy of a channel is 1 - sum |r - q|^2 / sum |r|^2 over the last half of the run: 1 if everything arrives at once, 0
if nothing does. `fewer` is the energy if each block sent only as many of its selected coefficients as hold the most
energy in signs with one scale. No message format can do that; it bounds the energy that leaving out could gain.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comm_quality import build_recipe, run_spec
from dated import dated, write
from torch import Tensor

import scantling as sc
from scantling.comm.codec.block_group import BlockGroup
from scantling.comm.config import make_config
from scantling.comm.layout import make_block_groups
from scantling.comm.param_groups import INTERNAL_DEFAULTS
from scantling.trainer.data.loader import BatchSource
from scantling.trainer.data.sampler import Sampler
from scantling.trainer.models.build import recipe_task
from scantling.trainer.planning.resolve import ResolvedRun
from scantling.trainer.recipe import load_recipe
from scantling.trainer.tasks import get_task
from scantling.trainer.training.build import build_run_model

EVERY = 5
MOST_TOKENS = 32_768
"""Rows of the largest vocabulary that is trained; the novels have 47,208 tokens at most."""
OPTIONS = make_config({"topk": 8, "values": "sign", "dense": "sign"}).group_options
GROUP = {**OPTIONS, **INTERNAL_DEFAULTS, "role": "matrix"}
CHANNELS: dict[str, dict[str, dict[str, Any]]] = {
    "momentum": {
        "everything, signs": {"role": "vector"},
        "8 of 4,096": {},
        "32 of 4,096": {"topk": 32},
        "8 of 4,096, no transform": {"transform": "none"},
        "32 of 4,096, no transform": {"topk": 32, "transform": "none"},
    },
    "local steps": {
        "everything, signs": {"role": "vector"},
        "192 of 4,096": {"topk": 192},
        "192 of 4,096, no transform": {"topk": 192, "transform": "none"},
    },
}


@dataclass
class Channel:
    """A residual of one parameter, and the energy that its messages held.

    Attributes:
        block_group: the encoding.
        residual: after the last message.
        kept, best: sums over messages of the energy sent, and of the most that signs of fewer coefficients hold.
        total: sum of the energy of the residuals.
    """

    block_group: BlockGroup
    residual: Tensor
    kept: float = 0.0
    best: float = 0.0
    total: float = 0.0

    def send(self, gradient: Tensor, *, counts: bool) -> None:
        """Accumulate a gradient, and send the selected coefficients."""
        spec = self.block_group.spec
        self.residual.mul_(spec.decay).add_(gradient)
        blocks = self.block_group.to_blocks({0: self.residual})
        index, values = spec.codec.select(blocks)
        sent = spec.codec.round_trip(index, values)
        before = float(self.residual.square().sum())
        self.block_group.add_sparse(*sent, -1.0, to=lambda _: self.residual)
        if counts and before:
            self.total += before
            self.kept += before - float(self.residual.square().sum())
            self.best += float(most_energy(values).sum())


def most_energy(values: Tensor) -> Tensor:
    """Return the most energy that signs of the n largest values of each row hold with one scale, over all n: (rows,)"""
    sums = values.abs().sort(1, descending=True).values.cumsum(1)
    return (sums.square() / torch.arange(1, values.shape[1] + 1)).amax(1)


def train(vocabulary: int, tied: bool, steps: int, seed: int) -> list[dict[str, Any]]:
    """Train the model, and return one row for each kind of parameter, input and channel."""
    recipe = build_recipe({**run_spec("novels-8k", "ddp fp32", 2e-3, seed), "steps": steps})
    overrides = {**recipe["model"]["overrides"], "tie_word_embeddings": tied}
    recipe = load_recipe(
        {
            **recipe,
            "model": {**recipe["model"], "overrides": {**overrides, "vocab_size": vocabulary}},
            "data": {**recipe["data"], "tokenizer": {"bpe": min(vocabulary, MOST_TOKENS)}},
        }
    )
    task = get_task(recipe_task(recipe))
    data = task.prepare(recipe.data, seed=0)
    model = build_run_model(ResolvedRun(recipe, task, 1, "cpu", data))
    optimizer = torch.optim.AdamW(sc.param_groups(model, weight_decay=0.0), lr=2e-3)
    batches = BatchSource(
        data.train, data.collate, Sampler(len(data.train), batch_size=16, seed=seed), micro_batch_size=16
    )
    params = {name: param for name, param in model.named_parameters() if param.dim() == 2}
    channels = {
        (name, source, channel): Channel(make_group(param, options), torch.zeros_like(param))
        for name, param in params.items()
        for source, each in CHANNELS.items()
        for channel, options in each.items()
    }
    starts = {name: param.detach().clone() for name, param in params.items()}
    for step in range(1, steps + 1):
        (batch,) = batches.next_step()
        (task.loss(model, batch).loss / batch.num_targets).backward()
        with torch.no_grad():
            optimizer.step()
            for (name, source, _), channel in channels.items():
                if source == "momentum":
                    channel.send(params[name].grad, counts=2 * step > steps)
                elif step % EVERY == 0:
                    channel.send(starts[name] - params[name], counts=2 * step > steps)
            if step % EVERY == 0:
                starts = {name: param.detach().clone() for name, param in params.items()}
            optimizer.zero_grad()
    return [{"vocabulary": vocabulary, "tied": tied, **row} for row in rows(channels)]


def make_group(param: Tensor, options: dict[str, Any]) -> BlockGroup:
    group = {**GROUP, **options}
    (made,) = make_block_groups({0: tuple(param.shape)}, {0: param.numel()}, [group])
    return made


def rows(channels: dict[tuple[str, str, str], Channel]) -> Iterator[dict[str, Any]]:
    def find_kind(name: str) -> str:
        return "embedding" if "embed" in name else "head" if "lm_head" in name else "matrices"

    for key in dict.fromkeys((find_kind(name), source, channel) for name, source, channel in channels):
        found = [each for (name, *rest), each in channels.items() if (find_kind(name), *rest) == key]
        total = sum(each.total for each in found)
        yield {
            **dict(zip(("kind", "source", "channel"), key, strict=True)),
            "bits": 8 * sum(each.block_group.num_bytes for each in found) / sum(c.residual.numel() for c in found),
            "energy": sum(each.kept for each in found) / total,
            "fewer": sum(each.best for each in found) / total,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[8192], help="rows of the embedding")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    results = [
        row
        for vocabulary in options.vocabulary
        for tied in (True, False)
        for row in train(vocabulary, tied, options.steps, options.seed)
    ]
    for row in results:
        print(
            f"{row['vocabulary']:7} "
            f"{'tied' if row['tied'] else 'untied':7} {row['kind']:10} {row['source']:12} {row['channel']:26} "
            f"{row['bits']:6.3f} bits  energy {row['energy']:.3f}  fewer {row['fewer']:.3f}"
        )
    settings = {"steps": options.steps, "seed": options.seed}
    print(write(dated(__file__, settings=settings, results=results), "comm-energy", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
