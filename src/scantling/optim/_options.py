"""The arguments of an optimizer as a recipe gives them: read from its signature, checked and converted."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

NOT_OPTIONS = ("self", "params", "lr", "weight_decay")
"""Arguments that every optimizer is given apart from its options."""


def signature_options(cls: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """(default, type) of every option in the signature of an optimizer class."""
    hints = typing.get_type_hints(getattr(cls, "__init__"))  # noqa: B009
    parameters = inspect.signature(cls).parameters
    return {name: (p.default, hints.get(name, Any)) for name, p in parameters.items() if name not in NOT_OPTIONS}


def convert(value: Any, hint: Any) -> Any:
    """A value as the type asks for it: lists become tuples, whole numbers floats, "1e-8" (a string in YAML 1.1) 1e-8.

    Args:
        value: as read from YAML or given in Python.
        hint: the annotated type: plain types, unions, tuples of fixed length, literals.

    Raises:
        ValueError: the value is not of that type; the message says what is allowed.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (isinstance(hint, type) and origin is None and type(value) is hint):
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, hint)
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
        return tuple(convert(item, arg) for item, arg in zip(value, args, strict=True))
    if origin is typing.Literal and value in args:
        return value
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(hint, type) and hint not in (int, float) and isinstance(value, hint):
        return value
    raise ValueError(f"must be {describe(hint)}")


def describe(hint: Any) -> str:
    """A type in words: "a list of 2: each a number", "true or false", "a number or null"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(arg) for arg in args if getattr(arg, "__name__", "") != "Tensor"))
    if origin is tuple:
        words = [describe(arg) for arg in args]
        return f"a list of {len(args)}: " + (f"each {words[0]}" if len(set(words)) == 1 else ", ".join(words))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, args))
    plain = {float: "a number", int: "a whole number", bool: "true or false", str: "text", type(None): "null"}
    return plain.get(hint, getattr(hint, "__name__", str(hint)))


def _convert_union(value: Any, hint: Any) -> Any:
    members = typing.get_args(hint)
    exact = [member for member in members if typing.get_origin(member) is None and type(value) is member]
    for member in exact or members:
        try:
            return convert(value, member)
        except ValueError:
            continue
    raise ValueError(f"must be {describe(hint)}")
