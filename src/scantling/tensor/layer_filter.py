"""Selection of layers, ranks and modes: the `rank` and `filter_fn` arguments of `tensorize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from scantling.errors import UserError, with_hint
from scantling.tensor.modes import positive_ints

Rank: TypeAlias = int | Sequence[int]
Ranks: TypeAlias = Rank | Mapping[str, Rank | Mapping[str, Any]]
Filter: TypeAlias = Callable[[str, nn.Module], bool]

LINEAR_OPTIONS = ("rank", "num_modes", "in_modes", "out_modes", "activation")
TABLE_OPTIONS = ("rank", "num_modes", "row_modes", "col_modes")


class LayerFilter:
    """User's options for each layer.

    Args:
        rank: rank for all layers, or a mapping of patterns; see `scantling.tensorize`.
        filter_fn: function of a layer's name and the layer; True to replace the layer. None selects all.

    Raises:
        UserError: if a rank, a pattern or options have the wrong form.
    """

    def __init__(self, rank: Ranks, filter_fn: Filter | None = None) -> None:
        if filter_fn is not None and not callable(filter_fn):
            raise UserError(f"filter_fn must be a function of a name and a module; given {filter_fn!r}")
        by_pattern = rank if isinstance(rank, Mapping) else {"*": rank}
        if not by_pattern:
            raise UserError("rank is a mapping without patterns; give one, such as {'*': 32}")
        self._options = {pattern: _parse_options(pattern, value) for pattern, value in by_pattern.items()}
        self._filter = filter_fn
        self._met: set[str] = set()

    def options(self, names: Iterable[str], module: nn.Module) -> dict[str, Any] | None:
        """Return the options of the first pattern that matches one of a layer's names; None to leave the layer
        unchanged.
        """
        wanted = [name for name in names if self._filter is None or self._filter(name, module)]
        for pattern, options in self._options.items():
            if any(fnmatchcase(name, pattern) for name in wanted):
                self._met.add(pattern)
                return dict(options)
        return None

    def unused_patterns(self) -> list[str]:
        """Return the patterns that selected no layer."""
        return [pattern for pattern in self._options if pattern not in self._met]


def check_layer_options(options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise if a layer does not accept an option.

    Raises:
        UserError: with the closest known option, if there is one.
    """
    for key in options:
        if key not in allowed:
            raise UserError(with_hint(f"{key!r} must be one of {', '.join(allowed)}", key, allowed))


def _parse_options(pattern: Any, value: Any) -> dict[str, Any]:
    if not isinstance(pattern, str):
        raise UserError(f"a pattern over the names of layers must be a string; given {pattern!r}")
    options = dict(value) if isinstance(value, Mapping) else {"rank": value}
    rank = options.get("rank")
    single = positive_ints([rank])
    ranks = single or (None if isinstance(rank, str) else positive_ints(rank))
    if not ranks:
        where = "rank" if pattern == "*" else f"rank of the pattern {pattern!r}"
        raise UserError(f"{where} must be a positive integer or a sequence of them; given {rank!r}")
    return {**options, "rank": ranks[0] if single else list(ranks)}
