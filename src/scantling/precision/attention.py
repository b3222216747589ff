"""Low-precision keys, values and queries inside the attention of transformers models.

transformers looks up attention functions by the name in `model.config._attn_implementation` (`AttentionInterface`) and
passes them the calling module. We wrap each function once per process. The wrapper rounds query, key and value to the
formats stored on the calling module, and does nothing for other modules. The name stays the same because models
compare it to choose masks and kernels. Keys are rounded after the rotary embedding, together with the cached keys,
which gives the values that a cache in this format would hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.numerics.torch_private import remove_forward_hooks
from scantling.precision.quantizer import Quantizer

_ATTRIBUTE = "_quantized_attention"
_wrappers: set[Callable[..., Any]] = set()
"""Wrappers that this process has registered instead of the functions of transformers."""


@dataclass(frozen=True)
class _Formats:
    """Formats of keys and values (`kv_cache`) and of queries."""

    kv_cache: Quantizer | None
    queries: Quantizer | None

    def __reduce__(self) -> tuple[Any, ...]:
        # Wrapping belongs to the process: a copy or an unpickled model wraps the functions again in its process.
        return _formats, (self.kv_cache, self.queries)


def _formats(kv_cache: Quantizer | None, queries: Quantizer | None) -> _Formats:
    """Return the formats, after wrapping all attention functions of this process."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in list(ALL_ATTENTION_FUNCTIONS):
        _wrap(name)
    return _Formats(kv_cache, queries)


def _wrap(name: str) -> None:
    """Wrap the attention function of this name, once."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    function = ALL_ATTENTION_FUNCTIONS[name]
    if function not in _wrappers:
        AttentionInterface.register(name, _quantizing(function))


def _quantizing(function: Callable[..., Any]) -> Callable[..., Any]:
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Any:
        formats = getattr(module, _ATTRIBUTE, None)
        if formats is not None and formats.queries is not None:
            query = formats.queries(query, axis=-1)
        if formats is not None and formats.kv_cache is not None:
            key, value = formats.kv_cache(key, axis=-1), formats.kv_cache(value, axis=-1)
        return function(module, query, key, value, *args, **settings)

    _wrappers.add(attention)
    return attention


def quantize_attention(model: nn.Module, kv_cache: Quantizer | None, queries: Quantizer | None) -> None:
    """Quantize the arguments of a model's attention.

    Args:
        model: model of transformers whose attention function has a name, such as `sdpa`.
        kv_cache: format of keys and values, (batch, heads, tokens, head size). Keys and values have separate scales. A
            token is one vector of one head; channels are the features of a head.
        queries: format of queries, of the same shape.

    Raises:
        UserError: if the attention cannot be set by name, or if part of the model has such formats already.
    """
    for part in model.modules():
        if has_quantized_attention(part):
            raise UserError(
                f"keys, values or queries of this model's {type(part).__name__} are already quantized; call "
                "sc.precision.restore first"
            )
    if not (hasattr(model, "set_attn_implementation") and model._can_set_attn_implementation()):  # type: ignore[operator]
        raise UserError(
            f"kv_cache and queries need a transformers model whose attention can be set by name; this "
            f"{type(model).__name__} is none. Leave them out"
        )
    for name in _names(model.config):
        _check(name)
    formats = _formats(kv_cache, queries)
    for part in model.modules():
        setattr(part, _ATTRIBUTE, formats)
        if hasattr(part, "set_attn_implementation"):
            part.register_forward_pre_hook(_wrap_current)


def restore_attention(model: nn.Module) -> None:
    """Undo `quantize_attention` for a model and all its submodules."""
    for part in model.modules():
        vars(part).pop(_ATTRIBUTE, None)
        remove_forward_hooks(part, [_wrap_current])


def has_quantized_attention(model: nn.Module) -> bool:
    """True if the attention of a model rounds its arguments."""
    return _ATTRIBUTE in vars(model)


def _wrap_current(model: nn.Module, _: Any) -> None:
    """Wrap the current attention function before a forward pass, since the user may have set another one.

    Skipped while compiling, because the check would break the graph.
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
            f"attention {name!r} has no function that can be wrapped, so that keys, values and queries would not be "
            "quantized; call model.set_attn_implementation('sdpa') first"
        )


def _names(config: Any) -> set[str]:
    """Return the names of the attention functions in a configuration and its sub-configurations."""
    parts = (getattr(config, key, None) for key in config.sub_configs)
    within = [_names(part) for part in parts if getattr(part, "_attn_implementation", None) is not None]
    return {config._attn_implementation}.union(*within)
