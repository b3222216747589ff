"""TT layers of a model as JSON entries, and their reconstruction on a dense skeleton without values.

One entry per layer, keyed by its first name in the model:

    {"in_modes": [8, 4], "out_modes": [4, 8], "ranks": [1, 8, 16, 8, 1]}                    a linear layer
    {"row_modes": [...], "col_modes": [...], "ranks": [...], "padding_idx": 0,
     "names": [...], "heads": [...]}                                                        a table, and its tied
     modules
    {"up": [...], "down": [...]}                                                            experts, one entry for each

Ranks are not clipped, even if a truncation left more on a bond than its neighbors can carry. A layer with rank gates
has "threshold", that of its gates; a layer with an activation between its cores has "activation".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn

from scantling.errors import UserError
from scantling.tensor.embedding import TTMEmbedding, TTMHead
from scantling.tensor.experts import TTExperts, is_fused_experts
from scantling.tensor.find_layers import Candidate, is_embedding, is_linear
from scantling.tensor.layer import TTLayer
from scantling.tensor.linear import TTLinear
from scantling.tensor.merging import stack_equal_layers
from scantling.tensor.replace import Layer, build_layer, fill_layer, find_tt_layers, install
from scantling.tensor.shared_input import fuse_shared_inputs
from scantling.tensor.slicing import freeze_if_empty

Entry: TypeAlias = dict[str, Any]


def describe(model: nn.Module) -> dict[str, Entry]:
    """Return the entries of all TT layers, by name."""
    layers = find_tt_layers(model)
    entries: dict[str, Entry] = {}
    for layer, names in layers.items():
        if isinstance(layer, TTExperts):
            entries[names[0]] = {part: [_linear_entry(one) for one in getattr(layer, part)] for part in ("up", "down")}
        elif isinstance(layer, TTLinear):
            entries[names[0]] = _linear_entry(layer)
        elif isinstance(layer, TTMEmbedding):
            # A tied head has no shape of its own, so the entry of its table lists it.
            heads = [
                head_names for head, head_names in layers.items() if isinstance(head, TTMHead) and head.table is layer
            ]
            entries[names[0]] = {
                "row_modes": list(layer.row_modes),
                "col_modes": list(layer.col_modes),
                **_ranks_entry(layer),
                "padding_idx": layer.padding_idx,
                "names": names,
                "heads": [name for head_names in heads for name in head_names],
            }
    return entries


def _linear_entry(layer: TTLinear) -> Entry:
    activation = {} if layer.activation is None else {"activation": layer.activation}
    return {"in_modes": list(layer.in_modes), "out_modes": list(layer.out_modes), **activation, **_ranks_entry(layer)}


def _ranks_entry(layer: TTLayer) -> Entry:
    ranks: Entry = {"ranks": list(layer.ranks)}
    return ranks if layer.rank_gates is None else {**ranks, "threshold": layer.threshold}


def rebuild(model: nn.Module, entries: Mapping[str, Entry]) -> None:
    """Replace dense layers of a model by TT layers of the given shapes.

    Args:
        model: model whose parameters are on the meta device.
        entries: entries from `describe`, of this model or of a model that shares parts with it; entries of layers that
            this model lacks are skipped.

    Raises:
        UserError: if an entry does not fit its layer, or the model has none of the layers.
    """
    # Find the dense modules of each entry, with those that share their weights.
    modules = dict(model.named_modules(remove_duplicate=False))
    tied = _tied_modules(model)
    candidates = []
    for first, entry in entries.items():
        names = [name for name in entry.get("names", [first]) if name in modules]
        if not names:
            continue
        # Also include modules that only this model ties to the layer.
        names += [name for name in tied.get(names[0], []) if is_embedding(modules[name]) and name not in names]
        heads = {name for name in (*entry.get("heads", []), *tied.get(names[0], [])) if name in modules} - {*names}
        candidate = Candidate(modules[names[0]], names)
        candidate.heads = [(head, [name]) for name in sorted(heads) if isinstance(head := modules[name], nn.Linear)]
        candidates.append((candidate, _build_from_entry(candidate, entry)))
    if not candidates:
        raise UserError(
            f"this {type(model).__name__} has none of the layers {', '.join([*entries][:3])}, which the description of "
            "TT layers names"
        )
    # Only shapes matter: values are loaded later.
    for candidate, layer in candidates:
        install(model, candidate, fill_layer(candidate, layer, "random"))
        for param in layer.parameters():
            freeze_if_empty(param)
    fuse_shared_inputs(model)
    stack_equal_layers(model)


def _tied_modules(model: nn.Module) -> dict[str, list[str]]:
    """Return the modules that transformers will tie to each module, by name; a skeleton is not tied yet."""
    pairs: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    tied: dict[str, list[str]] = {}
    for target, source in pairs.items():
        (path, _, name), (source_path, _, source_name) = target.rpartition("."), source.rpartition(".")
        if name == source_name == "weight":
            tied.setdefault(source_path, []).append(path)
    return tied


def _build_from_entry(candidate: Candidate, entry: Entry) -> Layer:
    # The entry must have exactly the key of its kind of layer.
    kind = [is_linear(candidate.module), is_embedding(candidate.module), is_fused_experts(candidate.module)]
    if kind != ["in_modes" in entry, "row_modes" in entry, "up" in entry]:
        raise UserError(
            f"{candidate.name} is a {type(candidate.module).__name__}, which this description does not fit: {entry}"
        )
    try:
        return _build_unchecked(candidate, entry)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{candidate.name}: cannot build a TT layer from {entry}: {error}") from None


def _build_unchecked(candidate: Candidate, entry: Entry) -> Layer:
    if "up" not in entry:
        layer = build_layer(candidate, _options(entry))
        assert isinstance(layer, TTLinear | TTMEmbedding)
        _set_ranks(layer, entry)
        if isinstance(layer, TTMEmbedding):
            layer.padding_idx = entry["padding_idx"]
        return layer
    layer = build_layer(candidate, {part: _options(entry[part][0]) for part in ("up", "down")})
    assert isinstance(layer, TTExperts)
    for part in ("up", "down"):
        layers = getattr(layer, part)
        if len(layers) != len(entry[part]):
            raise UserError(f"{candidate.name} has {len(layers)} experts, its description {len(entry[part])}")
        for expert, expert_entry in zip(layers, entry[part], strict=True):
            # All experts were built with the options of the first; each may have other modes and ranks.
            expert.in_modes, expert.out_modes = tuple(expert_entry["in_modes"]), tuple(expert_entry["out_modes"])
            _set_ranks(expert, expert_entry)
    return layer


def _options(entry: Entry) -> Entry:
    modes = {key: tuple(value) for key, value in entry.items() if key.endswith("_modes")}
    activation = {"activation": entry["activation"]} if "activation" in entry else {}
    # The constructor takes no rank 0; `_set_ranks` sets the actual ranks.
    return {**modes, **activation, "rank": [max(1, rank) for rank in entry["ranks"][1:-1]]}


def _set_ranks(layer: TTLinear | TTMEmbedding, entry: Entry) -> None:
    """Set empty cores of these ranks, and rank gates if the entry has them; rank 0: all ranks were removed."""
    # New parameters: ranks of an entry may exceed the limits of the constructor.
    layer.set_empty_cores(entry["ranks"], layer.cores[0].device, layer.cores[0].dtype)
    if "threshold" in entry:
        layer.attach_gates(float(entry["threshold"]))
