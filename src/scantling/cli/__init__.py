"""The command line. `main` is its one door: it turns errors into messages and exit codes."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    0 done, 2 bad input, 3 stopped by a signal after saving, 1 anything else. (torchrun reports 1 for any of them.)
    """
    leave(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from scantling.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal or a file that is not of UTF-8
    try:
        with _reporting():
            given = list(arguments) if arguments is not None else None
            code = app(given, prog_name="scantling", standalone_mode=False)
            if code == 130:  # what some versions of typer make of a KeyboardInterrupt
                raise KeyboardInterrupt
            return code if isinstance(code, int) else 0
    except BaseException as error:
        known = _exit_code(error)
        if known is None:
            raise
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return known


@contextmanager
def _reporting() -> Iterator[None]:
    """Context that prints an error; one of several processes also tells the others."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    is_launched = all((os.environ.get(name) or "1").isdecimal() for name in names)  # else the command says so
    if is_launched and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        from scantling.training.peers import telling

        with telling(_report):
            yield
        return
    try:
        yield
    except BaseException as error:
        _report(error)
        raise


def _exit_code(error: BaseException) -> int | None:
    """Return the exit code of an error that users can cause, or None for any other."""
    import typer

    from scantling.errors import ScantlingError

    if isinstance(error, ScantlingError):
        return error.exit_code
    if isinstance(error, _usage_error()):
        return 2
    if isinstance(error, KeyboardInterrupt | typer.Abort | BrokenPipeError):
        return 1
    return 2 if isinstance(error, OSError) and error.filename is not None else None


def _usage_error() -> Any:
    """Return click's base of all errors of usage, whichever click this typer carries."""
    import typer

    return typer.BadParameter.__mro__[2]


def _report(error: BaseException) -> None:
    import typer

    from scantling.errors import ScantlingError

    if isinstance(error, ScantlingError):
        where = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        _print_error(f"scantling: error{where}: {error}")
    elif isinstance(error, _usage_error()):
        error.show()
    elif isinstance(error, KeyboardInterrupt | typer.Abort):
        print("scantling: interrupted; a run goes on from its newest checkpoint with --resume", file=sys.stderr)
    elif isinstance(error, OSError) and error.filename is not None and not isinstance(error, BrokenPipeError):
        _print_error(f"scantling: error: {error.filename}: {error.strerror}")


def _print_error(text: str) -> None:
    """Print to the standard error; on a terminal lines break between words."""
    if sys.stderr.isatty():
        from scantling.reporting.format import fold_lines

        text = fold_lines(text, shutil.get_terminal_size().columns)
    print(text, file=sys.stderr)


def leave(code: int) -> None:
    """End the process with `code`.

    One of several processes leaves without the interpreter's shutdown, in which a gloo thread can abort although all
    work is done (PyTorch 2.13), and turn a finished run into a failed one.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
