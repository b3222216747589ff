"""transformers' records of tied weights, updated when modules become TT layers and when they become dense again.

A `PreTrainedModel` records in `_tied_weights_keys` and `all_tied_weights_keys` which parameter is tied to which other
parameter, by name: {"lm_head.weight": "model.embed_tokens.weight"}. It ties by these names after loading, and leaves
one of each pair out of saved files. With TT layers the names change: a head has no weight of its own, and two tied
embeddings share each core.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from scantling.tensor.embedding import TTMEmbedding
from scantling.tensor.head import TTMHead
from scantling.tensor.linear import TTLinear

_NOTES = ("_tied_weights_keys", "all_tied_weights_keys")
_KEPT = "_ties_of_dense_weights"


def record_tied_names(model: nn.Module) -> dict[nn.Module, dict[str, dict[str, str]]]:
    """Return the names of tied parameters, by the submodule that records them; call it before replacing anything."""
    noted = {}
    for module in model.modules():
        expand = getattr(module, "get_expanded_tied_weights_keys", None)
        if callable(expand) and hasattr(module, _NOTES[1]):
            noted[module] = {_NOTES[0]: expand(all_submodels=False), _NOTES[1]: dict(getattr(module, _NOTES[1]))}
    return noted


def rename_tied_names(noted: dict[nn.Module, dict[str, dict[str, str]]]) -> None:
    """Replace the names of tables by those of their cores; the old records are kept for `restore_tied_names`."""
    for module, notes in noted.items():
        changed = {note: _renamed(module, pairs) for note, pairs in notes.items()}
        if changed == notes:
            continue
        own = {note: vars(module)[note] for note in _NOTES if note in vars(module)}
        setattr(module, _KEPT, own)
        for note, pairs in changed.items():
            setattr(module, note, pairs)


def restore_tied_names(model: nn.Module) -> None:
    """Restore the names that `rename_tied_names` replaced."""
    for module in model.modules():
        own: dict[str, Any] | None = vars(module).pop(_KEPT, None)
        if own is not None:
            for note in _NOTES:
                vars(module).pop(note, None)
            vars(module).update(own)


def _renamed(module: nn.Module, pairs: dict[str, str]) -> dict[str, str]:
    found = {}
    for target, source in pairs.items():
        (path, _, name), (source_path, _, source_name) = target.rpartition("."), source.rpartition(".")
        owner, source_owner = module.get_submodule(path), module.get_submodule(source_path)
        if not (_is_tt(owner, name) or _is_tt(source_owner, source_name)):
            found[target] = source
        elif owner is source_owner and path != source_path:
            found |= {f"{path}.cores.{core}": f"{source_path}.cores.{core}" for core in range(len(owner.cores))}  # type: ignore[arg-type]
    return found


def _is_tt(owner: nn.Module, name: str) -> bool:
    return name == "weight" and isinstance(owner, TTLinear | TTMEmbedding | TTMHead)
