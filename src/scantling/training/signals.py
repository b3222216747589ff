"""SIGTERM, SIGINT and SIGHUP end a run after the step it is in, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignal:
    """Context in which the first of these signals only sets `received`; then the old handlers come back.

    One that is ignored, as `nohup` ignores SIGHUP, stays so.

    Args:
        again: the handler of further ones, in place of the old ones.
    """

    def __init__(self, again: Any = None) -> None:
        self.received: signal.Signals | None = None
        self._again = again
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for each, before in self._before.items():
            signal.signal(each, self._again or before)
