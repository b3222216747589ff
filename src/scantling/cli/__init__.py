"""The command line. `main` is its one door: it turns errors into messages and exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    0 done, 2 bad input, 3 stopped by a signal after saving, 1 anything else. (torchrun reports 1 for any of them.)
    """
    leave(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    import typer

    from scantling.cli.app import app
    from scantling.errors import ScantlingError, UserError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal or a file that is not of UTF-8
    # click's base of all errors of usage, whichever click this typer carries
    usage_error: type[Any] = typer.BadParameter.__mro__[2]
    try:
        given = list(arguments) if arguments is not None else None
        code = app(given, prog_name="scantling", standalone_mode=False)
        if code == 130:  # what some versions of typer make of a KeyboardInterrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except usage_error as error:
        error.show()
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("scantling: interrupted; a run goes on from its newest checkpoint with --resume", file=sys.stderr)
        return 1
    except ScantlingError as error:
        rank = os.environ.get("RANK", "0")
        # what all ranks found is said once on every machine
        if os.environ.get("LOCAL_RANK", "0") == "0" or not isinstance(error, UserError):
            where = f" (rank {rank})" if "RANK" in os.environ else ""
            print(f"scantling: error{where}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"scantling: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


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
