"""Keys, values and queries in few bits, inside the attention of transformers models.

The attention functions of transformers are looked up by the name that `model.config._attn_implementation` holds
(`AttentionInterface`). A function of the same kind that rounds its arguments first is registered beside the one in use,
and the model is told to take it, by a configuration of its own: other models, made of the same one, stay as they are.
Keys are rounded after their rotation, with what is in the cache already: what a cache in this format would hold. The
name is not saved with the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from scantling.errors import UserError
from scantling.precision.quantizer import Quantizer

_ATTRIBUTE = "_attention_in_few_bits"


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
        if self.name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(self.name, _rounding(ALL_ATTENTION_FUNCTIONS[base], kv_cache, queries))
            AttentionMaskInterface.register(self.name, ALL_MASK_ATTENTION_FUNCTIONS[base])

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
    base = implementation(model)
    if base is None:
        raise UserError(
            f"kv_cache and queries are quantized in the attention of transformers models; this {type(model).__name__} "
            "has none that can be set by name"
        )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if base not in ALL_ATTENTION_FUNCTIONS:
        raise UserError(
            f"attention {base!r} belongs to each model and cannot be wrapped; call "
            "model.set_attn_implementation('sdpa') first"
        )
    registered = _Registered(base, kv_cache, queries)
    _own_config(model)
    model.set_attn_implementation(registered.name)  # type: ignore[operator]
    setattr(model, _ATTRIBUTE, registered)


def restore_attention(model: nn.Module) -> None:
    """Give a model and its parts the attention that they had before `quantize_attention`."""
    for part in list(_quantized_parts(model)):
        part.set_attn_implementation(vars(part)[_ATTRIBUTE].base)  # type: ignore[operator]
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)


def is_quantized(model: nn.Module) -> bool:
    """Whether `quantize_attention` is in force."""
    registered = vars(model).get(_ATTRIBUTE)
    return registered is not None and implementation(model) == registered.name


def _quantized_parts(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if is_quantized(module))


def _own_config(model: nn.Module) -> None:
    """Give a model and its parts a copy of the configuration they share, which other models may share with them."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if id(value) in copies and hasattr(value, "_attn_implementation"):
                setattr(module, name, copies[id(value)])


def implementation(model: nn.Module) -> str | None:
    """The name of a model's attention function; None where it has none."""
    if not hasattr(model, "set_attn_implementation") or not model._can_set_attn_implementation():  # type: ignore[operator]
        return None
    name: str | None = model.config._attn_implementation  # type: ignore[union-attr,assignment]
    return name


def _rounding(function: Any, kv_cache: Quantizer | None, queries: Quantizer | None) -> Callable[..., Any]:
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Any:
        if queries is not None:
            query = queries(query, axis=-1)
        if kv_cache is not None:
            key, value = kv_cache(key, axis=-1), kv_cache(value, axis=-1)
        return function(module, query, key, value, *args, **settings)

    return attention
