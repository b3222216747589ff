"""Causal language modelling: every token from those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from scantling.data.batch import IGNORED, Batch
from scantling.data.loader import Numbered
from scantling.data.packing import document_positions
from scantling.data.prepare import prepare, separator_id
from scantling.data.progress import Progress
from scantling.recipe.schema import DataSection
from scantling.tasks.base import LossSums, Task, TaskData, cross_entropy_sum, loss_and_perplexity, mean_loss, pad_rows
from scantling.tasks.streams import bin_data, prepared_windows, refuse_pairs


@dataclass(frozen=True)
class ShiftedWindows:
    """Collates windows of seq_len + 1 tokens: inputs are all but the last token, labels all but the first.

    Args:
        document_mask: also give `position_ids` that begin again at each document.
        eos_id: the token between documents.
    """

    document_mask: bool = False
    eos_id: int | None = None

    def __call__(self, examples: list[Numbered]) -> Batch:
        windows = [window for _, _, window in examples]
        tokens = sum(len(window) - 1 for window in windows)
        inputs = pad_rows([window[:-1] for window in windows], 0)
        labels = pad_rows([window[1:] for window in windows], IGNORED)
        named = {"input_ids": inputs}
        if self.document_mask and self.eos_id is not None:
            named["position_ids"] = torch.from_numpy(document_positions(inputs.numpy(), self.eos_id))
        return Batch(named, labels, num_targets=tokens, num_tokens=tokens)


class CausalLM(Task):
    """Windows of packed documents; the loss is the mean over all tokens, end-of-text included.

    Each stream begins with an end-of-text token, so that every token of the held-out text is predicted exactly once,
    the last, shorter window included. Hence bits per byte = eval_loss / ln 2 * targets / bytes, exactly.
    """

    name: ClassVar[str] = "causal-lm"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"

    def prepare(self, data: DataSection, *, seed: int, progress: Progress | None = None) -> TaskData:
        length, stride = data.seq_len + 1, data.seq_len
        if data.bin is not None:
            return bin_data(
                data,
                length=length,
                stride=stride,
                collate=lambda eos_id: ShiftedWindows(data.document_mask, eos_id),
                progress=progress,
            )
        refuse_pairs(data, self.name)
        prepared = prepare(data, seed=seed, progress=progress)
        held = prepared.heldout
        return TaskData(
            *prepared_windows(data, prepared, length=length, stride=stride),
            ShiftedWindows(data.document_mask, separator_id(prepared.tokenizer)),
            prepared.tokenizer,
            prepared.tokenizer.vocab_size,
            heldout_bytes_per_token=None if held is None else held.num_bytes / (len(held.tokens) - 1),
            info=prepared.info,
        )

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSums:
        # without use_cache=False transformers would not look for packed documents in position_ids
        logits = model(**batch.inputs, use_cache=False).logits
        return LossSums(cross_entropy_sum(logits, batch.labels))

    def metrics(self, sums: dict[str, float], data: TaskData) -> dict[str, float]:
        loss = mean_loss(sums)
        figures = loss_and_perplexity(loss)
        if data.heldout_bytes_per_token:
            figures["bits_per_byte"] = loss / math.log(2) / data.heldout_bytes_per_token
        return figures
