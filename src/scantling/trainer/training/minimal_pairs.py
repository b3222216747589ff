"""How often a language model finds the acceptable sentence of a minimal pair more probable than the other.

The score of a sentence is the sum of the log-probabilities of its tokens. The first one is conditioned on what stands
before a document in training: what the tokenizer puts before a text, or the token between documents. If the tokenizer
has neither, the first token has nothing before it and is left out. What follows a sentence is not scored. Sums are not
divided by lengths, as in Warstadt et al. (arXiv 1912.00582).

Sentences of one length go through the model together, without padding: with granularity `tensor`, activations, keys and
values share one scale with the padding. They still share it with all sentences of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
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
from scantling.trainer.training.evaluate import same_draws
from scantling.trainer.training.trained import opened

logger = logging.getLogger(__name__)

BATCH_TOKENS = 16384
BATCH_LOGITS = 1 << 26
"""Most numbers in the logits of one batch."""

Figures = dict[str, Any]


def evaluate_pairs(
    run_dir: str | Path, files: Sequence[str], *, limit: int | None = None, device: str | None = None
) -> Figures:
    """Score minimal pairs with the newest whole checkpoint of a run.

    Args:
        run_dir: the directory of a run of the task causal-lm.
        files: as of `read_pairs`.
        limit: of pairs, evenly spread over all. Default: none is left out.
        device: auto, cpu or cuda. Default: what its recipe names.

    Returns:
        `step`, and `accuracy`, `interval` (95 %, Wilson), `correct` and `count` of all pairs; the same of each under
        `phenomena` and `paradigms`.

    Raises:
        UserError: no such run, a run of another task, pairs that cannot be read, a sentence longer than the max_length.
    """
    pairs = read_pairs(files)
    if limit is not None and limit < len(pairs):
        pairs = [pairs[index * len(pairs) // limit] for index in range(limit)]
    wanted = "minimal pairs want a causal language model, which gives each sentence a probability"
    with opened(run_dir, device=device, causal=wanted) as run:
        tokenizer, seq_len = run.data.tokenizer, run.recipe.data.seq_len
        if tokenizer is None:
            raise UserError(f"{run_dir} was trained on ids alone (data.bin); name their tokenizer in data.tokenizer")
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
    """Whether the model finds the good sentence of each pair strictly more probable, (pairs,).

    Raises:
        UserError: a sentence is longer than the model's context.
    """
    prefix = document_marks(tokenizer).first
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    encoded = tokenizer.encode_batch(texts)
    scores = log_probabilities(model, encoded, prefix=prefix, compute=compute).reshape(-1, 2)
    return np.asarray(scores[:, 0] > scores[:, 1])


@torch.no_grad()
def log_probabilities(
    model: torch.nn.Module, sentences: Sequence[Ids], *, prefix: Sequence[int], compute: str = "fp32"
) -> npt.NDArray[np.float64]:
    """The log-probability of each sentence in nats, (sentences,); the model's mode is put back.

    Args:
        model: a causal language model of transformers.
        sentences: ids, without special tokens.
        prefix: ids on which the first token is conditioned; without any the first token is left out.
        compute: format of matrix products, as in a recipe.

    Raises:
        UserError: a sentence is longer than the model's context.
    """
    rows = [np.concatenate([prefix, ids]).astype(np.int64) for ids in sentences]
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
    with eval_mode(model), same_draws(device), keep_merged(model):
        for chosen in _batches([len(row) - 1 for row in rows], config.vocab_size):
            ids = torch.from_numpy(np.stack([rows[number] for number in chosen])).to(device)  # (batch, length + 1)
            with autocast(compute, device):
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            nats = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")  # (batch, length)
            scores[chosen] = -nats[:, before:].double().sum(1).cpu().numpy()
    return scores


def _batches(lengths: Sequence[int], vocab_size: int) -> Iterator[list[int]]:
    """Numbers of sentences of one length, as many as fit into a batch; those without a token are left out."""
    budget = max(1, min(BATCH_TOKENS, BATCH_LOGITS // vocab_size))
    batch: list[int] = []
    for number in sorted((number for number, length in enumerate(lengths) if length > 0), key=lambda n: lengths[n]):
        if batch and (lengths[number] != lengths[batch[0]] or (len(batch) + 1) * lengths[number] > budget):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def tally(pairs: Sequence[MinimalPair], right: npt.NDArray[np.bool_]) -> Figures:
    """Accuracies with their intervals, of all pairs and by phenomenon and paradigm, in the order of their names."""
    return {
        **_share(right),
        "phenomena": _by(pairs, right, lambda pair: pair.phenomenon),
        "paradigms": _by(pairs, right, lambda pair: pair.paradigm),
    }


def _by(
    pairs: Sequence[MinimalPair], right: npt.NDArray[np.bool_], name_of: Callable[[MinimalPair], str]
) -> dict[str, Figures]:
    names = np.array([name_of(pair) for pair in pairs])
    return {str(name): _share(right[names == name]) for name in np.unique(names)}


def _share(right: npt.NDArray[np.bool_]) -> Figures:
    from scipy.stats import binomtest

    correct, count = int(right.sum()), len(right)
    interval = binomtest(correct, count).proportion_ci(method="wilson")
    return {
        "accuracy": correct / count,
        "interval": [float(interval.low), float(interval.high)],
        "correct": correct,
        "count": count,
    }
