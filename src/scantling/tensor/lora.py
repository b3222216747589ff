"""LoRA on TT layers: y = TT(x) + B A x, with the adapters of peft.

peft only knows the layers of PyTorch. This module teaches its LoRA adapters TT layers. Adapters of other kinds are
refused with a message that names the alternatives. Importing this module imports peft, see `peft_support`.
"""

from __future__ import annotations

from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import Embedding, Linear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from scantling.errors import UserError
from scantling.tensor.embedding import TTMEmbedding, TTMEmbeddingBag, TTMHead
from scantling.tensor.experts import TTExperts
from scantling.tensor.linear import TTLinear

TT_LAYERS = (TTLinear, TTMEmbedding, TTMHead, TTExperts)
_WEIGHT_FREE_INITS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that do not change the weight under the adapter."""


class _TTAdapter:
    """Mixin of adapters on TT layers. The layer under an adapter may become dense later (`sc.densify`)."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if isinstance(_base_layer(self), TT_LAYERS):
            raise UserError(
                "adapters cannot be merged into TT layers, which have no dense weight; call sc.densify(model) first, "
                "or keep the adapters next to the TT layers"
            )
        super().merge(safe_merge, adapter_names)  # type: ignore[misc]


class LoraTTLinear(_TTAdapter, Linear):  # type: ignore[misc]
    """LoRA next to a `TTLinear`, or next to a head that is tied to a TT embedding."""

    def __init__(self, base_layer: Any, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        super().__init__(base_layer, adapter_name, config, **kwargs)
        origin = getattr(_base_layer(base_layer), "origin", None)
        self.fan_in_fan_out = origin is not None and issubclass(origin.layer, Conv1D)  # layout after densify

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features


class LoraTTMEmbedding(_TTAdapter, Embedding):  # type: ignore[misc]
    """LoRA next to a `TTMEmbedding`."""

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.num_embeddings, module.embedding_dim

    def _embed(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        # peft's own method reads further settings of `nn.Embedding`, which a TT table does not have.
        return nn.functional.embedding(input, weight, padding_idx=_base_layer(self).padding_idx)


def _base_layer(layer: Any) -> Any:
    """Return the layer under all adapters."""
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def prepare_config(tuner: Any, model: nn.Module, config: Any) -> None:
    """Prepare an adapter configuration for the TT layers of a model.

    Raises:
        UserError: if TT layers do not support these adapters.
    """
    layers: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, TT_LAYERS)
    }
    if not layers:
        return
    # Resolve the targets as peft would, so that TT layers among them are known before adapters are added.
    if hasattr(config, "target_modules"):
        tuner._prepare_adapter_config(config, tuner.get_model_config(model))  # sets the architecture's default targets
    if str(getattr(config, "target_modules", None)).lower() == "all-linear":
        config.target_modules = _all_linear(model)
    targets = {name: layer for name, layer in layers.items() if _is_target(tuner, config, name)}
    if targets and type(tuner) is LoraModel:
        _check_supported(config, targets)
        config._register_custom_module({TTLinear: LoraTTLinear, TTMHead: LoraTTLinear, TTMEmbedding: LoraTTMEmbedding})
    elif targets:
        name, layer = next(iter(targets.items()))
        raise UserError(
            f"{type(config).__name__}: {name} is a {type(layer).__name__}, and TT layers support only LoraConfig; use "
            "that, leave TT layers out of target_modules, or call sc.densify(model) first"
        )


def _is_target(tuner: Any, config: Any, name: str) -> bool:
    if not getattr(config, "target_modules", None):
        return False
    return bool(tuner._check_target_module_exists(config, name))


def _check_supported(config: LoraConfig, targets: dict[str, nn.Module]) -> None:
    for name, layer in targets.items():
        if isinstance(layer, TTExperts | TTMEmbeddingBag):
            raise UserError(
                f"LoraConfig: {name} is a {type(layer).__name__}, which does not support adapters; leave it out of "
                "target_modules, or call sc.densify(model) first"
            )
    if config.init_lora_weights not in _WEIGHT_FREE_INITS:
        raise UserError(
            f"LoraConfig: init_lora_weights={config.init_lora_weights!r} changes the weight under the adapter, but TT "
            f"layers have no dense weight; use one of {', '.join(map(repr, _WEIGHT_FREE_INITS))}"
        )
    for option in ("use_dora", "use_qalora"):
        if getattr(config, option, False):
            raise UserError(
                f"LoraConfig: {option}=True needs the dense weight in every step, which TT layers do not have; leave "
                "it out, or call sc.densify(model) first"
            )


def _all_linear(model: nn.Module) -> list[str]:
    """Return the names of all linear layers, TT or dense, except the output layer and those inside experts or
    adapters.
    """
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    inside = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, TTExperts) or hasattr(module, "base_layer")
    ]
    return sorted(
        name
        for name, module in model.named_modules()
        if isinstance(_base_layer(module), nn.Linear | Conv1D | TTLinear)
        and module is not head
        and not name.startswith(tuple(inside))
    )
