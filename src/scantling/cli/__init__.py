"""The command line. `main` is its entry point: it converts errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

INTERRUPTED = 130
"""Exit code after Ctrl-C, the same as a shell's."""
NEEDED = ("typer", "rich", "pydantic", "yaml", "transformers", "datasets", "matplotlib", "scipy")
"""Modules that the commands import; `scantling[train]` installs them."""
_lost_output: OSError | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its exit code.

    0 done, 2 bad input, 3 stopped by a signal after saving, 130 interrupted, 1 anything else. (torchrun reports 1 for
    any of them.)
    """
    from scantling.trainer.training.signals import interrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    for number in (0, 1, 2):  # if one is closed, the next opened file would get its number
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    leave(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        _say(f'scantling: error: {", ".join(missing)} not installed; run: pip install "scantling[train]"')
        return 1
    try:
        with _reporting():
            code = _invoke(arguments)
    except BaseException as error:
        known = _exit_code(error)
        if known is None:
            raise
        code = known
    return _close_output(code)


def _invoke(arguments: Sequence[str] | None) -> int:
    from scantling.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the stream may not be UTF-8
    given = list(arguments) if arguments is not None else None
    code = app(given, prog_name="scantling", standalone_mode=False)
    if code == INTERRUPTED:  # some versions of typer convert a KeyboardInterrupt to this code
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


@contextmanager
def _reporting() -> Iterator[None]:
    """Print an error that is raised inside; one of several processes also reports it to the others."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    is_valid = all((os.environ.get(name) or "1").isdecimal() for name in names)  # otherwise the command reports it
    if is_valid and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        from scantling.distributed.peers import report_errors_to_peers

        with report_errors_to_peers(_report):
            yield
        return
    try:
        yield
    except BaseException as error:
        _report(error)
        raise


_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that are not caused by the given path."""


def _exit_code(error: BaseException) -> int | None:
    """Return the exit code of an error that users can cause, or None for any other."""
    import typer

    from scantling.errors import ScantlingError

    if isinstance(error, ScantlingError):
        return error.exit_code
    if isinstance(error, _usage_error()):
        return 2
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, OSError):
        return 2 if error.filename is not None and error.errno not in _MACHINE else 1
    return INTERRUPTED if _broke_by_interrupt(error) else None


def _broke_by_interrupt(error: BaseException) -> bool:
    from scantling.trainer.training.signals import was_interrupted

    return isinstance(error, Exception) and was_interrupted()


def _usage_error() -> Any:
    """Return `ClickException`, the base class of usage errors, of click or of the copy of click in newer typers."""
    import typer

    return next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _report(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        _ignore_interrupts()
    import typer

    from scantling.errors import ScantlingError

    if isinstance(error, ScantlingError):
        where = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        _say(f"scantling: error{where}: {error}")
    elif isinstance(error, _usage_error()):
        with contextlib.suppress(OSError):
            error.show()
    elif isinstance(error, KeyboardInterrupt | typer.Abort):
        _say("scantling: interrupted; continue a run from its newest checkpoint with --resume")
    elif isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        where = "cannot write" if error.filename is None else error.filename
        _say(f"scantling: error: {where}: {error.strerror or error}")
    elif _broke_by_interrupt(error):
        _report(KeyboardInterrupt())


def _ignore_interrupts() -> None:
    """Ignore further Ctrl-C signals while an interrupted process ends."""
    from scantling.trainer.training.signals import interrupt

    if signal.getsignal(signal.SIGINT) is interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _say(text: str) -> None:
    """Print to the standard error, if possible; on a terminal, wrap lines between words."""
    with contextlib.suppress(OSError, AttributeError):
        if sys.stderr.isatty():
            from scantling.trainer.reporting.format import fold_lines

            text = fold_lines(text, shutil.get_terminal_size().columns)
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def report_lost_output(error: OSError) -> None:
    """Record that output could not be written; `run` reports it at the end."""
    global _lost_output
    _lost_output = error


def _close_output(code: int) -> int:
    """Flush the output and return the exit code: 1 if output was lost although the command succeeded."""
    global _lost_output
    from scantling.errors import EXIT_STOPPED

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if stream is sys.stdout:
                _lost_output = error
            with contextlib.suppress(OSError, ValueError):  # or the interpreter would flush again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (AttributeError, ValueError):  # missing or closed stream
            pass
    lost, _lost_output = _lost_output, None
    if lost is None:
        return code
    is_reported = code not in (0, EXIT_STOPPED)  # one line is enough
    if not is_reported and not isinstance(lost, BrokenPipeError):  # a closed pipe, as by `head`, is no error
        _say(f"scantling: error: cannot write to the standard output: {lost.strerror or lost}")
    return code or 1


def leave(code: int) -> None:
    """End the process with `code`.

    One of several processes exits without the interpreter's shutdown: a gloo thread can abort in it although all work
    is done (PyTorch 2.13), which would turn a finished run into a failed one.
    """
    _ignore_interrupts()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(code)
    sys.exit(code)
