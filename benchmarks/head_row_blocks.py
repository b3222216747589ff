"""Form and step the gradient of an output layer by blocks of its rows, instead of keeping the whole gradient.

    python benchmarks/head_row_blocks.py

The 128,256 x 4,096 output layer of Llama-3-8B has a gradient of 1.05 GB in bf16, 0.13 bytes per parameter of the model.
The chunked loss (`scantling.trainer.tasks.chunked_loss`) sums it over chunks of tokens, so it exists as a whole. The
forward pass leaves the normalizer of each token, so the backward pass can also go over blocks of rows: it computes the
logits of all tokens for the block (as it does for a chunk today), from these the block of the gradient, and the block's
share of the gradient of the hidden states. A block of the gradient is complete at once, and no product is added.

CAME cannot step a block with that alone. Its column means of the squared gradient (2), the RMS of the whitened gradient
by which it clips (4) and the column means of the instability (8) are those of the whole matrix, and each needs the one
before. The exact step reads the gradient four times, so blocks have to be formed four times: six products of the output
layer in addition to the four of today. A step with statistics of each block needs none, but is another optimizer.

The script measures on a CPU at a small width, with the ratios of the recipe (as many tokens as the width, 31.3 classes
for each, 8 chunks or blocks), in turns:

- `whole`: the chunked loss, then a CAME step. The control.
- `chunks of half the size`: the same with half as many tokens in a chunk.
- `blocks, one step each`: by row blocks, each stepped as its own matrix.
- `blocks, exact step`: blocks formed four times, then stepped. The reads of the statistics are left out, so this is a
  lower bound.
- `training step`: of a Llama of the same ratios with 32 layers, as in the recipe.

`share_of_step` is the time that a form adds to the whole, divided by that of the training step; the latter takes turns
with the control in an eighth of the rounds. `memory` is the peak in a process of its own, above the memory of the
imports. `plan` is the planned peak of recipes/finetune-8b-24gb.yaml for several chunks, and with blocks whose gradients
are freed at once: what blocks can save at most.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import dated, write
from interleaved import disturbed, ratio, take_turns
from own_process import peak_bytes
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import scantling as sc
from scantling.tensor.layer import without_saving_hooks
from scantling.trainer.data.loader import IGNORED
from scantling.trainer.tasks import chunked_loss

RECIPE = Path(__file__).parents[1] / "recipes" / "finetune-8b-24gb.yaml"
CONTROL, STEP = "whole", "training step"
BLOCKS = 8
CLASSES_PER_WIDTH = 128256 / 4096
CAME_OPTIONS: dict[str, Any] = {
    "lr": 1e-5,
    "betas": (0.9, 0.95, 0.995),
    "debias": True,
    "momentum": "int4",
    "rounding": "stochastic",
}
Use = Callable[[int, Tensor], None]
"""Takes the first row of a block and the block of the gradient."""


class RowBlockLoss(torch.autograd.Function):
    """Drop-in for the function of the chunked loss, whose backward pass goes over row blocks of the weight."""

    use: Use = staticmethod(lambda start, grad: None)
    num_formed = 1

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: None, labels: Tensor, tokens: int) -> Tensor:
        return chunked_loss._ChunkedLoss.forward(ctx, hidden, weight, bias, labels, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, _, labels, norms = ctx.saved_tensors
        scale = torch.where(labels == IGNORED, 0.0, grad)
        # (tokens, width): a sum over blocks, in fp32 because each block rounds
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        for number in range(RowBlockLoss.num_formed):
            for start in range(0, len(weight), -(-len(weight) // BLOCKS)):
                rows = weight[start : start + -(-len(weight) // BLOCKS)]
                with without_saving_hooks():
                    grad_logits = _grad_logits(hidden, rows, labels - start, norms, scale)
                if number == 0:
                    grad_hidden += grad_logits @ rows
                block = grad_logits.T @ hidden
                del grad_logits
                if number == RowBlockLoss.num_formed - 1:
                    RowBlockLoss.use(start, block)
                del block
        return grad_hidden.to(hidden.dtype), None, None, None, None


def _grad_logits(hidden: Tensor, rows: Tensor, labels: Tensor, norms: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of the logits of some classes: (tokens, rows); labels count from the first of them."""
    probabilities = (hidden @ rows.T).float().sub_(norms[:, None]).exp_()
    own = (labels >= 0) & (labels < len(rows))
    probabilities.scatter_add_(1, labels.clamp(0, len(rows) - 1)[:, None], -own.float()[:, None])
    return probabilities.mul_(scale[:, None]).to(hidden.dtype)


class Head:
    """Output layer with hidden states, labels and an optimizer; a call is its part of a training step."""

    def __init__(self, width: int, form: str) -> None:
        generator = torch.Generator().manual_seed(0)
        classes = round(width * CLASSES_PER_WIDTH)
        self.form, self.chunk = form, width // BLOCKS
        self.hidden = torch.randn(width, width, generator=generator, dtype=torch.bfloat16).requires_grad_()
        weight = torch.randn(classes, width, generator=generator, dtype=torch.bfloat16).mul_(0.02)
        self.weight = nn.Parameter(weight)
        self.labels = torch.randint(classes, (width,), generator=generator)
        rows = -(-classes // BLOCKS)
        self.blocks = {
            start: nn.Parameter(self.weight.detach()[start : start + rows]) for start in range(0, classes, rows)
        }
        params = list(self.blocks.values()) if form.startswith("blocks") else [self.weight]
        self.optimizer = sc.CAME([{"params": params, "role": "embedding"}], **CAME_OPTIONS)

    def _step_block(self, start: int, grad: Tensor) -> None:
        block = self.blocks[start]
        block.grad = grad
        self.optimizer.step_parameters([block])
        block.grad = None

    def __call__(self) -> None:
        self.hidden.grad = None
        if self.form.startswith("blocks"):
            RowBlockLoss.use, RowBlockLoss.num_formed = self._step_block, 4 if "exact" in self.form else 1
            apply: Any = RowBlockLoss.apply
            apply(self.hidden, self.weight.detach(), None, self.labels, self.chunk).backward()
            return
        chunk = self.chunk // 2 if "half" in self.form else self.chunk
        chunked_loss.chunked_cross_entropy(self.hidden, self.weight, None, self.labels, chunk).backward()
        self.optimizer.step()
        self.weight.grad = None


FORMS = (CONTROL, "chunks of half the size", "blocks, one step each", "blocks, exact step")


def training_step(width: int) -> Callable[[], None]:
    """Return the training step of a Llama of the recipe's ratios, with as many tokens as the width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from scantling.trainer.models.block_parts import checkpoint_in_parts
    from scantling.trainer.models.checkpointing import checkpoint_activations

    config = LlamaConfig(
        vocab_size=round(width * CLASSES_PER_WIDTH),
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=32,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.train()
    checkpoint_activations(model)
    checkpoint_in_parts(model, 1)
    chunked_loss.chunk_loss(model, width // BLOCKS)
    optimizer = sc.CAME(sc.param_groups(model, weight_decay=0.0), **CAME_OPTIONS)
    sc.optim.release_gradients(model, optimizer)
    ids = torch.randint(config.vocab_size, (2, width // 2))

    def step() -> None:
        with chunked_loss.loss_labels(model, ids):
            model(input_ids=ids, use_cache=False).logits.backward()

    return step


def check_gradients(width: int) -> float:
    """Return the largest difference of the gradients by blocks from the whole ones, relative to the largest value."""
    head = Head(width, "blocks")
    chunked_loss.chunked_cross_entropy(head.hidden, head.weight, None, head.labels, head.chunk).backward()
    wanted, wanted_hidden = head.weight.grad, head.hidden.grad
    assert wanted is not None
    assert wanted_hidden is not None
    found = torch.zeros_like(wanted)
    RowBlockLoss.use, RowBlockLoss.num_formed = lambda start, grad: found[start:].narrow(0, 0, len(grad)).copy_(grad), 1
    head.hidden.grad = None
    apply: Any = RowBlockLoss.apply
    apply(head.hidden, head.weight.detach(), None, head.labels, head.chunk).backward()
    pairs = ((found, wanted), (head.hidden.grad, wanted_hidden))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def measure_times(width: int, rounds: int) -> dict[str, Any]:
    """Return the times of all forms in turns, and of the training step in turns with the control."""
    work: dict[str, Callable[[], object]] = {form: Head(width, form) for form in FORMS}
    times = take_turns({**work, "again": Head(width, CONTROL)}, rounds)
    found = {name: ratio(own, times[CONTROL]) for name, own in times.items()}
    few = take_turns({CONTROL: work[CONTROL], STEP: training_step(width)}, max(1, rounds // 8), warmup=1)
    found[STEP] = ratio(few[STEP], few[CONTROL])
    for form in FORMS:
        found[form]["share_of_step"] = (found[form]["ratio"] - 1.0) / found[STEP]["ratio"]
    return {"disturbed": disturbed(found.pop("again")), "rows": found}


def memory_line(width: int, form: str) -> dict[str, Any]:
    """Return the peak memory of a form above that of its inputs and state, in this process."""
    made: list[Head] = []

    def build() -> Callable[[], None]:
        made.append(Head(width, form))
        return made[0]

    return peak_bytes(build, warm=Head(64, form), steps=2, gives_back=True)


@contextmanager
def row_blocks() -> Iterator[None]:
    """Context in which the chunked loss forms blocks of rows and drops each at once."""
    RowBlockLoss.use, RowBlockLoss.num_formed = lambda start, grad: None, 1
    own = chunked_loss._ChunkedLoss
    blocks: Any = type("_ChunkedLoss", (), {"apply": RowBlockLoss.apply, "forward": own.forward})
    chunked_loss._ChunkedLoss = blocks  # type: ignore[misc]
    try:
        yield
    finally:
        chunked_loss._ChunkedLoss = own  # type: ignore[misc]


def plan_peaks() -> dict[str, Any]:
    """Return the planned peaks of the recipe, and the share of its FLOPs that one product of the output layer takes."""
    found: dict[str, Any] = {}
    for chunk in (512, 256, 128):
        plan = sc.plan(RECIPE, device="cuda", settings=[f"train.loss_chunk={chunk}"])
        found[f"chunks of {chunk}"] = plan.peak_memory_bytes
        if chunk == 512:
            assert plan.flops_per_step is not None
            found["product_share"] = 2 * plan.tokens_per_step * 4096 * 128256 / plan.flops_per_step
    with row_blocks():
        found["blocks"] = sc.plan(RECIPE, device="cuda").peak_memory_bytes
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--memory-width", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = {"gradient_difference": check_gradients(options.width), "plan": plan_peaks()}
    print(found, flush=True)
    found["memory"] = {form: run_alone(options.memory_width, form) for form in FORMS}
    for form, line in found["memory"].items():
        print(f"{form:26} {line['peak_above_base_bytes'] / 2**20:7.1f} MiB", flush=True)
    found["times"] = measure_times(options.width, options.rounds)
    for name, row in found["times"]["rows"].items():
        share = f"  {row['share_of_step']:+.1%} of a training step" if "share_of_step" in row else ""
        print(f"{name:26} {np.median(row['raw_s']):7.3f} s  {row['ratio']:.2f} of the control{share}")
    print(found["times"]["disturbed"] or "the control against itself is steady")
    print(write(dated(__file__, results=found), "head-row-blocks", options.out))
    return 0


def run_alone(width: int, form: str) -> dict[str, Any]:
    """Return `memory_line`, measured in a new process."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(memory_line, width, form).result()


if __name__ == "__main__":
    sys.exit(main())
