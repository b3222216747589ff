"""Language-model windows over streams of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from scantling.errors import UserError
from scantling.trainer.data.store import MappedArray


class Dataset(Protocol):
    """Examples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class WindowDataset:
    """Windows of `length` tokens, one every `stride` tokens, over one or more streams; none crosses two streams.

    With `length = stride + 1`, every token except the first of a stream is predicted from its predecessors exactly
    once.

    Args:
        streams: token ids.
        length: tokens in a window.
        stride: distance between the starts of two windows.
        partial: keep the shorter window at the end of each stream, so that no target is lost.
    """

    def __init__(self, streams: Sequence[MappedArray], *, length: int, stride: int, partial: bool) -> None:
        self.streams, self.length, self.stride = list(streams), length, stride
        # A window shares its last `overlap` tokens with the next window.
        overlap = length - stride
        if partial:
            # ceil((tokens - overlap) / stride)
            counts = [max(0, -(-(len(stream) - overlap) // stride)) for stream in self.streams]
        else:
            counts = [max(0, (len(stream) - overlap) // stride) for stream in self.streams]
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of window `index`, of shape (length,), or shorter for a partial window."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        # A stream without windows ends where the stream before it ends; side="right" skips it.
        stream = int(np.searchsorted(self._ends, index, side="right"))
        if stream:
            index -= int(self._ends[stream - 1])
        begin = index * self.stride
        # int64, because embedding layers of PyTorch do not take uint16 or uint32 ids.
        window: npt.NDArray[np.int64] = self.streams[stream][begin : begin + self.length].astype(np.int64)
        return window


def training_windows(streams: Sequence[MappedArray], *, length: int, stride: int, seq_len: int) -> WindowDataset:
    """Return the complete windows of the training streams; raise if the data is shorter than one."""
    windows = WindowDataset(streams, length=length, stride=stride, partial=False)
    if len(windows) == 0:
        tokens = max(len(stream) for stream in streams)
        raise UserError(
            f"the training data is shorter than one sequence: {tokens} tokens, and data.seq_len is {seq_len}; "
            "give more text or a smaller data.seq_len"
        )
    return windows


def document_positions(windows: npt.NDArray[np.int64], start_id: int) -> npt.NDArray[np.int64]:
    """Return the position of each token in its document, counted from the window's start or the last document start.

    An end-of-text token between two documents belongs to the second: the document's first token is predicted from it.
    The first document's last token predicts it but does not attend to it.

    Args:
        windows: ids, (batch, seq_len).
        start_id: the token with which a document starts, or the token between documents.

    Returns:
        Positions, (batch, seq_len). transformers limits attention to each run of consecutive positions.
    """
    # (seq_len,) -> (batch, seq_len), without a copy
    positions = np.broadcast_to(np.arange(windows.shape[1]), windows.shape)
    # The running maximum is the start of the current document at each position.
    begins = np.where(windows == start_id, positions, 0)
    return positions - np.maximum.accumulate(begins, axis=1)
