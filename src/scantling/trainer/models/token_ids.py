"""Ids of special tokens: keep tokenizer, model configuration and generation configuration consistent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUFFIX = "_token_id"
GENERATED = ("bos", "eos", "pad", "decoder_start")
"""Tokens that a generation configuration names."""
Id = int | list[int] | None


def config_ids(wanted: Mapping[str, Id], given: Mapping[str, Any], plain: Any, *, pretrained: bool) -> dict[str, Id]:
    """Return the special-token ids that the configuration has to change.

    The tokenizer decides. A token that the tokenizer lacks keeps its id if weights are loaded, which may know the
    token; otherwise it gets none. If weights are loaded, a list of end tokens and the decoder's start token are kept.
    Otherwise, decoding starts with padding, as in T5.

    Args:
        wanted: ids by key such as `eos_token_id`; None for a token that the tokenizer lacks.
        given: the configuration of the preset or folder.
        plain: a configuration of the class with its defaults.
        pretrained: True if weights are loaded.
    """
    found: dict[str, Id] = {}
    start, pad = f"decoder_start{SUFFIX}", f"pad{SUFFIX}"
    if getattr(plain, "is_encoder_decoder", False) and pad in wanted:
        # an explicit start token in `wanted` wins, because later entries replace earlier ones
        wanted = {start: wanted[pad], **wanted}
    for key, id_ in wanted.items():
        before = given.get(key, getattr(plain, key, None))
        # trained weights expect the start token that they were trained with
        if key == start and pretrained and before is not None:
            id_ = before
        after = _merged(before, id_, keep=pretrained)
        if after is None:
            # some classes require an id; they keep theirs although the tokenizer has no such token
            used = hasattr(plain, key) and _can_be_none(type(plain), key)
        else:
            # a generation configuration takes these ids from the model's, even if its class has no such key
            used = hasattr(plain, key) or key.removesuffix(SUFFIX) in GENERATED
        if used and after != before:
            found[key] = after
    for role in ("bos", "eos"):  # a forced token (`forced_bos_token_id`) must be the tokenizer's, too
        forced, key = f"forced_{role}{SUFFIX}", f"{role}{SUFFIX}"
        if (
            not pretrained
            and wanted.get(key) is not None
            and given.get(forced, getattr(plain, forced, None)) is not None
        ):
            found[forced] = wanted[key]
    return found


def set_text_ids(config: Any, wanted: Mapping[str, Id], *, pretrained: bool) -> None:
    """Copy the ids to the text model's nested configuration, if there is one."""
    text = config.get_text_config()
    if text is config:
        return
    for key, id_ in wanted.items():
        if hasattr(text, key):
            after = _merged(getattr(text, key), id_, keep=pretrained)
            if after is not None or _can_be_none(type(text), key):
                setattr(text, key, after)


def set_generation_ids(model: Any) -> None:
    """Copy the ids of a model's configuration to its generation configuration; keep a list of end tokens."""
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    for role in GENERATED:
        key = f"{role}{SUFFIX}"
        own = getattr(model.config, key, None)
        # multimodal models keep the ids in their text configuration
        own = getattr(model.config.get_text_config(), key, None) if own is None else own
        setattr(generation, key, _merged(getattr(generation, key, None), own, keep=True))


def _can_be_none(config_class: Any, key: str) -> bool:
    """Return True if the configuration class accepts None for this token."""
    try:
        config_class(**{key: None})
    except Exception:  # configuration classes raise errors of many kinds for invalid values
        return False
    return True


def _merged(before: Id, id_: Id, *, keep: bool) -> Id:
    """Return the id to use instead of `before`: all end tokens of a list that contains it, or else the id itself."""
    if id_ is None:
        return before if keep else None
    if isinstance(before, list):
        ids = id_ if isinstance(id_, list) else [id_]
        # chat models end with several tokens; the tokenizer names only one of them
        if set(ids) <= set(before):
            return before
        # the tokenizer's ids first, because code that needs one end token takes the first
        return [*ids, *(other for other in before if other not in ids)] if keep else id_
    return id_
