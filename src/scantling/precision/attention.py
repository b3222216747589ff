"""Keys, values and queries in few bits, inside the attention of transformers models.

The attention functions of transformers are looked up by the name that `model.config._attn_implementation` holds
(`AttentionInterface`); parts of a model may have configurations of their own. A function of the same kind that rounds
its arguments first is registered beside each in use, and the model is told to take it, by a configuration of its own:
other models, made of the same one before, stay as they are. What is made of the model's configuration afterwards has
the same attention, until `restore_attention`. Keys are rounded after their rotation, with what is in the cache already:
what a cache in this format would hold. The name is not saved with the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from scantling.errors import UserError
from scantling.precision.quantizer import Quantizer

_ATTRIBUTE = "_attention_in_few_bits"
_REGISTERED: dict[str, _Registered] = {}
"""By name, in this process."""


class _Registered:
    """A function that rounds its arguments, registered beside the one it calls; in every process it is loaded in.

    Args:
        base: name of the function it calls.
        kv_cache, queries: what rounds.
    """

    def __init__(self, base: str, kv_cache: Quantizer | None, queries: Quantizer | None) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

        self.base, self._given = base, (base, kv_cache, queries)
        self.name = f"{base}, keys and values {kv_cache}, queries {queries}".replace(" None", " whole")
        if self.name not in _REGISTERED:
            AttentionInterface.register(self.name, _rounding(ALL_ATTENTION_FUNCTIONS[base], kv_cache, queries))
            if base in ALL_MASK_ATTENTION_FUNCTIONS:  # without, transformers gives a function the mask as it is
                AttentionMaskInterface.register(self.name, ALL_MASK_ATTENTION_FUNCTIONS[base])
            _REGISTERED[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Registered, self._given


def quantize_attention(model: nn.Module, kv_cache: Quantizer | None, queries: Quantizer | None) -> None:
    """Let a model's attention take its arguments in few bits.

    Args:
        model: of transformers, with an attention function that has a name, such as `sdpa`.
        kv_cache: of keys and values, (batch, heads, tokens, size of a head), each with scales of its own; channels are
            those of a head.
        queries: of queries, of the same shape.

    Raises:
        UserError: a model whose attention cannot be changed, or a part of which has such an attention already.
    """
    for part in _quantized_parts(model):
        raise UserError(
            f"the attention of this model's {type(part).__name__} takes keys, values or queries in few bits already; "
            "call sc.precision.restore first"
        )
    if not _can_be_set(model):
        raise UserError(
            f"kv_cache and queries are quantized in the attention of transformers models; this {type(model).__name__} "
            "has none that can be set by name"
        )
    for base in _names(model.config):
        _check(base)
    registered = {base: _Registered(base, kv_cache, queries) for base in _names(model.config)}
    _set(model, lambda base: registered[base].name)
    setattr(model, _ATTRIBUTE, list(registered.values()))  # so that they are registered where the model is unpickled


def restore_attention(model: nn.Module) -> None:
    """Give a model and its parts the attention that they had before `quantize_attention`."""
    for part in _quantized_parts(model):
        _set(part, lambda name: _REGISTERED[name].base if name in _REGISTERED else name)
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)


def is_quantized(model: nn.Module) -> bool:
    """Whether the attention of a model takes its arguments in few bits."""
    return _can_be_set(model) and any(name in _REGISTERED for name in _names(model.config))


def _quantized_parts(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if is_quantized(module))


def _check(base: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    advice = "call model.set_attn_implementation('sdpa') first"
    if base not in ALL_ATTENTION_FUNCTIONS:
        raise UserError(f"attention {base!r} belongs to each model and cannot be wrapped; {advice}")
    if "flash" in base:
        raise UserError(f"attention {base!r} loads its kernel by its own name and cannot be wrapped; {advice}")


def _set(model: nn.Module, name_of: Callable[[str], str]) -> None:
    """Set the attention of a model and its parts by what each has, in configurations that are theirs alone."""
    _own_config(model)
    model.set_attn_implementation(_renamed(model.config, name_of))  # type: ignore[operator]


def _own_config(model: nn.Module) -> None:
    """Give a model and its parts a copy of the configuration they share, which other models may share with them."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if id(value) in copies and hasattr(value, "_attn_implementation"):
                setattr(module, name, copies[id(value)])


def _can_be_set(model: nn.Module) -> bool:
    return hasattr(model, "set_attn_implementation") and bool(model._can_set_attn_implementation())  # type: ignore[operator]


def _parts(config: Any) -> dict[str, Any]:
    """Configurations within one that name an attention, by their keys."""
    found = {key: getattr(config, key, None) for key in config.sub_configs}
    return {key: part for key, part in found.items() if getattr(part, "_attn_implementation", None) is not None}


def _names(config: Any) -> list[str]:
    """The attention functions that a configuration names."""
    own = config._attn_implementation
    return list(dict.fromkeys([own, *(name for part in _parts(config).values() for name in _names(part))]))


def _renamed(config: Any, name_of: Callable[[str], str]) -> str | dict[str, Any]:
    """The same functions by other names, as `set_attn_implementation` takes them."""
    names = _names(config)
    if len(names) == 1:
        return name_of(names[0])
    parts = {key: _renamed(part, name_of) for key, part in _parts(config).items()}
    return {"": name_of(config._attn_implementation), **parts}


def _rounding(function: Any, kv_cache: Quantizer | None, queries: Quantizer | None) -> Callable[..., Any]:
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Any:
        if queries is not None:
            query = queries(query, axis=-1)
        if kv_cache is not None:
            key, value = kv_cache(key, axis=-1), kv_cache(value, axis=-1)
        return function(module, query, key, value, *args, **settings)

    return attention
