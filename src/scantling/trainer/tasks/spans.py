"""Span corruption: the objective of T5, which hides some spans of a text and predicts them.

Source: Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer", JMLR 2020,
arXiv 1910.10683, section 3.1.4 and figure 2: 15 % of the tokens, in spans of 3 tokens on average.

    text     Thank you for inviting me to your party last week
    input    Thank you <0> me to your party <1> week
    target   <0> for inviting <1> last </s>

Kept and hidden parts alternate, starting with a kept part. The boundaries of each are random and uniformly
distributed, as in the authors' code. All windows of the same length have the same number of hidden tokens and of
spans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scantling.trainer.data.hashing import key64, permutation

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Amount of text to hide.

    Attributes:
        share: share of the tokens to hide, between 0 and 1; at least one token is hidden and, of two or more, one kept.
        mean: average tokens per span, at least 1.
    """

    share: float
    mean: float

    def counts(self, length: int) -> tuple[int, int]:
        """Return the number of hidden tokens and of spans in a window of `length` tokens."""
        hidden = max(1, min(round(length * self.share), length - 1))
        return hidden, max(1, min(round(hidden / self.mean), length - hidden))

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the lengths of the input, without special tokens, and of the target, including its end token."""
        hidden, spans = self.counts(length)
        return length - hidden + spans, hidden + spans + 1

    def window(self, input_len: int, target_len: int) -> int:
        """Return the longest window whose input and target have at most these lengths; 0 if none fits."""
        length = 0
        while True:
            inputs, targets = self.lengths(length + 1)
            if inputs > input_len or targets > target_len:
                return length
            length += 1

    def corrupt(self, window: Tokens, sentinels: Tokens, end: int, *, key: tuple[int, ...]) -> tuple[Tokens, Tokens]:
        """Hide spans of a window.

        Args:
            window: ids, (length,).
            sentinels: the id that replaces each span, in order; at least as many as spans.
            end: the id that ends the target.
            key: integers that determine the spans; nothing else does.

        Returns:
            The input and the target.
        """
        hidden, spans = self.counts(len(window))
        # Separate keys, so that the lengths of kept and of hidden parts are independent.
        kept_lengths = _random_lengths(len(window) - hidden, spans, key64("kept", *key))
        hidden_lengths = _random_lengths(hidden, spans, key64("hidden", *key))
        # kept, hidden, kept, hidden, ...: (spans, 2) -> (2 * spans,)
        ends = np.cumsum(np.stack([kept_lengths, hidden_lengths], axis=1).ravel())
        parts = np.split(window, ends[:-1])
        marks = np.split(sentinels[:spans], spans)
        # The input has a sentinel after each kept part, the target one before each hidden part.
        inputs = [piece for part, mark in zip(parts[0::2], marks, strict=True) for piece in (part, mark)]
        targets = [piece for mark, part in zip(marks, parts[1::2], strict=True) for piece in (mark, part)]
        return np.concatenate(inputs), np.concatenate([*targets, np.array([end], dtype=np.int64)])


def _random_lengths(total: int, parts: int, key: int) -> Tokens:
    """Return random lengths of at least 1 that sum to `total`, (parts,); with `total` 0, one part may be empty."""
    # parts - 1 distinct cuts out of 1 .. total - 1: all compositions are equally likely.
    cuts = np.sort(permutation(max(total - 1, 0), key)[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)
