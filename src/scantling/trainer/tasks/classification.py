"""Classification of a text or of a pair of texts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from scantling.errors import UserError
from scantling.eval_mode import eval_mode
from scantling.trainer.data.loader import Batch, Numbered, evenly_spaced
from scantling.trainer.data.prepare import prepare
from scantling.trainer.data.progress import Progress
from scantling.trainer.data.store import MappedArray, TokenStore
from scantling.trainer.data.tokenizers import Ids, Tokenizer
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks.base import (
    LossSums,
    Task,
    TaskData,
    cross_entropy_sum,
    label_names,
    loss_and_accuracy,
    model_config,
    pad_rows,
    padded_length,
    planned_ids,
    required,
    unwrapped,
    without_cache,
)

logger = logging.getLogger(__name__)


class LabeledText(NamedTuple):
    """One example: ids of the text, ids of the second text or None, and the label's id."""

    ids: Ids
    pair_ids: Ids | None
    label: int


class LabeledDataset:
    """Dataset of labeled documents, or of pairs without labels (their label is -1).

    Args:
        store: the tokenized documents.
        has_pairs: True if documents have a second text.
    """

    def __init__(self, store: TokenStore, *, has_pairs: bool) -> None:
        if store.middles is None or store.labels is None:
            raise ValueError("the store holds a stream, not documents with labels")
        self._tokens, self._ends = store.tokens, store.ends
        self._middles: MappedArray = store.middles
        self._labels: MappedArray = store.labels
        self.has_pairs = has_pairs

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> LabeledText:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = int(self._ends[index - 1]) if index else 0
        middle, end = int(self._middles[index]), int(self._ends[index])
        pair = self._tokens[middle:end] if self.has_pairs else None
        return LabeledText(self._tokens[begin:middle], pair, int(self._labels[index]))

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the label ids of all documents, (documents,)."""
        return np.asarray(self._labels[:], dtype=np.int64)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each document without special tokens, (documents,)."""
        ends: npt.NDArray[np.int64] = self._ends[:]
        lengths: npt.NDArray[np.int64] = np.diff(ends, prepend=0)
        return lengths


@dataclass(frozen=True)
class PaddedTexts:
    """Collate function: add special tokens to each example, truncate to `seq_len`, pad to a common length."""

    tokenizer: Tokenizer
    seq_len: int
    multiple: int | None = None

    def __call__(self, examples: list[Numbered]) -> Batch:
        joined = [self.tokenizer.join(item.ids, item.pair_ids, self.seq_len) for _, _, item in examples]
        pad, left = required(self.tokenizer.pad_id), self.tokenizer.pads_left
        nothing = np.array([pad]), np.array([0])  # a model cannot read an empty text
        joined = [both if len(both[0]) else nothing for both in joined]
        lengths = [len(ids) for ids, _ in joined]
        length = padded_length(lengths, self.multiple, self.seq_len)
        inputs = {
            "input_ids": pad_rows([ids for ids, _ in joined], pad, length, left=left),
            "attention_mask": pad_rows([np.ones(num_ids, dtype=np.int64) for num_ids in lengths], 0, length, left=left),
            "token_type_ids": pad_rows([types for _, types in joined], 0, length, left=left),
        }
        labels = torch.tensor([item.label for _, _, item in examples], dtype=torch.long)
        return Batch(inputs, labels, num_targets=len(examples), num_tokens=sum(lengths))


class Classification(Task):
    """Classification of a text or a pair; models with more than one token type also get `token_type_ids`.

    Special tokens are the tokenizer's, if any. A decoder predicts at the last token of a text. The padding token is
    in the configuration; for a tokenizer without one, it is end-of-text or another special token.
    """

    name: ClassVar[str] = "classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"

    def prepare(self, data: DataSection, *, seed: int, progress: Progress | None = None) -> TaskData:
        if data.fields.label is None:
            raise UserError("data.fields.label: missing; classification needs the name of the label column")
        prepared = prepare(data, seed=seed, pairs=True, wrap=True, progress=progress)
        tokenizer = prepared.tokenizer.with_padding()
        tokenizer.require(self.name, "pad")
        has_pairs = data.fields.pair is not None
        train = LabeledDataset(prepared.train, has_pairs=has_pairs)
        heldout = None if prepared.heldout is None else LabeledDataset(prepared.heldout, has_pairs=has_pairs)
        return TaskData(
            train,
            heldout,
            PaddedTexts(tokenizer, data.seq_len, data.pad_to_multiple_of),
            tokenizer,
            tokenizer.vocab_size,
            lengths=np.minimum(train.lengths(), data.seq_len) if data.bucket else None,
            labels=prepared.labels,
            info=prepared.info,
        )

    def config_overrides(self, data: TaskData) -> dict[str, Any]:
        return label_names(data.labels or []) | super().config_overrides(data)

    def planned_overrides(self, data: DataSection, notes: list[str]) -> dict[str, Any]:
        if data.labels is None:
            notes.append("the number of labels is not known before the data is read; 2 are assumed")
        ids = self.token_ids(planned_ids(data, padded=True))
        return ids | {"num_labels": 2 if data.labels is None else len(data.labels)}

    def check_model(self, model: torch.nn.Module, data: TaskData) -> None:
        config, tokenizer, name = model_config(model), data.tokenizer, type(unwrapped(model)).__name__
        if tokenizer is None or not isinstance(data.train, LabeledDataset):
            return
        template = tokenizer.pair if data.train.has_pairs else tokenizer.single
        if config.is_encoder_decoder and config.eos_token_id not in template.parts[-1]:
            raise UserError(
                f"data.tokenizer: {tokenizer.name} puts no end-of-text token after a text, and {name} answers there; "
                "add it to the tokenizer's template, or train an encoder or a decoder"
            )
        pad_id = getattr(config.get_text_config(), "pad_token_id", None)
        if pad_id != tokenizer.pad_id:
            raise UserError(
                f"model.overrides.pad_token_id: {pad_id} is not the token that pads texts, which is {tokenizer.pad_id} "
                f"of {tokenizer.name}; leave it out, or name the token in the tokenizer"
            )
        if self._sees_padding(model, data):
            logger.warning(
                "padding changes the answers of %s: they depend on the other texts of a batch. "
                "data.pad_to_multiple_of: %d pads all texts to one length",
                *(name, data.collate.seq_len),  # type: ignore[attr-defined]
            )

    @torch.no_grad()
    def _sees_padding(self, model: torch.nn.Module, data: TaskData) -> bool:
        """Return True if padding changes the logits of a text."""
        ids, pair_ids, _ = data.train[0]
        short = LabeledText(ids[:8], None if pair_ids is None else pair_ids[:8], 0)
        long = short._replace(ids=np.concatenate([short.ids, short.ids]))
        logits_seen: list[torch.Tensor] = []
        hook = model.register_forward_hook(lambda _module, _inputs, output: logits_seen.append(output.logits[:1]))
        try:
            with eval_mode(model), torch.random.fork_rng([]):
                for rows in ([short], [short, long]):
                    self.loss(model, data.collate([(0, number, row) for number, row in enumerate(rows)]))
        except Exception:  # a model that needs other inputs raises in training
            return False
        finally:
            hook.remove()
        alone, padded = logits_seen
        return bool((alone - padded).abs().max() > 1e-3 * alone.abs().max())

    def probe(self, config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return random inputs; an encoder-decoder predicts at the end token, so its texts have one end token."""
        ids = super().probe(config, generator)["input_ids"]
        if config.is_encoder_decoder:
            ids[:, -1] = config.eos_token_id
        return {"input_ids": ids}

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSums:
        inputs = batch.inputs
        if (getattr(model_config(model), "type_vocab_size", None) or 0) < 2:
            inputs = {name: value for name, value in inputs.items() if name != "token_type_ids"}
        logits = model(**inputs, **without_cache(model)).logits
        correct = (logits.detach().argmax(-1) == batch.labels).sum()
        return LossSums(cross_entropy_sum(logits, batch.labels), {"correct": correct})

    def sample_batch(self, batch_size: int, data: DataSection) -> Batch:
        batch = super().sample_batch(batch_size, data)
        inputs = batch.inputs | {"attention_mask": torch.ones_like(batch.labels)}
        return Batch(inputs, batch.labels[:, 0].clone(), num_targets=batch_size, num_tokens=batch.num_tokens)

    def metrics(self, sums: dict[str, float], data: TaskData) -> dict[str, float]:
        return loss_and_accuracy(sums)

    def baselines(self, data: TaskData, *, max_samples: int | None = None) -> dict[str, float]:
        """Return `majority_accuracy`, and `hypothesis_only_accuracy` (pairs) or `bag_of_words_accuracy` (texts)."""
        from scantling.trainer.tasks.baselines import bag_accuracy, majority_accuracy

        train, heldout = data.train, data.heldout
        if not isinstance(train, LabeledDataset) or not isinstance(heldout, LabeledDataset) or data.tokenizer is None:
            return {}
        name = "hypothesis_only_accuracy" if train.has_pairs else "bag_of_words_accuracy"
        chosen = evenly_spaced(len(heldout), max_samples)
        return {
            "majority_accuracy": majority_accuracy(train.labels(), heldout.labels()[chosen]),
            name: bag_accuracy(train, heldout, data.tokenizer, num_labels=len(data.labels or []), chosen=chosen),
        }
