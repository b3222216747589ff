"""Keys, values and queries in few bits, inside the attention of transformers models.

The attention functions of transformers are looked up by the name that `model.config._attn_implementation` holds
(`AttentionInterface`), and are given the module that asks for one. Each is put, once in a process, behind a function
that rounds its arguments to the formats that this module holds; with those of other modules it does nothing. The name
stays: models compare it to choose masks and kernels. Keys are rounded after their rotation, with what is in the cache
already: what a cache in this format would hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.precision.quantizer import Quantizer

_ATTRIBUTE = "_attention_in_few_bits"
_rounding_functions: set[Callable[..., Any]] = set()
"""Those that were put before the functions of transformers, in this process."""


@dataclass(frozen=True)
class _Formats:
    """Of keys and values, and of queries."""

    kv_cache: Quantizer | None
    queries: Quantizer | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _formats, (self.kv_cache, self.queries)


def _formats(kv_cache: Quantizer | None, queries: Quantizer | None) -> _Formats:
    """The formats, in a process whose attention functions heed them."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in list(ALL_ATTENTION_FUNCTIONS):
        _wrap(name)
    return _Formats(kv_cache, queries)


def _wrap(name: str) -> None:
    """Put the function of this name behind one that rounds, once."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    function = ALL_ATTENTION_FUNCTIONS[name]
    if function not in _rounding_functions:
        AttentionInterface.register(name, _rounding(function))


def _rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Any:
        formats = getattr(module, _ATTRIBUTE, None)
        if formats is not None and formats.queries is not None:
            query = formats.queries(query, axis=-1)
        if formats is not None and formats.kv_cache is not None:
            key, value = formats.kv_cache(key, axis=-1), formats.kv_cache(value, axis=-1)
        return function(module, query, key, value, *args, **settings)

    _rounding_functions.add(attention)
    return attention


def quantize_attention(model: nn.Module, kv_cache: Quantizer | None, queries: Quantizer | None) -> None:
    """Let a model's attention take its arguments in few bits.

    Args:
        model: of transformers, with an attention function that has a name, such as `sdpa`.
        kv_cache: of keys and values, (batch, heads, tokens, size of a head), each with scales of its own; a token is
            one vector of a head, channels are those of a head.
        queries: of queries, of the same shape.

    Raises:
        UserError: a model whose attention has no function of that kind, or a part of which has such formats already.
    """
    for part in model.modules():
        if has_quantized_attention(part):
            raise UserError(
                f"the attention of this model's {type(part).__name__} takes keys, values or queries in few bits "
                "already; call sc.precision.restore first"
            )
    if not (hasattr(model, "set_attn_implementation") and model._can_set_attn_implementation()):  # type: ignore[operator]
        raise UserError(
            f"kv_cache and queries are quantized in the attention of transformers models; this {type(model).__name__} "
            "has none that can be set by name"
        )
    for name in _names(model.config):
        _check(name)
    formats = _formats(kv_cache, queries)
    for part in model.modules():
        setattr(part, _ATTRIBUTE, formats)
        if hasattr(part, "set_attn_implementation"):
            part.register_forward_pre_hook(_still_wrapped)


def restore_attention(model: nn.Module) -> None:
    """Give a model and its parts the attention that they had before `quantize_attention`."""
    for part in model.modules():
        vars(part).pop(_ATTRIBUTE, None)
        for key, hook in list(part._forward_pre_hooks.items()):
            if hook is _still_wrapped:
                del part._forward_pre_hooks[key]


def has_quantized_attention(model: nn.Module) -> bool:
    """Whether the attention of a model takes its arguments in few bits."""
    return _ATTRIBUTE in vars(model)


def _still_wrapped(model: nn.Module, _: Any) -> None:
    """Before a forward pass: the attention may have been set to one that is not wrapped, and would round nothing.

    Not looked at while a model is compiled, which would break its graph.
    """
    if torch.compiler.is_compiling():
        return
    for name in _names(model.config):
        _check(name)
        _wrap(name)


def _check(name: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name not in ALL_ATTENTION_FUNCTIONS:
        raise UserError(
            f"attention {name!r} belongs to each model and cannot be wrapped, so that keys, values and queries would "
            "stay whole; call model.set_attn_implementation('sdpa') first"
        )


def _names(config: Any) -> set[str]:
    """The attention functions that a configuration and those within it name."""
    parts = (getattr(config, key, None) for key in config.sub_configs)
    within = [_names(part) for part in parts if getattr(part, "_attn_implementation", None) is not None]
    return {config._attn_implementation}.union(*within)
