"""Search for changes of a recipe that let its plan fit a memory limit, in bounded time.

Each change is one that a user would make, and each that is reported was planned. The search tries every change alone,
those first that change only time and memory. If none fits alone, it adds them up in the same order, finds the shortest
beginning of this list that fits, and leaves out changes that are not needed then. More GPUs come last.

Plans share a cache, so that only changes of the passes are traced again. A change is not traced if weights, gradients
and optimizer state alone exceed the limit, or if it cannot save enough. The search takes `MOST_TRACES` traces, and
starts none that would end after `LIMIT_S`, or after `ENOUGH_S` if something fits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scantling.errors import UserError
from scantling.trainer.models.costs import silent_logger
from scantling.trainer.planning.memory import allocator_bytes
from scantling.trainer.planning.passes import num_parts
from scantling.trainer.planning.plan import Plan, plan_run
from scantling.trainer.planning.resolve import ResolvedRun, resolve_run
from scantling.trainer.recipe import Recipe, load_recipe

MOST_TRACES = 8
LIMIT_S, ENOUGH_S = 18.0, 10.0
MOST_SUGGESTIONS = 4
MOST_PARTS = 4
"""Most parts in which a suggested recipe passes a block: the time of a trace grows with them."""
LOSS_CHUNK = 512
LOGIT_BYTES = 16
"""Most bytes that logits, log-probabilities and their gradients take for one class of one token."""
PASSES = ("micro-batch", "loss", "checkpointing", "compute")
"""Kinds of changes that save memory of the passes alone."""
Settings = Mapping[str, Any]
"""Values by dotted key."""


@dataclass(frozen=True)
class Suggestion:
    """A change of a recipe, and its planned memory.

    Attributes:
        settings: the new values by dotted key of the recipe.
        removed: dotted keys to remove: options of another optimizer.
        peak_memory_bytes: planned peak of one process.
        world_size: number of processes.
        is_more: True if these are more processes than planned before, each on a GPU.
    """

    settings: Settings
    removed: tuple[str, ...]
    peak_memory_bytes: int
    world_size: int
    is_more: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the suggestion as JSON values."""
        return {
            "settings": dict(self.settings),
            "removed": list(self.removed),
            "world_size": self.world_size,
            "peak_memory_bytes": self.peak_memory_bytes,
        }

    def __str__(self) -> str:
        text = format_settings(self.settings)
        text += f", without {' and '.join(self.removed)}" if self.removed else ""
        return text + (f", on {self.world_size} GPUs" if self.is_more else "")


@dataclass(frozen=True)
class Search:
    """Result of a search.

    Attributes:
        suggestions: changes that fit by their plan, ordered by cost in time and quality, cheapest first.
        least: the change that needs the least memory, whether it fits or not; None if nothing was planned.
        largest_micro_batch_size: the largest that fits without another change; None if none was found.
    """

    suggestions: tuple[Suggestion, ...] = ()
    least: Suggestion | None = None
    largest_micro_batch_size: int | None = None


@dataclass(frozen=True)
class _Change:
    """Settings that go together.

    Attributes:
        kind: changes of one kind replace each other, and the first that fits is enough.
        settings: values by dotted key.
        world_size: number of processes.
        least: a lower bound of the peak with this change alone, without a plan; 0 if unknown.
    """

    kind: str
    settings: Settings
    world_size: int
    least: int = 0


def find_changes(run: ResolvedRun, planned: Plan, limit: int) -> Search:
    """Search for changes with which a process of the run needs at most `limit` bytes.

    Args:
        run: the run.
        planned: its plan, whose peak exceeds the limit.
        limit: in bytes, for one process.
    """
    search = _Searcher(run, planned, limit)
    with silent_logger("scantling", logging.ERROR):  # the user did not ask for these plans
        search.run()
    return Search(tuple(search.suggestions), search.least, search.largest_micro_batch_size)


def format_settings(settings: Settings) -> str:
    """Return settings as YAML, one section after the other."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for path, value in settings.items():
        section, _, key = path.partition(".")
        sections.setdefault(section, []).append((key, _format_value(value)))
    return ", ".join(
        f"{section}.{keys[0][0]}: {keys[0][1]}"
        if len(keys) == 1
        else f"{section}: {{{', '.join(f'{key}: {value}' for key, value in keys)}}}"
        for section, keys in sections.items()
    )


def _format_value(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
    )


class _Searcher:
    """State of a search; see `find_changes`.

    Attributes:
        suggestions, least, largest_micro_batch_size: as in `Search`.
    """

    def __init__(self, run: ResolvedRun, planned: Plan, limit: int) -> None:
        self._run, self._planned, self._limit = run, planned, limit
        self._begin, self._traces_before = time.monotonic(), run.cache.num_traces
        self._limit_s = LIMIT_S
        self._plans: dict[tuple[str, int], Plan] = {}
        self.suggestions: list[Suggestion] = []
        self.least: Suggestion | None = None
        self.largest_micro_batch_size: int | None = None

    def run(self) -> None:
        """Try changes alone and then together, with the processes of the run and then with more."""
        changes = list_changes(self._run, self._planned)
        here = [change for change in changes if change.world_size == self._run.world_size]
        more = changes[len(here) :]
        self._try_alone(here)
        together: list[_Change] = []
        if not self.suggestions:
            together = self._accepted_together(here)
            self._try_together(together)
        self._try_alone(more)
        if not self.suggestions:
            for change in more:
                if self._fits([*together, change]):
                    self._add_shortest([*together, change])
                    return
            # nothing fits: let `least` be that of all changes
            self._plan(*self._merge(together))

    def _try_alone(self, changes: Sequence[_Change]) -> None:
        kinds = set()
        # the passes do not matter if weights, gradients and optimizer state are too much
        is_of_passes = _held_bytes(self._planned) <= self._limit
        for change in changes:
            if len(self.suggestions) == MOST_SUGGESTIONS:
                return
            if change.kind in kinds or change.least > self._limit or (change.kind in PASSES and not is_of_passes):
                continue
            settings, world_size = self._merge([change])
            found = self._plan_fitting(settings, world_size)
            if change.kind == "micro-batch":
                plan = self._plan(settings, world_size, may_trace=False)
                # the peak is in the step of the optimizer
                is_of_passes = plan is None or plan.peak_memory_bytes != self._planned.peak_memory_bytes
            if found is None:
                continue
            self._limit_s = ENOUGH_S
            if change.kind == "micro-batch":
                found = self._largest_micro_batch(found, {})
                self.largest_micro_batch_size = found.settings["train.micro_batch_size"]
            kinds.add(change.kind)
            self.suggestions.append(found)

    def _try_together(self, changes: Sequence[_Change]) -> None:
        """Add the fewest changes, from the first on, that fit together."""
        # released gradients need the whole batch to pass each block: a slow trace, and inputs of all blocks in memory
        for tried in ([change for change in changes if change.kind != "release"], list(changes)):
            if tried and self._fits(tried):
                low, high = 0, len(tried)
                # the first `high` changes fit together, the first `low` do not, or were not planned
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (low, middle) if self._fits(tried[:middle]) else (middle, high)
                self._add_shortest(tried[:high])
                return

    def _accepted_together(self, changes: Sequence[_Change]) -> list[_Change]:
        """Return the changes that the recipe accepts after those before them, and that save something then."""
        accepted: list[_Change] = []
        before = self._planned
        for change in changes:
            plan = self._plan(*self._merge([*accepted, change]), may_trace=False)
            if plan is None:
                continue
            # another optimizer, such as CAME after SGD, may hold more than the recipe's
            if change.kind == "optimizer" and (plan.optimizer_state_bytes or 0) >= (before.optimizer_state_bytes or 0):
                continue
            accepted.append(change)
            before = plan
        return accepted

    def _add_shortest(self, changes: list[_Change]) -> None:
        """Add a suggestion: those of the changes that are needed, and the largest micro-batch they leave room for."""
        needed = list(changes)
        # those with the highest cost first; the last one is needed, or the list would be shorter
        for change in reversed(changes[:-1]):
            rest = [each for each in needed if each is not change]
            if self._fits(rest):
                needed = rest
        settings, world_size = self._merge(needed)
        fitting = self._plan_fitting(settings, world_size)
        assert fitting is not None
        if any(change.kind == "micro-batch" for change in needed):
            others = {key: value for key, value in settings.items() if key != "train.micro_batch_size"}
            fitting = self._largest_micro_batch(fitting, others)
        self.suggestions.append(fitting)
        self._limit_s = ENOUGH_S

    def _fits(self, changes: Sequence[_Change]) -> bool:
        return self._plan_fitting(*self._merge(changes)) is not None

    def _merge(self, changes: Sequence[_Change]) -> tuple[Settings, int]:
        """Return the settings of changes together, and the number of processes."""
        settings = {key: value for change in changes for key, value in change.settings.items()}
        world_size = changes[-1].world_size if changes else self._run.world_size
        run = self._change_run(settings, world_size)
        if run is not None and num_parts(run) > MOST_PARTS:
            settings["train.micro_batch_size"] = -(-run.recipe.pass_size(world_size) // MOST_PARTS)
        return settings, world_size

    def _largest_micro_batch(self, smallest: Suggestion, others: Settings) -> Suggestion:
        """Return the largest micro-batch that fits, by its plan.

        Peaks are nearly linear in the micro-batch, so interpolation needs only a few plans. Every third step bisects
        the interval instead, which bounds the number of plans.

        Args:
            smallest: the smallest micro-batch, with other changes.
            others: settings of the other changes.
        """
        world_size = smallest.world_size
        most = self._plan(others, world_size, may_trace=False)
        run = self._change_run(others, world_size)
        if most is None or run is None:
            return smallest
        largest, low = smallest, int(smallest.settings["train.micro_batch_size"])
        high = run.recipe.micro_batch_size(world_size)
        above = most.peak_memory_bytes
        count = 0
        # invariant: `low` fits, and `high` does not
        while high - low > 1:
            count += 1
            middle = (low + high) // 2
            least = largest.peak_memory_bytes
            if count % 3 and above is not None and above > least:
                middle = low + int((self._limit - least) * (high - low) / (above - least))
            # stay strictly inside the interval, so that each step shrinks it
            middle = max(low + 1, min(high - 1, middle))
            settings = _with_micro_batch(others, middle)
            plan = self._plan(settings, world_size)
            if plan is None or plan.peak_memory_bytes is None:
                break
            if plan.peak_memory_bytes <= self._limit:
                low, largest = middle, self._suggest(settings, plan)
            else:
                high, above = middle, plan.peak_memory_bytes
        return largest

    def _plan_fitting(self, settings: Settings, world_size: int) -> Suggestion | None:
        """Return a suggestion with these settings if its plan fits; None if it does not, or was not planned."""
        plan = self._plan(settings, world_size, may_trace=False)
        if plan is None:
            return None
        if plan.peak_memory_bytes is None and _held_bytes(plan) <= self._limit:
            plan = self._plan(settings, world_size)
        if plan is None or plan.peak_memory_bytes is None or plan.peak_memory_bytes > self._limit:
            return None
        return self._suggest(settings, plan)

    def _plan(self, settings: Settings, world_size: int, *, may_trace: bool = True) -> Plan | None:
        """Return the plan of a changed recipe; None if the recipe refuses the change, or if the time is up."""
        key = (repr(sorted(settings.items())), world_size)
        plan = self._plans.get(key)
        if plan is not None and (plan.peak_memory_bytes is not None or not may_trace):
            return plan
        if time.monotonic() > self._begin + LIMIT_S:
            return plan
        run = self._change_run(settings, world_size)
        if run is None:
            return None
        if may_trace:
            expected = run.cache.trace_s * num_parts(run)
            num_traces = run.cache.num_traces - self._traces_before
            is_in_time = time.monotonic() + expected <= self._begin + self._limit_s
            may_trace = is_in_time and num_traces < MOST_TRACES
        try:
            plan = plan_run(run, may_trace=may_trace)
        except UserError:
            return None
        # the process grows from plan to plan, so take its size in the first one
        self._plans[key] = plan = plan.rebase(self._planned.base_bytes)
        least = None if self.least is None else self.least.peak_memory_bytes
        if settings and plan.peak_memory_bytes is not None and (least is None or plan.peak_memory_bytes < least):
            self.least = self._suggest(settings, plan)
        return plan

    def _change_run(self, settings: Settings, world_size: int) -> ResolvedRun | None:
        """Return the run with a changed recipe; None if the recipe or the number of processes refuses the change."""
        run = self._run
        try:
            recipe, _ = change_recipe(run.recipe, settings)
            return resolve_run(recipe, world_size=world_size, device=run.device, task_data=run.data, cache=run.cache)
        except UserError:
            return None

    def _suggest(self, settings: Settings, plan: Plan) -> Suggestion:
        assert plan.peak_memory_bytes is not None
        _, removed = change_recipe(self._run.recipe, settings)
        more = plan.world_size > self._run.world_size
        return Suggestion(settings, removed, plan.peak_memory_bytes, plan.world_size, more)


def _held_bytes(plan: Plan) -> int:
    """Return the bytes that a plan holds in a step, whatever its passes take."""
    held = plan.base_bytes + plan.weight_bytes + plan.gradient_bytes + plan.residual_bytes
    return held + (plan.optimizer_state_bytes or 0)


def _with_micro_batch(settings: Settings, size: int) -> dict[str, Any]:
    return {"train.micro_batch_size": size, **settings}


def change_recipe(recipe: Recipe, settings: Settings) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe with other values, and the keys that must be removed from it.

    Args:
        recipe: the recipe.
        settings: values by dotted key. Another `optim.name` removes the options of the optimizer before it.

    Raises:
        RecipeError: the recipe does not accept the values.
    """
    content = recipe.model_dump(exclude_unset=True)
    removed: tuple[str, ...] = ()
    if "optim.name" in settings:
        options = recipe.optim.options
        removed = tuple(f"optim.{key}" for key in options if f"optim.{key}" not in settings)
        content["optim"] = {key: value for key, value in content.get("optim", {}).items() if key not in options}
    sections: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, _, key = path.partition(".")
        sections.setdefault(section, {})[key] = value
    return load_recipe(content, sections=sections), removed


def list_changes(run: ResolvedRun, planned: Plan) -> list[_Change]:
    """Return changes that may save memory, ordered by cost in time and quality, cheapest first.

    The list may contain changes that the recipe refuses.
    """
    recipe, world_size = run.recipe, run.world_size
    changes: list[_Change] = []

    def add(kind: str, settings: Settings, *, least: int = 0, processes: int = world_size) -> None:
        changes.append(_Change(kind, settings, processes, least))

    def without(num_bytes: int) -> int:
        return peak - num_bytes - (allocator_bytes(num_bytes) if run.device == "cpu" else 0)

    train, optim, precision = recipe.train, recipe.optim, recipe.precision
    replicas, shards = recipe.parallel.mesh_shape(world_size)
    peak = planned.peak_memory_bytes or 0
    # 1. only time and memory
    if recipe.micro_batch_size(world_size) > 1:
        add("micro-batch", {"train.micro_batch_size": 1})
    if train.loss_chunk is None:
        logits = LOGIT_BYTES * recipe.pass_size(world_size) * recipe.data.seq_len * run.sizes.vocab_size
        add("loss", {"train.loss_chunk": LOSS_CHUNK}, least=without(logits))
    for value in ("feed_forward", True):
        if train.activation_checkpointing not in (value, True):
            least = without(planned.activation_bytes or 0)
            add("checkpointing", {"train.activation_checkpointing": value}, least=least)
    one_replica: dict[str, Any] = {}
    if shards == 1 < replicas and recipe.comm.name == "allreduce":
        if recipe.parallel.replicate is not None:
            one_replica["parallel.replicate"] = 1
        if recipe.parallel.batch_shares is not None:
            one_replica["parallel.batch_shares"] = None
        shards = world_size
        add("shard", {"parallel.shard": shards, **one_replica})
    # 2. rounding
    if run.device == "cuda" and precision.compute == "fp32" and precision.parameters == "fp32":
        add("compute", {"precision.compute": "bf16"}, least=peak // 2)
    if recipe.comm.name == "demo" and recipe.comm.residual == "fp32":
        add("residual", {"comm.residual": "int8"})
    # 3. the optimizer
    is_came = optim.name.lower() == "came"
    other = {} if is_came else {"optim.name": "came"}
    # after an exchange of momentum, CAME has none
    formats = ("int8", "int4") if recipe.comm.name == "allreduce" else () if is_came else (None,)
    momentum = optim.options.get("momentum", "fp32") if is_came else "fp32"
    for format_ in formats[formats.index(momentum) + 1 if momentum in formats else 0 :]:
        add("optimizer", other if format_ is None else {**other, "optim.momentum": format_})
    if precision.parameters == "fp32":
        is_given = "compute" in precision.model_fields_set and precision.compute in ("fp32", "fp16")
        compute = {"precision.compute": "bf16"} if is_given else {}
        bf16 = {"precision.parameters": "bf16", "precision.rounding": "stochastic", **compute}
        add("parameters", bf16, least=peak // 2)
    if not optim.release_gradients:
        clip = {} if train.clip is None else {"train.clip": None}
        add("release", {"optim.release_gradients": True, **clip}, least=without(planned.gradient_bytes))
    # 4. more hardware; on a CPU, processes of one machine share its memory
    for factor in (2, 4, 8) if run.device == "cuda" else ():
        more = {"parallel.shard": shards * factor, **one_replica}
        add("shard", more, least=peak // (shards * factor), processes=world_size * factor)
    return changes
