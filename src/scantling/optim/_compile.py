"""Compiles C code into a shared library, once per machine: the library stays in a private cache folder.

The folder is `native` in the cache folder, with mode 0700. A library's name holds a hash of its source, the flags, the
compiler's version and the CPU, and the SHA-256 of the library. A library is loaded only if this user owns the folder
and the file, if nobody else may write them, and if the SHA-256 is right.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scantling.errors import first_line
from scantling.files import cache_root, fsync

logger = logging.getLogger(__name__)

_TIMEOUT_S = 120
_LIBRARIES = ("-lm", "-lpthread")


class CompileError(Exception):
    """The library cannot be compiled or loaded; the message says why."""


def load_library(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Load the library of one C file, compiled by `$CC` or `cc` if it is not in the cache.

    Without a usable cache folder the library is compiled into a temporary folder, for this process alone.

    Args:
        source: the C file.
        flags: of the compiler.

    Raises:
        CompileError: there is no compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    compiler = compiler and os.path.abspath(compiler)
    if compiler is None:
        raise CompileError("there is no C compiler (cc, or what CC names)")
    # Look in the cache without the lock first: that is the common case.
    folder = cache_root() / "native"
    try:
        key = f"{source.stem}-{_key(source, compiler, flags)}"
        with _private_folder(folder) as opened:
            library = _load_cached(opened, key)
            if library is not None:
                return library
            from filelock import FileLock  # slow to import, and rarely needed

            with FileLock(opened / "lock", timeout=_TIMEOUT_S, mode=0o600):  # one process compiles
                # Another process may have compiled it while this one waited for the lock.
                library = _load_cached(opened, key)
                if library is None:
                    _compile_into(opened, key, source, compiler, flags)
                    library = _load_cached(opened, key)
        if library is not None:
            return library
        reason = "the compiled library is not readable there"
    except OSError as error:
        reason = error.strerror or str(error)
    logger.warning("cannot keep the compiled CAME step in %s (%s); compiling it for this process alone", folder, reason)
    try:
        with tempfile.TemporaryDirectory(prefix="scantling-") as temporary:
            return ctypes.CDLL(str(_compile(Path(temporary), source, compiler, flags)))
    except OSError as error:
        raise CompileError(f"{compiler}: {error}") from None


def _key(source: Path, compiler: str, flags: Sequence[str]) -> str:
    """Return a hash of everything the compiled code depends on; `-march=native` depends on the CPU's features."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S).stdout
    except subprocess.TimeoutExpired:
        raise CompileError(f"{compiler} --version does not end") from None
    cpu = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        named = ("model name", "cpu family", "model", "stepping", "flags", "features", "cpu part", "cpu implementer")
        cpu = "\n".join(sorted({line for line in lines if line.split(":")[0].strip().lower() in named}))
    texts = map(os.fsencode, (compiler, *flags, platform.machine(), cpu))
    digest = hashlib.sha256()
    # With its length, no part can run into the next one.
    for part in (source.read_bytes(), version, *texts):
        digest.update(f"{len(part)}:".encode() + part)
    return digest.hexdigest()[:32]


@contextmanager
def _private_folder(folder: Path) -> Iterator[Path]:
    """Make the folder if necessary and check that it is a folder of this user that others may not write or read.

    Yields:
        A path through the open folder: it stays the folder that was checked, whatever others do to its parents.

    Raises:
        OSError: it is something else.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # Check the folder through a handle, so that it cannot be replaced between the check and the use.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(
                0,
                f"it has owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):o}; remove it, or chmod it to 700",
            )
        opened = Path(f"/proc/self/fd/{handle}")
        # Without /proc use the path itself, which could be replaced.
        yield opened if opened.exists() else folder
    finally:
        os.close(handle)


def _load_cached(folder: Path, key: str) -> ctypes.CDLL | None:
    """Load the library of this key, or return None; a damaged library is removed."""
    # The name ends with the SHA-256 of the file: a library that was changed or cut off is removed.
    for path in folder.glob(f"{key}.*.so"):
        try:
            # Follow no link, and do not block if the file is a pipe.
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        with open(handle, "rb") as file:
            found = os.fstat(handle)
            is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
            if is_ours and path.name.split(".")[-2] == hashlib.file_digest(file, "sha256").hexdigest():
                return ctypes.CDLL(str(path))
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _compile_into(folder: Path, key: str, source: Path, compiler: str, flags: Sequence[str]) -> None:
    """Compile and publish the library; the caller holds the lock, so every temporary folder is of a dead process."""
    for stale in folder.glob("tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    # Compile aside, sync and rename: a reader never sees half a library.
    temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=folder))
    try:
        library = _compile(temporary, source, compiler, flags)
        # `_load_cached` refuses a library that others may write, whatever the umask was.
        library.chmod(0o700)
        fsync(library)
        with open(library, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.replace(library, folder / f"{key}.{digest}.so")
        fsync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _compile(folder: Path, source: Path, compiler: str, flags: Sequence[str]) -> Path:
    target = folder / f"{source.stem}.so"
    command = [compiler, *flags, "-o", target.name, str(source.absolute()), *_LIBRARIES]
    try:
        # TMPDIR: a compiler that is killed leaves its own temporary files there
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            cwd=folder,
            env={**os.environ, "TMPDIR": "."},
        )
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{compiler} failed: {first_line(error.stderr)}") from None
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{compiler}: {error}") from None
    return target
