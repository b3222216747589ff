"""Stop a run on SIGTERM, SIGINT or SIGHUP after its current step, with a checkpoint; on a second one at once.

Rapid repeated Ctrl-C counts as one request, so that it does not interrupt the checkpoint that it asked for.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

BURST_S = 1.0
"""A Ctrl-C within this time after another one is the same request."""
# time of the last Ctrl-C that counted; initially so early that the first one counts
_counted = -BURST_S
_is_interrupted = False


def _begins_burst() -> bool:
    """Return True if a Ctrl-C is the first of a burst, and start that burst."""
    global _counted
    now = time.monotonic()
    if now - _counted < BURST_S:
        return False
    _counted = now
    return True


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once for a burst of Ctrl-C, so that no further one interrupts the cleanup."""
    global _is_interrupted
    if _begins_burst():
        _is_interrupted = True
        raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Return True if `interrupt` has raised; imports of other libraries turn a KeyboardInterrupt into other errors."""
    return _is_interrupted


class StopSignal:
    """Context in which the first of these signals only sets `received`; later signals get the old handlers.

    The handler of SIGINT stays until a Ctrl-C of another burst. Ignored signals, such as SIGHUP under `nohup`, stay
    ignored.

    Args:
        again: handler of later signals instead of the old ones.
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
        if number == signal.SIGINT and not _begins_burst():
            return
        if self.received is not None:  # a second SIGINT
            handler = self._again or self._before[signal.SIGINT]
            signal.signal(number, handler)
            # `interrupt` would ignore this Ctrl-C, because `_begins_burst` has just counted it
            if handler is interrupt:
                raise KeyboardInterrupt
            signal.raise_signal(number)
            return
        # the first signal: later ones get the old handlers, except a Ctrl-C of the same burst
        self.received = signal.Signals(number)
        for each, before in self._before.items():
            if each != signal.SIGINT:
                signal.signal(each, self._again or before)
