"""Check tokenizer files before the `tokenizers` library reads them: its memory grows with the largest id."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scantling.errors import UserError
from scantling.files import read_json_object
from scantling.saved_models import MAX_TOKEN_ID


def check_tokenizer(path: Path) -> None:
    """Check a `tokenizer.json`, or all JSON files of a tokenizer in a folder.

    Raises:
        UserError: a file cannot be read, or has an id that is far beyond the number of tokens.
    """
    files = [path / name for name in _IDS if os.path.lexists(path / name)] if path.is_dir() else [path]
    contents = {file: read_json_object(file) for file in files}
    ids = {
        file: [id_ for id_ in _IDS.get(file.name, _tokenizer_ids)(content) if isinstance(id_, int)]
        for file, content in contents.items()
    }
    count = len({id_ for each in ids.values() for id_ in each})
    limit = max(MAX_TOKEN_ID, 4 * count)
    for file, each in ids.items():
        if max(each, default=0) >= limit:
            raise UserError(
                f"{file} has the id {max(each)}, and the tokenizer {count} tokens: its tables would have a row for "
                f"every id in between; ids up to {limit - 1} are read here, so number the tokens again from 0"
            )
    largest = max((id_ for each in ids.values() for id_ in each), default=0)
    for file, content in contents.items():
        for id_ in _processor_ids(content.get("post_processor")):
            if ids[file] and id_ > largest:
                raise UserError(f"{file}: its post_processor adds the id {id_}, which no token has")


def _tokenizer_ids(content: dict[str, Any]) -> Iterable[Any]:
    model, added = content.get("model"), content.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    yield from vocab.values() if isinstance(vocab, dict) else range(len(vocab)) if isinstance(vocab, list) else ()
    for token in added if isinstance(added, list) else ():
        yield token.get("id") if isinstance(token, dict) else None


def _named_ids(content: dict[str, Any]) -> Iterable[Any]:
    tokens = content.get("added_tokens_decoder")
    for key in tokens if isinstance(tokens, dict) else ():
        if key.isascii() and key.isdigit():
            # Truncate first: int() raises for thousands of digits, and 20 are beyond any limit.
            yield int(key[:20])


_IDS: dict[str, Callable[[dict[str, Any]], Iterable[Any]]] = {
    "tokenizer.json": _tokenizer_ids,
    "vocab.json": dict.values,
    "added_tokens.json": dict.values,
    "tokenizer_config.json": _named_ids,
    "special_tokens_map.json": lambda _: (),
}
"""Function that extracts the ids from the JSON of each file."""


def _processor_ids(content: Any) -> list[int]:
    """Return the ids of the special tokens in a post-processor, at any depth."""
    found: list[Any] = []
    waiting = [content]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            ids = each.get("ids")
            found += ids if isinstance(ids, list) else ()
            pairs = [each.get(key) for key in ("cls", "sep")]
            found += [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2]
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return [id_ for id_ in found if isinstance(id_, int)]
