"""Ids of special tokens: equal in the tokenizer, the configuration of the model and the one it generates with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUFFIX = "_token_id"
GENERATED = ("bos", "eos", "pad", "decoder_start")
"""Tokens that a generation configuration names."""
Id = int | list[int] | None


def config_ids(wanted: Mapping[str, Id], given: Mapping[str, Any], plain: Any, *, pretrained: bool) -> dict[str, Id]:
    """Return the ids of special tokens for a configuration.

    The tokenizer decides. A token that it does not have keeps its id if weights are read, which may know it, and has
    none otherwise. Of weights that are read, several ends and the start of the decoder are kept; another decoder starts
    with padding, as T5's does.

    Args:
        wanted: ids by key, `eos_token_id`; None for a token that the tokenizer does not have.
        given: the configuration of the preset or folder.
        plain: a configuration of the class with its defaults.
        pretrained: weights are read.
    """
    found: dict[str, Id] = {}
    start, pad = f"decoder_start{SUFFIX}", f"pad{SUFFIX}"
    if getattr(plain, "is_encoder_decoder", False) and pad in wanted:
        wanted = {start: wanted[pad], **wanted}
    for key, id_ in wanted.items():
        before = given.get(key, getattr(plain, key, None))
        if key == start and pretrained and before is not None:
            id_ = before
        after = _merged(before, id_, keep=pretrained)
        if after is None:
            used = hasattr(plain, key) and _can_be_none(type(plain), key)
        else:
            used = hasattr(plain, key) or key.removesuffix(SUFFIX) in GENERATED
        if used and after != before:
            found[key] = after
    for role in ("bos", "eos"):  # what some configurations force is the tokenizer's, too
        forced, key = f"forced_{role}{SUFFIX}", f"{role}{SUFFIX}"
        if (
            not pretrained
            and wanted.get(key) is not None
            and given.get(forced, getattr(plain, forced, None)) is not None
        ):
            found[forced] = wanted[key]
    return found


def set_text_ids(config: Any, wanted: Mapping[str, Id], *, pretrained: bool) -> None:
    """Set the ids of a text model inside of another configuration as those outside."""
    text = config.get_text_config()
    if text is config:
        return
    for key, id_ in wanted.items():
        if hasattr(text, key):
            after = _merged(getattr(text, key), id_, keep=pretrained)
            if after is not None or _can_be_none(type(text), key):
                setattr(text, key, after)


def set_generation_ids(model: Any) -> None:
    """Let a model generate with the ids of its configuration; several ends in a folder are kept."""
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    for role in GENERATED:
        key = f"{role}{SUFFIX}"
        own = getattr(model.config, key, None)
        own = getattr(model.config.get_text_config(), key, None) if own is None else own
        setattr(generation, key, _merged(getattr(generation, key, None), own, keep=True))


def _can_be_none(config_class: Any, key: str) -> bool:
    """Return whether a configuration can lack this token."""
    try:
        config_class(**{key: None})
    except Exception:  # configuration classes raise errors of many kinds for values that do not fit
        return False
    return True


def _merged(before: Id, id_: Id, *, keep: bool) -> Id:
    """Return an id for one that there was before: of several ends that have it, all."""
    if id_ is None:
        return before if keep else None
    if isinstance(before, list):
        ids = id_ if isinstance(id_, list) else [id_]
        if set(ids) <= set(before):
            return before
        return [*ids, *(other for other in before if other not in ids)] if keep else id_
    return id_
