"""Sequence to sequence: predict a target from an input, with an encoder-decoder such as T5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from scantling.errors import UserError
from scantling.trainer.data.loader import IGNORED, Batch, Numbered
from scantling.trainer.data.prepare import Prepared, prepare
from scantling.trainer.data.progress import Progress
from scantling.trainer.data.tokenizers import Ids, Tokenizer
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks.base import (
    LossSums,
    Task,
    TaskData,
    cross_entropy_sum,
    loss_and_perplexity,
    mean_loss,
    pad_rows,
    padded_length,
    required,
    unwrapped,
)
from scantling.trainer.tasks.classification import LabeledDataset
from scantling.trainer.tasks.spans import Spans
from scantling.trainer.tasks.streams import bin_data, bin_tokenizer, prepared_windows

NUM_SENTINELS = 100
"""Number of sentinels of T5's tokenizer."""
NEEDS = ("eos", "pad")
"""Special tokens that the task always needs."""


@dataclass(frozen=True)
class CorruptedWindows:
    """Collate function for windows of a stream: hide spans of each window; the hidden spans are the target.

    The spans depend on (seed, epoch, index) only. The input gets the tokens that the tokenizer adds to a text. The
    tokens between documents are kept or hidden like any other.
    """

    tokenizer: Tokenizer
    spans: Spans
    seed: int

    def __call__(self, examples: list[Numbered]) -> Batch:
        sentinels, end = sentinel_ids(self.tokenizer), required(self.tokenizer.eos_id)
        hidden = [
            self.spans.corrupt(window, sentinels, end, key=(self.seed, epoch, index))
            for epoch, index, window in examples
        ]
        inputs = [self.tokenizer.single.fill(ids)[0] for ids, _ in hidden]
        return _batch(inputs, [target for _, target in hidden], required(self.tokenizer.pad_id))


@dataclass(frozen=True)
class TextPairs:
    """Collate function for pairs of an input and a target, each truncated to its length and padded to the longest.

    The input gets the tokens that the tokenizer adds to a text; the target gets those that it adds to a target.
    """

    tokenizer: Tokenizer
    seq_len: int
    target_len: int
    multiple: int | None = None

    def __call__(self, examples: list[Numbered]) -> Batch:
        before, after = self.tokenizer.target
        room = max(0, self.target_len - len(before) - len(after))
        end = np.array([required(self.tokenizer.eos_id)])
        inputs = [self.tokenizer.join(item.ids, None, self.seq_len)[0] for _, _, item in examples]
        inputs = [ids if len(ids) else end for ids in inputs]  # an encoder cannot read an empty input
        targets = [np.concatenate([before, item.pair_ids[:room], after]).astype(np.int64) for _, _, item in examples]
        longest = [
            0 if self.multiple is None else padded_length([*map(len, rows)], self.multiple, limit)
            for rows, limit in ((inputs, self.seq_len), (targets, self.target_len))
        ]
        return _batch(inputs, targets, required(self.tokenizer.pad_id), *longest)


class Seq2Seq(Task):
    """Pairs of an input and a target if the source has them (`fields.pair`), else T5's span corruption of a stream.

    The loss is the mean over the tokens of the targets. The tokens of a run are those of the inputs, as in the T5
    paper.

    A sentinel marks each span: `<extra_id_0>`, `<extra_id_1>`, ... if the tokenizer has them, as T5's does. For a
    tokenizer without sentinels, such as `bytes` and `bpe`, the 100 ids above its vocabulary are the sentinels:
    sentinel k has the id `vocab_size + k`, the model has 100 more ids, and the exported tokenizer has no text for
    them. The decoder starts with the padding token, as in T5, or with the token that loaded weights were trained
    with.
    """

    name: ClassVar[str] = "seq2seq"
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"

    def prepare(self, data: DataSection, *, seed: int, progress: Progress | None = None) -> TaskData:
        if data.fields.label is not None:
            raise UserError(f"data.fields.label: has no meaning for the task '{self.name}'")
        if data.bin is not None:
            return self._bin_data(data, seed, progress)
        pairs = data.fields.pair is not None
        needs = (self.name, NEEDS)
        prepared = prepare(data, seed=seed, pairs=pairs, labeled=False, needs=needs, wrap=True, progress=progress)
        return _pairs(data, prepared) if pairs else self._windows(data, prepared, seed)

    def _windows(self, data: DataSection, prepared: Prepared, seed: int) -> TaskData:
        tokenizer = prepared.tokenizer
        length = window_length(data, tokenizer)
        return TaskData(
            *prepared_windows(data, prepared, length=length, stride=length),
            CorruptedWindows(tokenizer, _spans(data), seed),
            tokenizer,
            tokenizer.vocab_size + self.extra_ids(data, tokenizer),
            info=prepared.info,
        )

    def _bin_data(self, data: DataSection, seed: int, progress: Progress | None) -> TaskData:
        tokenizer = bin_tokenizer(data)
        if tokenizer is None:
            raise UserError("data.tokenizer: seq2seq needs the tokenizer of the bin files, for its special tokens")
        tokenizer.require(self.name, *NEEDS)
        length = window_length(data, tokenizer)
        collate = CorruptedWindows(tokenizer, _spans(data), seed)
        task_data = bin_data(
            data, length=length, stride=length, collate=lambda _: collate, tokenizer=tokenizer, progress=progress
        )
        return replace(task_data, vocab_size=task_data.vocab_size + self.extra_ids(data, tokenizer))

    def extra_ids(self, data: DataSection, tokenizer: Tokenizer | None) -> int:
        if data.fields.pair is not None or (tokenizer is not None and tokenizer.sentinel_ids):
            return 0
        return NUM_SENTINELS

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSums:
        # given labels, transformers would also compute its own loss, a second pass over all logits
        shift: Any = getattr(unwrapped(model), "prepare_decoder_input_ids_from_labels", None)
        target = {"labels": batch.labels} if shift is None else {"decoder_input_ids": shift(batch.labels)}
        logits = model(**batch.inputs, **target, use_cache=False).logits
        return LossSums(cross_entropy_sum(logits, batch.labels))

    def sample_batch(self, batch_size: int, data: DataSection) -> Batch:
        batch = super().sample_batch(batch_size, data)
        if data.fields.pair is not None:
            batch.inputs["attention_mask"] = torch.ones_like(batch.labels)
            longest = target_length(data)
        else:
            # An upper bound: special tokens in the input only make windows, and so targets, shorter.
            spans = _spans(data)
            _, longest = spans.lengths(spans.window(data.seq_len, target_length(data)))
        labels = torch.zeros((batch_size, longest), dtype=torch.long)
        return Batch(batch.inputs, labels, num_targets=labels.numel(), num_tokens=batch.num_tokens)

    def metrics(self, sums: dict[str, float], data: TaskData) -> dict[str, float]:
        return loss_and_perplexity(mean_loss(sums))


def sentinel_ids(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Return the ids of the sentinels that replace hidden spans, in the order of the spans."""
    ids = tokenizer.sentinel_ids or range(tokenizer.vocab_size, tokenizer.vocab_size + NUM_SENTINELS)
    return np.array(ids, dtype=np.int64)


def window_length(data: DataSection, tokenizer: Tokenizer) -> int:
    """Return the length of a window of the stream, which fills the input after spans are hidden.

    Raises:
        UserError: no room for text, or more spans than sentinels.
    """
    specials = tokenizer.single.num_specials
    length = _spans(data).window(data.seq_len - specials, target_length(data))
    if length < 2:
        raise UserError(
            f"data.seq_len = {data.seq_len} and data.target_len = {target_length(data)} leave no room for text next to "
            f"a sentinel and {specials} special tokens"
        )
    spans, num_sentinels = _spans(data).counts(length)[1], len(sentinel_ids(tokenizer))
    if spans > num_sentinels:
        raise UserError(
            f"data.seq_len = {data.seq_len} gives {spans} spans, and {tokenizer.name} has {num_sentinels} sentinels; "
            "lower it or data.mask_probability, or raise data.span_length"
        )
    return length


def target_length(data: DataSection) -> int:
    """Return the largest length of a target, including its end token."""
    return data.target_len or data.seq_len


def _pairs(data: DataSection, prepared: Prepared) -> TaskData:
    tokenizer, limit = prepared.tokenizer, target_length(data)
    train = LabeledDataset(prepared.train, has_pairs=True)
    return TaskData(
        train,
        None if prepared.heldout is None else LabeledDataset(prepared.heldout, has_pairs=True),
        TextPairs(tokenizer, data.seq_len, limit, data.pad_to_multiple_of),
        tokenizer,
        tokenizer.vocab_size,
        lengths=np.minimum(train.lengths(), data.seq_len + limit) if data.bucket else None,
        info=prepared.info,
    )


def _spans(data: DataSection) -> Spans:
    return Spans(data.mask_probability, data.span_length)


def _batch(
    inputs: Sequence[Ids], targets: Sequence[Ids], pad_id: int, input_length: int = 0, target_length: int = 0
) -> Batch:
    """Return padded inputs and targets, with an attention mask if inputs are padded."""
    lengths = [len(ids) for ids in inputs]
    named = {"input_ids": pad_rows(inputs, pad_id, input_length)}
    if min(lengths) < max(input_length, *lengths):
        named["attention_mask"] = pad_rows([np.ones(length, dtype=np.int64) for length in lengths], 0, input_length)
    labels = pad_rows(targets, IGNORED, target_length)
    return Batch(named, labels, num_targets=sum(map(len, targets)), num_tokens=sum(lengths))
