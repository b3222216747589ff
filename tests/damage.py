"""Seeded damage to the files of a folder, for tests of their readers."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scantling.errors import UserError
from scantling.trainer.training.checkpoint import verify_checkpoint

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31 - 1, 2**31, 2**63, 10**30, 10**400, 0.5, 1e300, float("nan"), float("inf")),
    *("", "x", "\ud800", "bytes", "../x", "a" * 300, [], [1], [None], ["x"], {}, {"a": 1}, {"": []}, [[[[]]]]),
)


def damage(folder: Path, seed: int, files: list[str] | None = None) -> str:
    """Damage one file of a folder, and return a description.

    Args:
        folder: folder to change.
        seed: seed of the choice.
        files: files to choose from; all by default.
    """
    source = random.Random(seed)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    name = source.choice(files or names)
    path = folder / name
    kinds = [
        _missing,
        _folder_instead,
        _link_to_itself,
        _pipe_instead,
        _empty,
        _truncated,
        _flipped,
        _overwritten,
        _text_before,
    ]
    if path.suffix == ".json":
        kinds += [_other_value] * 12 + [_other_root, _deep, _long_number, _other_key, _other_key]
    kind = source.choice(kinds)
    return f"{name}: {kind.__name__} {kind(path, source)}"


def _missing(path: Path, source: random.Random) -> str:
    path.unlink()
    return ""


def _folder_instead(path: Path, source: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return ""


def _link_to_itself(path: Path, source: random.Random) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return ""


def _pipe_instead(path: Path, source: random.Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return ""


def _empty(path: Path, source: random.Random) -> str:
    path.write_bytes(b"")
    return ""


def _truncated(path: Path, source: random.Random) -> str:
    size = source.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"to {size}"


def _flipped(path: Path, source: random.Random) -> str:
    content = bytearray(path.read_bytes())
    limit = source.choice([len(content), min(len(content), 300)])  # damages headers too
    i, value = source.randrange(limit), source.randrange(1, 256)
    content[i] ^= value
    path.write_bytes(content)
    return f"{i} ^ {value}"


def _overwritten(path: Path, source: random.Random) -> str:
    content = bytearray(path.read_bytes())
    start = source.randrange(len(content))
    noise = source.randbytes(source.randrange(1, 40))
    content[start : start + len(noise)] = noise
    path.write_bytes(content)
    return f"at {start}"


def _text_before(path: Path, source: random.Random) -> str:
    text = source.choice([b"\0", b"#", b"\xff\xfe", b"version https://git-lfs.github.com/spec/v1\n"])
    path.write_bytes(text + path.read_bytes())
    return repr(text)


def _entries(content: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of all entries of nested JSON."""
    keys = range(len(content)) if isinstance(content, list) else content if isinstance(content, dict) else ()
    found = [(content, key) for key in keys]
    return found + [entry for key in keys for entry in _entries(content[key])]


def _other_value(path: Path, source: random.Random) -> str:
    content = json.loads(path.read_text(encoding="utf-8"))
    top = [(content, key) for key in content] if isinstance(content, dict) else []
    places = source.choice([top, _entries(content)])
    if not places:
        return _other_root(path, source)
    where, key = source.choice(places)
    where[key] = value = source.choice(ODD_VALUES)
    path.write_text(json.dumps(content), encoding="utf-8")
    return f"{key} = {str(value)[:20]!a}"


def _other_key(path: Path, source: random.Random) -> str:
    content = json.loads(path.read_text(encoding="utf-8"))
    places = [(where, key) for where, key in _entries(content) if isinstance(where, dict)]
    if not places:
        return _other_root(path, source)
    where, key = source.choice(places)
    value = where.pop(key)
    new = source.choice([None, "x", "\ud800", key + "x"])
    if new is not None:
        where[new] = value
    path.write_text(json.dumps(content), encoding="utf-8")
    return f"{key} -> {new!a}"


def _other_root(path: Path, source: random.Random) -> str:
    value = source.choice(ODD_VALUES)
    path.write_text(json.dumps(value), encoding="utf-8")
    return f"{str(value)[:20]!a}"


def _deep(path: Path, source: random.Random) -> str:
    text = path.read_text(encoding="utf-8")
    places = [match.start() for match in re.finditer(r"(?<=: )", text)] or [0]
    place = source.choice(places)
    opened, closed = source.choice([("[", "]"), ('{"a":', "}")])
    path.write_text(text[:place] + opened * 100_000 + "1" + closed * 100_000 + ', "x": ' + text[place:])
    return f"at {place}"


def _long_number(path: Path, source: random.Random) -> str:
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"\d+", "9" * 5000, text, count=1), encoding="utf-8")
    return ""


def check_damage(
    folder: Path, work: Path, seeds: range, read: Callable[[Path], Any], error: type[Exception], **options: Any
) -> list[str]:
    """Damage copies of a folder, read each, and return a line for every exception of an unexpected type."""
    found = []
    for seed in seeds:
        copy = work / f"damaged-{seed}"
        shutil.copytree(folder, copy)
        done = damage(copy, seed, **options)
        name = done.partition(":")[0]
        try:
            read(copy)
        except error as refused:
            if name not in str(refused):
                found.append(f"{seed} {done}: the error does not name the file: {refused}")
        except BaseException as other:  # a Rust panic is not an Exception
            found.append(f"{seed} {done}: {type(other).__name__}: {str(other)[:200]}")
            if isinstance(other, KeyboardInterrupt):
                raise
        shutil.rmtree(copy)
    return found


def find_damage(path: Path, *, weights_only: bool = False) -> str | None:
    """Return the fault of a checkpoint folder as text, or None; arguments as of `verify_checkpoint`."""
    try:
        verify_checkpoint(path, weights_only=weights_only)
    except (UserError, OSError) as error:
        return str(error)
    return None
