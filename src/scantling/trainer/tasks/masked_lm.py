"""Masked language modeling: predict some tokens from all others."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from scantling.errors import UserError
from scantling.trainer.data.hashing import key64, mix64, uniform
from scantling.trainer.data.loader import IGNORED, Batch, Numbered
from scantling.trainer.data.prepare import prepare
from scantling.trainer.data.progress import Progress
from scantling.trainer.data.tokenizers import Tokenizer
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks.base import (
    LossSums,
    Task,
    TaskData,
    cross_entropy_sum,
    loss_and_accuracy,
    pad_rows,
    required,
    without_cache,
)
from scantling.trainer.tasks.streams import bin_data, bin_tokenizer, prepared_windows, refuse_pairs


class MaskedWindows:
    """Collate function for windows: add special tokens to each, select targets and mask them.

    A target becomes the mask token in 80 % of cases, a random token in 10 %, and is unchanged in 10 % (BERT, arXiv
    1810.04805, section 3.1). Special tokens are never targets, and each window has at least one target. The selection
    depends on (seed, epoch, index) only.

    Args:
        tokenizer: provides the special tokens.
        seq_len: tokens in a sequence, including special tokens.
        probability: share of the tokens that are targets.
        seed: determines the selection.
    """

    def __init__(self, tokenizer: Tokenizer, *, seq_len: int, probability: float, seed: int) -> None:
        self.seq_len, self.probability, self.seed = seq_len, probability, seed
        self.template = tokenizer.single
        self.mask_id, self.pad_id = required(tokenizer.mask_id), required(tokenizer.pad_id)
        self.is_special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self.is_special[sorted(tokenizer.special_ids)] = True
        self.words = np.flatnonzero(~self.is_special)

    def __call__(self, examples: list[Numbered]) -> Batch:
        rows, labels = zip(*(self.hide(*example) for example in examples), strict=True)
        lengths = [len(row) for row in rows]
        inputs = {"input_ids": pad_rows(list(rows), self.pad_id)}
        if min(lengths) < max(lengths):
            mask = [np.ones(length, dtype=np.int64) for length in lengths]
            inputs["attention_mask"] = pad_rows(mask, 0)
        targets = pad_rows(list(labels), IGNORED)
        return Batch(inputs, targets, num_targets=int((targets != IGNORED).sum()), num_tokens=sum(lengths))

    def hide(
        self, epoch: int, index: int, window: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the input ids and the labels of one window, both of shape (length,)."""
        ids = np.asarray(self.template.fill(window)[0], dtype=np.int64)
        key = key64("mask", self.seed, epoch, index)
        # stateless draws: each position has four counters, and uses three of them
        counters = np.arange(len(ids), dtype=np.uint64) * np.uint64(4)
        draw = np.where(self.is_special[ids], 1.0, uniform(counters, key))
        chosen = draw < self.probability
        if not chosen.any() and (draw < 1.0).any():
            chosen[draw.argmin()] = True
        labels = np.where(chosen, ids, IGNORED)
        # of the targets: 80 % mask token, 10 % random token, 10 % unchanged
        kind = uniform(counters + np.uint64(1), key)
        other = self.words[(mix64(counters + np.uint64(2), key) % np.uint64(len(self.words))).astype(np.int64)]
        hidden = np.where(kind < 0.8, self.mask_id, np.where(kind < 0.9, other, ids))
        return np.where(chosen, hidden, ids), labels


class MaskedLM(Task):
    """Masked language modeling on windows of packed documents, each with the tokenizer's special tokens."""

    name: ClassVar[str] = "masked-lm"
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"

    def prepare(self, data: DataSection, *, seed: int, progress: Progress | None = None) -> TaskData:
        refuse_pairs(data, self.name)
        if data.bin is not None:
            tokenizer = bin_tokenizer(data)
            if tokenizer is None:
                raise UserError("data.tokenizer: masked-lm needs the tokenizer of the bin files, for its mask token")
            tokenizer.require(self.name, "mask", "pad")
            length = self._window(tokenizer, data.seq_len)
            collate = self._collate(tokenizer, data, seed)
            return bin_data(
                data, length=length, stride=length, collate=lambda _: collate, tokenizer=tokenizer, progress=progress
            )
        prepared = prepare(data, seed=seed, needs=(self.name, ("mask", "pad")), wrap=True, progress=progress)
        tokenizer = prepared.tokenizer
        length = self._window(tokenizer, data.seq_len)
        return TaskData(
            *prepared_windows(data, prepared, length=length, stride=length),
            self._collate(tokenizer, data, seed),
            tokenizer,
            tokenizer.vocab_size,
            info=prepared.info,
        )

    def _collate(self, tokenizer: Tokenizer, data: DataSection, seed: int) -> MaskedWindows:
        return MaskedWindows(tokenizer, seq_len=data.seq_len, probability=data.mask_probability, seed=seed)

    def _window(self, tokenizer: Tokenizer, seq_len: int) -> int:
        """Return the number of stream tokens in a sequence."""
        room = seq_len - tokenizer.single.num_specials
        if room < 1:
            raise UserError(f"data.seq_len = {seq_len} leaves no room for text next to {seq_len - room} special tokens")
        return room

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSums:
        logits = model(**batch.inputs, **without_cache(model)).logits
        with torch.no_grad():
            correct = (logits.argmax(-1) == batch.labels).sum()
        return LossSums(cross_entropy_sum(logits, batch.labels), {"correct": correct})

    def metrics(self, sums: dict[str, float], data: TaskData) -> dict[str, float]:
        return loss_and_accuracy(sums)
