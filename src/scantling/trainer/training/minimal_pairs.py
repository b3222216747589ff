"""Accuracy on minimal pairs: how often a language model assigns the acceptable sentence the higher probability.

The score of a sentence is the sum of the log-probabilities of its tokens. The first one is conditioned on the start of
a document in training: the tokens that the tokenizer puts before a text, or the token between documents. If the
tokenizer has neither, the first token has no condition and is not scored, nor are tokens after the sentence. Sums are
not divided by lengths, as in Warstadt et al. (arXiv 1912.00582).

Sentences of one length form a batch without padding, because with granularity `tensor` activations, keys and values
would share one scale with the padding. They still share it with all sentences of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from scantling.errors import UserError
from scantling.eval_mode import eval_mode
from scantling.numerics.device import autocast
from scantling.tensor.layer import keep_merged
from scantling.trainer.data.blimp import MinimalPair, read_pairs
from scantling.trainer.data.prepare import document_marks
from scantling.trainer.data.tokenizers import Ids, Tokenizer
from scantling.trainer.tasks.base import model_config
from scantling.trainer.training.evaluate import fixed_rng
from scantling.trainer.training.trained_run import open_run

logger = logging.getLogger(__name__)

BATCH_TOKENS = 16384
BATCH_LOGITS = 1 << 26
"""Maximum number of elements in the logits of one batch."""

Metrics = dict[str, Any]


def evaluate_pairs(
    run_dir: str | Path, files: Sequence[str], *, limit: int | None = None, device: str | None = None
) -> Metrics:
    """Score minimal pairs with the newest complete checkpoint of a run.

    Args:
        run_dir: the directory of a run of the task causal-lm.
        files: as of `read_pairs`.
        limit: number of pairs, evenly spread over all. Default: all.
        device: auto, cpu or cuda. Default: `train.device` of its recipe.

    Returns:
        `step`, and `accuracy`, `interval` (95 %, Wilson), `correct` and `count` of all pairs; the same for each one in
        `phenomena` and `paradigms`.

    Raises:
        UserError: no such run, a run of another task, pairs that cannot be read, or a sentence longer than the context.
    """
    pairs = read_pairs(files)
    if limit is not None and limit < len(pairs):
        pairs = [pairs[index * len(pairs) // limit] for index in range(limit)]
    reason = "minimal pairs need a causal language model, which gives each sentence a probability"
    with open_run(run_dir, device=device, causal=reason) as run:
        tokenizer, seq_len = run.data.tokenizer, run.recipe.data.seq_len
        if tokenizer is None:
            raise UserError(f"{run_dir} was trained on token ids (data.bin); name their tokenizer in data.tokenizer")
        longest = max(map(len, tokenizer.encode_batch([text for pair in pairs for text in (pair.good, pair.bad)])))
        if longest > seq_len:
            logger.warning(
                "the longest sentence has %d tokens; the run was trained on sequences of %d", longest, seq_len
            )
        compute = run.recipe.precision.autocast(run.context.device.type)
        return {"step": run.step, **tally(pairs, prefers_good(run.model, tokenizer, pairs, compute=compute))}


def prefers_good(
    model: torch.nn.Module, tokenizer: Tokenizer, pairs: Sequence[MinimalPair], *, compute: str = "fp32"
) -> npt.NDArray[np.bool_]:
    """Return True for each pair whose good sentence is strictly more probable, (pairs,).

    Raises:
        UserError: a sentence is longer than the model's context.
    """
    prefix = document_marks(tokenizer).first
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    encoded = tokenizer.encode_batch(texts)
    # (2 * pairs,) -> (pairs, 2): good, bad
    scores = log_probabilities(model, encoded, prefix=prefix, compute=compute).reshape(-1, 2)
    return np.asarray(scores[:, 0] > scores[:, 1])


@torch.no_grad()
def log_probabilities(
    model: torch.nn.Module, sentences: Sequence[Ids], *, prefix: Sequence[int], compute: str = "fp32"
) -> npt.NDArray[np.float64]:
    """Return the log-probability of each sentence in nats, (sentences,); the model's mode is restored.

    Args:
        model: a causal language model of transformers.
        sentences: ids, without special tokens.
        prefix: ids before the first token; without any, the first token is not scored.
        compute: format of matrix products, as in a recipe.

    Raises:
        UserError: a sentence is longer than the model's context.
    """
    rows = [np.concatenate([prefix, ids]).astype(np.int64) for ids in sentences]
    # position i predicts token i + 1: the first `before` predictions are tokens of the prefix
    before = max(len(prefix) - 1, 0)
    config = model_config(model).get_text_config()
    max_length = getattr(config, "max_position_embeddings", None)
    longest = max(map(len, rows), default=1) - 1  # the last token is only predicted
    if max_length is not None and longest > max_length:
        raise UserError(
            f"a sentence of {longest} tokens is longer than the model's context of {max_length}; leave it out"
        )
    device = next(model.parameters()).device
    scores = np.zeros(len(rows))
    with eval_mode(model), fixed_rng(device), keep_merged(model):
        # rows of a batch have one length: (batch, length + 1) ids, whose last one is only predicted
        for chosen in _batches([len(row) - 1 for row in rows], config.vocab_size):
            ids = torch.from_numpy(np.stack([rows[number] for number in chosen])).to(device)  # (batch, length + 1)
            with autocast(compute, device):
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            # (batch, length, vocab) -> (batch, vocab, length), because `cross_entropy` wants classes second
            nats = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")  # (batch, length)
            scores[chosen] = -nats[:, before:].double().sum(1).cpu().numpy()
    return scores


def _batches(lengths: Sequence[int], vocab_size: int) -> Iterator[list[int]]:
    """Yield batches of indices of sentences of one length; sentences without a token are skipped."""
    # with a large vocabulary the logits limit the batch, not the tokens
    budget = max(1, min(BATCH_TOKENS, BATCH_LOGITS // vocab_size))
    batch: list[int] = []
    for number in sorted((number for number, length in enumerate(lengths) if length > 0), key=lambda n: lengths[n]):
        if batch and (lengths[number] != lengths[batch[0]] or (len(batch) + 1) * lengths[number] > budget):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def tally(pairs: Sequence[MinimalPair], right: npt.NDArray[np.bool_]) -> Metrics:
    """Return accuracies with their intervals: of all pairs, and by phenomenon and paradigm in order of their names."""
    return {
        **_accuracy(right),
        "phenomena": _accuracy_by([pair.phenomenon for pair in pairs], right),
        "paradigms": _accuracy_by([pair.paradigm for pair in pairs], right),
    }


def _accuracy_by(names: Sequence[str], right: npt.NDArray[np.bool_]) -> dict[str, Metrics]:
    by_pair = np.array(names)
    return {str(name): _accuracy(right[by_pair == name]) for name in np.unique(by_pair)}


def _accuracy(right: npt.NDArray[np.bool_]) -> Metrics:
    from scipy.stats import binomtest

    correct, count = int(right.sum()), len(right)
    # Wilson's interval also holds for few pairs and near 0 % or 100 %
    interval = binomtest(correct, count).proportion_ci(method="wilson")
    return {
        "accuracy": correct / count,
        "interval": [float(interval.low), float(interval.high)],
        "correct": correct,
        "count": count,
    }
