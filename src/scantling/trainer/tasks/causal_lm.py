"""Causal language modeling: predict every token from those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from scantling.trainer.data.bins import CHUNK
from scantling.trainer.data.loader import IGNORED, Batch, Numbered
from scantling.trainer.data.packing import document_positions
from scantling.trainer.data.prepare import document_marks, prepare
from scantling.trainer.data.progress import Progress
from scantling.trainer.data.store import NO_MARKS, MappedArray, Marks
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks.base import (
    LossSums,
    Task,
    TaskData,
    cross_entropy_sum,
    loss_and_perplexity,
    mean_loss,
    pad_rows,
    unwrapped,
)
from scantling.trainer.tasks.chunked_loss import loss_labels
from scantling.trainer.tasks.streams import bin_data, prepared_windows, refuse_pairs


@dataclass(frozen=True)
class ShiftedWindows:
    """Collate function for windows of seq_len + 1 tokens: inputs omit the last token, labels the first.

    Args:
        document_mask: also return `position_ids` that restart at each document.
        marks: ids around documents.
    """

    document_mask: bool = False
    marks: Marks = NO_MARKS

    def __call__(self, examples: list[Numbered]) -> Batch:
        windows = [window for _, _, window in examples]
        # Partial windows are padded with id 0; their labels there are -100, so the id does not matter.
        inputs = pad_rows([window[:-1] for window in windows], 0)
        labels = pad_rows([window[1:] for window in windows], IGNORED)
        tokens = targets = sum(len(window) - 1 for window in windows)
        if self.marks.given:
            labels[torch.isin(labels, torch.tensor(self.marks.given))] = IGNORED
            targets = int((labels != IGNORED).sum())
        named = {"input_ids": inputs}
        if self.document_mask and self.marks.first:
            named["position_ids"] = torch.from_numpy(document_positions(inputs.numpy(), self.marks.first[0]))
        return Batch(named, labels, num_targets=targets, num_tokens=tokens)

    def num_targets(self, stream: MappedArray) -> int:
        """Count the targets in a stream: all tokens except the first and the given ones."""
        chunks = range(1, len(stream), CHUNK) if self.marks.given else ()
        given = sum(int(np.isin(stream[begin : begin + CHUNK], self.marks.given).sum()) for begin in chunks)
        return len(stream) - 1 - given


def _builds(auto_class: Any, config: Any) -> bool:
    """Return True if an Auto class has a model of this configuration itself, not only of its text part."""
    if type(config) not in auto_class._model_mapping:
        return False
    models = auto_class._model_mapping[type(config)]
    kinds = models if isinstance(models, tuple | list) else (models,)
    return any(kind.config_class is type(config) for kind in kinds)


class CausalLM(Task):
    """Causal language modeling on windows of packed documents; the loss averages all tokens, also end-of-text.

    Each document is surrounded by the tokens that the tokenizer adds to a text. The tokens that begin a document are
    given to the model, as at inference, and are not targets. A tokenizer that adds none gets end-of-text between
    documents, and the stream begins with one. Every token of the held-out text is therefore predicted exactly once,
    including the last, shorter window. Hence bits per byte = eval_loss / ln 2 * targets / bytes, exactly.
    """

    name: ClassVar[str] = "causal-lm"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"

    def find_auto_class(self, config: Any) -> Any:
        """Return the Auto class; also finds decoders that read images or sound in addition to text.

        Such a model is built with its image or sound encoder, so that its saved folder also serves images and text.
        """
        import transformers

        names = (self.auto_class, "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
        classes = [getattr(transformers, name) for name in names]
        return next((each for each in classes if _builds(each, config)), classes[0])

    def prepare(self, data: DataSection, *, seed: int, progress: Progress | None = None) -> TaskData:
        length, stride = data.seq_len + 1, data.seq_len
        if data.bin is not None:
            return bin_data(
                data,
                length=length,
                stride=stride,
                collate=lambda marks: ShiftedWindows(data.document_mask, marks),
                progress=progress,
            )
        refuse_pairs(data, self.name)
        prepared = prepare(data, seed=seed, progress=progress)
        held, collate = prepared.heldout, ShiftedWindows(data.document_mask, document_marks(prepared.tokenizer))
        return TaskData(
            *prepared_windows(data, prepared, length=length, stride=stride),
            collate,
            prepared.tokenizer,
            prepared.tokenizer.vocab_size,
            heldout_bytes_per_token=None if held is None else held.num_bytes / collate.num_targets(held.tokens),
            info=prepared.info,
        )

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSums:
        # without use_cache=False, transformers does not look for packed documents in position_ids
        with loss_labels(unwrapped(model), batch.labels) as is_chunked:
            found = model(**batch.inputs, use_cache=False).logits
        return LossSums(found if is_chunked else cross_entropy_sum(found, batch.labels))

    def metrics(self, sums: dict[str, float], data: TaskData) -> dict[str, float]:
        loss = mean_loss(sums)
        figures = loss_and_perplexity(loss)
        if data.heldout_bytes_per_token:
            figures["bits_per_byte"] = loss / math.log(2) / data.heldout_bytes_per_token
        return figures
