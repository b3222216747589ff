"""Manifest of a checkpoint: all values that are not tensors, and a checksum of each file and of the manifest itself.

No other file has a checksum of `manifest.json`, so it contains a SHA-256 of its other fields as canonical JSON, and
every field is checked before it is used. The checksum detects damage and edits by hand; it is not a signature.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from scantling.errors import UserError
from scantling.files import no_follow
from scantling.trainer.training.checkpoint_index import Count, Elsewhere, StrictModel

FORMAT = 5
MANIFEST = "manifest.json"
MAX_BYTES = 1 << 28
"""Largest manifest that is written or read. 1,000 processes and 100,000 parameters take about 20 MB."""

_Rank = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,6})$")]


class _File(StrictModel):
    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Folder(StrictModel):
    host: str
    folder: str
    files: Annotated[dict[str, _File], Field(min_length=1)]


class _Group(StrictModel):
    names: list[str]
    hyper: dict[str, Any]


class _Optimizer(StrictModel):
    plain: dict[str, dict[str, Any]]
    on_cpu: list[str]
    groups: list[_Group]


class _Generators(StrictModel):
    python: tuple[int, list[int], float | None]
    numpy: tuple[str, int, int, float]


class _Position(StrictModel):
    seed: Count
    epoch: Count
    index: Count


class _Values(StrictModel):
    """Everything that is not a tensor; empty in a checkpoint of tensors only."""

    step: Count | None = None
    tokens: Count | None = None
    recipe: dict[str, Any] | None = None
    data: _Position | None = None
    fingerprint: str | None = None
    scaler: dict[str, int | float] | None = None
    joules: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    optimizer: _Optimizer | None = None
    inner: dict[_Rank, _Optimizer] | None = None
    exchange: dict[_Rank, dict[str, Any]] | None = None
    rng: dict[_Rank, _Generators] | None = None
    tensor: dict[str, Any] | None = None


class _Manifest(StrictModel):
    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    step: Count
    save: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    world_size: Annotated[int, Field(ge=1, le=10**7)]
    versions: dict[str, str]
    values: _Values
    files: Annotated[dict[str, _File], Field(min_length=1)]
    elsewhere: list[_Folder] = Field(default_factory=list)
    checksum: str


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint folder with its checksum, and fsync it.

    Args:
        folder: the checkpoint, whose other files are complete.
        content: everything but `format` and `checksum`.

    Raises:
        RuntimeError: `read_manifest` would refuse the content.
    """
    # a round trip through JSON, so that the checksum is of the values as they are read
    plain = json.loads(json.dumps({"format": FORMAT, **content}))
    # parse it as a reader would: better no checkpoint than one that is refused later
    text = json.dumps({**plain, "checksum": _checksum(plain)})
    try:
        _parse(text)
    except ValueError as error:
        raise RuntimeError(f"the state of this run does not fit into a manifest: {error}") from None
    with open(folder / MANIFEST, "w", encoding="utf-8", opener=no_follow) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint folder.

    Raises:
        UserError: the manifest is missing, damaged, or was changed after it was written.
    """
    file = path / MANIFEST
    try:
        if not file.is_file():
            raise UserError(f"{path} has no {MANIFEST}")
        if file.stat().st_size > MAX_BYTES:
            raise UserError(f"{file} has {file.stat().st_size} bytes; a manifest has at most {MAX_BYTES}")
        return _parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} has no usable {MANIFEST}: {error}") from None


def files_elsewhere(manifest: Mapping[str, Any]) -> dict[str, Elsewhere]:
    """Return the files of a checkpoint that other machines have written into their own folders, by name."""
    return {
        name: Elsewhere(f"{other['host']}, {other['folder']}", digest)
        for other in manifest.get("elsewhere", [])
        for name, digest in other["files"].items()
    }


def file_digest(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file, as in `files` of a manifest."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def parse_json(text: str) -> Any:
    """Parse JSON in which no object has a key twice.

    Raises:
        ValueError: the text is not such JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_to_unique_dict)


def _to_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a key is given twice")
    return unique


def _parse(text: str) -> dict[str, Any]:
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has {len(text)} bytes; at most {MAX_BYTES} are allowed")
    manifest = parse_json(text)
    # format first: another version may compute its checksum differently
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        given = manifest.get("format") if isinstance(manifest, dict) else None
        raise ValueError(f"checkpoint format {given!r:.40}; this version reads format {FORMAT}")
    # checksum before fields, so that damage is reported as damage
    if manifest.get("checksum") != _checksum({key: each for key, each in manifest.items() if key != "checksum"}):
        raise ValueError("it does not match its own checksum")
    try:
        # validate the text: only in JSON does strict mode accept a list for a tuple
        checked = _Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg'][0].lower() + first['msg'][1:]}") from None
    # a checkpoint of tensors only has no values; one of a run has all of these
    if checked.values.model_fields_set:
        required = ("step", "tokens", "data", "optimizer", "rng")
        missing = [name for name in required if getattr(checked.values, name) in (None, {})]
        if missing:
            raise ValueError(f"values.{missing[0]} is missing")
    if checked.values.step not in (None, checked.step):
        raise ValueError(f"values.step is {checked.values.step}, and step is {checked.step}")
    ranks = {*(checked.values.exchange or {}), *(checked.values.inner or {}), *(checked.values.rng or {})}
    for folder in checked.elsewhere:
        if both := sorted(checked.files.keys() & folder.files.keys()):
            raise ValueError(f"{both[0]} is in files and in elsewhere")
    if unknown := [rank for rank in ranks if int(rank) >= checked.world_size]:
        raise ValueError(f"it has values of rank {unknown[0]}, and world_size is {checked.world_size}")
    return manifest


def _checksum(content: dict[str, Any]) -> str:
    # sorted keys and no spaces: equal values give equal bytes. `json.dumps` escapes to ASCII
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
