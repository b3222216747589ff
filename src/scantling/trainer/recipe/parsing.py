"""Parse untrusted YAML: bounded size, depth and aliases, and a single type of error.

PyYAML's own constructors raise KeyError, AttributeError, IndexError or RecursionError for texts such as `!!bool
maybe` and thousands of brackets, and a few nested aliases expand to gigabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from scantling.errors import Fault, shorten

MAX_BYTES = 1 << 20
"""Largest file that is read."""
MAX_DEPTH = 64
"""Deepest nesting of lists and mappings."""
MAX_VALUES = 25_000
"""Most values, including keys; values behind an alias count each time."""
MAX_DIGITS = 400
"""Longest text of a number."""

_PREFIX = "tag:yaml.org,2002:"
_INT, _FLOAT, _MERGE = (f"{_PREFIX}{name}" for name in ("int", "float", "merge"))
_TAGS = {f"{_PREFIX}{name}" for name in ("bool", "float", "int", "map", "merge", "null", "seq", "str", "timestamp")}


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Read a UTF-8 file of bounded size.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or is not UTF-8.
    """
    with path.open("rb") as file:
        # one byte more than allowed tells a file that is too large, without reading all of it
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start + 1}); save it as UTF-8") from None


def parse_yaml(text: str) -> Any:
    """Return the value of one YAML document.

    Raises:
        ValueError: it is not valid YAML, or exceeds the size or depth limits of this module.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 (a SafeLoader)
    except Exception as error:  # constructors of PyYAML raise many types
        raise ValueError(shorten(str(error) or type(error).__name__, 1000)) from None


def dump_yaml(content: Mapping[str, Any]) -> str:
    """Return a mapping as YAML that `parse_yaml` reads back to an equal one."""
    return yaml.dump(content, Dumper=_StrictDumper, sort_keys=False, allow_unicode=True)


def value_faults(content: object) -> list[Fault]:
    """Return the first fault of a value that is invalid for any recipe key: too deep, too large, unprintable."""
    # a stack instead of recursion, which deep nesting would overflow
    pending: list[tuple[str, object, int]] = [("", content, 0)]
    count = 0
    while pending:
        path, value, depth = pending.pop()
        count += 1
        problem = None
        if depth > MAX_DEPTH:
            problem = f"is nested deeper than {MAX_DEPTH} levels"
        elif count > MAX_VALUES:
            path, problem = "", f"has more than {MAX_VALUES:,} values"
        elif isinstance(value, int) and value.bit_length() > 64:
            problem = "must be a number of at most 64 bits"
        # lone surrogates cannot be encoded in UTF-8, and a NUL ends a path
        elif isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            problem = "must be text in UTF-8 without NUL"
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                name = shorten(str(key), 100)
                # keys are values to check, too
                pending += [(path, key, depth), (f"{path}.{name}" if path else name, inner, depth + 1)]
        elif isinstance(value, list | tuple):
            pending += [(f"{path}.{idx}" if path else str(idx), inner, depth + 1) for idx, inner in enumerate(value)]
        if problem is not None:
            return [Fault(shorten(path.encode(errors="replace").decode(), 200), problem)]
    return []


class _StrictLoader(yaml.SafeLoader):
    """Safe, bounded YAML loader.

    It reads `1e-3` as a number (YAML 1.1 does not) and `010` and `12:30` as text (YAML 1.1: 8 and 750), and rejects
    duplicate keys.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._count = 0
        self._sizes: dict[Any, int] = {}  # values below each finished node, including itself

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        # YAML 1.1 reads 12:30 in base 60 and 010 in base 8
        is_old = tag in (_INT, _FLOAT) and (":" in value or re.fullmatch(r"[-+]?0[0-7_]+", value))
        return "tag:yaml.org,2002:str" if is_old else tag

    def compose_node(self, parent: Any, index: Any) -> Any:
        # count while composing, before any value is constructed
        before, mark = self._count, self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        # a document's root is at depth 1 here and 0 in `value_faults`
        if self._depth > MAX_DEPTH + 1:
            raise ComposerError(None, None, f"nested deeper than {MAX_DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        # the size of a node is stored after it is complete, so a missing one means that the alias is inside its node
        if is_alias and node not in self._sizes:
            raise ComposerError(None, None, "an alias inside its own value", mark)
        # an alias counts with all values behind it, which bounds nested aliases
        self._count += self._sizes[node] if is_alias else 1
        if self._count > MAX_VALUES:
            raise ComposerError(None, None, f"more than {MAX_VALUES:,} values", mark)
        self._sizes.setdefault(node, self._count - before)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for each, _ in node.value:
            if not isinstance(each, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key has to be text", each.start_mark)
            # compare constructed keys: `1` and `0x1` are the same key
            key = each.value if each.tag == _MERGE else self.construct_object(each)
            if key in seen:
                problem = f"the key '{shorten(str(key), 80)}' is given twice"
                raise ConstructorError(None, None, problem, each.start_mark)
            seen.add(key)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        kind = node.tag.removeprefix(_PREFIX)
        if node.tag not in _TAGS:
            raise ConstructorError(None, None, f"the tag {shorten(node.tag, 80)} has no meaning here", node.start_mark)
        # limit the digits first: int() takes quadratic time
        given = node.value if isinstance(node, yaml.ScalarNode) else ""
        if node.tag in (_INT, _FLOAT) and len(given) > MAX_DIGITS:
            raise ConstructorError(None, None, f"a number of more than {MAX_DIGITS} characters", node.start_mark)
        try:
            return super().construct_object(node, deep=deep)
        except yaml.YAMLError:
            raise
        except Exception:  # KeyError of !!bool, AttributeError of !!timestamp, IndexError of !!int
            raise ConstructorError(None, None, f"'{shorten(given, 80)}' is no {kind}", node.start_mark) from None


class _StrictDumper(yaml.SafeDumper):
    """Safe YAML dumper that quotes texts which `_StrictLoader` would read as numbers."""


# the same resolver in the dumper makes it quote the text "1e-3"
for _each in (_StrictLoader, _StrictDumper):
    _each.add_implicit_resolver(
        _FLOAT,
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def get_section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the mapping under a name, or an empty one if it is missing or not a mapping."""
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


def flatten(content: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings by dotted key; an empty mapping counts as a value."""
    if isinstance(content, Mapping) and content:
        for key, inner in content.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, content
