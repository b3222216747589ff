"""Train a byte-level BPE on the training documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scantling.errors import UserError
from scantling.trainer.data.cache import FORMAT, Cache
from scantling.trainer.data.documents import Scan, Source
from scantling.trainer.data.files import refuse_changed
from scantling.trainer.data.hashing import fingerprint, fingerprint_array, key64, mix64
from scantling.trainer.data.progress import Progress
from scantling.trainer.data.split import TRAIN, Sides
from scantling.trainer.data.tokenizers import SPECIALS, FastTokenizer, finish_backend, named_specials

SAMPLE_BYTES = 5_000_000
"""UTF-8 bytes of the text a BPE is trained on: training documents in the order of a hash; the last one is truncated."""


def train_bpe(
    vocab_size: int, source: Source, scan: Scan, sides: Sides, cache: Cache, progress: Progress, *, wrap: bool = False
) -> FastTokenizer:
    """Return a byte-level BPE with exactly `vocab_size` ids, cached or newly trained.

    Args:
        vocab_size: number of ids, including 256 bytes and the special tokens, so at least 261.
        source: the documents.
        scan: the scan of the documents.
        sides: which documents are for training; no others are read.
        cache: stores the tokenizer.
        progress: receives the number of bytes read.
        wrap: see `finish_backend`.

    Raises:
        UserError: the documents yield fewer ids than `vocab_size`.
    """
    from tokenizers import Tokenizer as Backend

    used = np.flatnonzero(sides == TRAIN)
    used = used[np.argsort(mix64(scan.digests[used], key64("bpe")), kind="stable")]
    enough = int(np.searchsorted(np.cumsum(scan.sizes[used]), SAMPLE_BYTES)) + 1
    sample = np.zeros(len(scan), dtype=bool)
    sample[used[:enough]] = True
    settings = [SAMPLE_BYTES, vocab_size, wrap]
    key = fingerprint(["bpe of bytes", FORMAT, *settings, scan.content, fingerprint_array(sample)])

    def make(folder: Path) -> dict[str, Any]:
        total = min(SAMPLE_BYTES, int(scan.sizes[sample].sum()))
        progress.start(f"training a BPE of {vocab_size} on {source.name}", total)
        try:
            backend = _train(vocab_size, _texts(source, sample, progress))
        finally:
            progress.finish()
        refuse_changed(source.name, scan.stamp, source.stamp())
        num_ids = backend.get_vocab_size()
        if num_ids < vocab_size:
            raise UserError(
                f"data.tokenizer.bpe: the training documents give only {num_ids} tokens, not {vocab_size}; "
                f"set it to {num_ids} or less, or give more text"
            )
        backend = finish_backend(backend, use_regex=True, wrap=wrap)
        (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
        return {"sample_bytes": total}

    entry = cache.get("tokenizers", key, make)
    backend = Backend.from_str((entry.path / "tokenizer.json").read_text(encoding="utf-8"))
    return FastTokenizer(backend, named_specials(wrap=wrap), f"bpe {vocab_size}")


def _train(vocab_size: int, texts: Iterator[str]) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _texts(source: Source, sample: np.ndarray[Any, np.dtype[np.bool_]], progress: Progress) -> Iterator[str]:
    """Yield the text of the sampled documents, at most `SAMPLE_BYTES` of UTF-8 in total."""
    document, remaining = 0, SAMPLE_BYTES
    for piece in source.pieces():
        if document == len(sample):
            return  # the source has grown since its scan; `make` raises
        if sample[document]:
            for text in (piece.text, piece.pair):
                if text and remaining > 0:
                    encoded = text.encode()
                    kept = encoded[:remaining]
                    # errors="ignore" drops a character that the cut splits.
                    yield kept.decode(errors="ignore")
                    remaining -= len(encoded)
                    progress.advance(len(kept))
        document += piece.last
        if remaining <= 0:
            return
