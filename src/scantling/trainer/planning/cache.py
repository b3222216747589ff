"""Cache of the slow parts of a plan, for several plans of similar recipes.

A plan takes most of its time to trace the passes of a micro-batch, a fifth of a millisecond per operation, and some to
step the optimizer on meta tensors. Neither depends on the whole recipe: the passes of a run are those of the same run
with another optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TypeVar

from scantling.trainer.recipe import Recipe

Value = TypeVar("Value")


class PlanCache:
    """Results of traces and of optimizer steps, by the settings they depend on.

    Attributes:
        num_traces: number of traces.
        trace_s: seconds that the slowest trace took per part of its batch.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, object] = {}
        self.num_traces = 0
        self.trace_s = 0.0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of a key; compute it the first time."""
        if key not in self._values:
            self._values[key] = compute()
        return self._values[key]  # type: ignore[return-value]

    def get_trace(self, key: Hashable, trace: Callable[[], Value], *, parts: int) -> Value:
        """Return the trace of a key as `get` does, and record its time.

        Args:
            key: of the trace.
            trace: function that traces.
            parts: number of parts in which the blocks take the batch one after the other.
        """
        if key in self:
            return self.get(key, trace)
        begin = time.monotonic()
        value = self.get(key, trace)
        self.num_traces += 1
        self.trace_s = max(self.trace_s, (time.monotonic() - begin) / parts)
        return value


def recipe_key(recipe: Recipe, *sections: str) -> str:
    """Return the content of some sections of a recipe, as a part of a key."""
    return recipe.model_dump_json(include=set(sections))
