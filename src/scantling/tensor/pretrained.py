"""TT models in `save_pretrained` and `from_pretrained` of transformers.

transformers lets a quantization method replace layers of the skeleton before it loads weights into them by name; TT
layers use this mechanism. `config.quantization_config` holds a description of the layers (`layout.py`). It is updated
at every save, so that it stays right after ranks have changed. Importing this module registers the method.

A process that has not imported this module must not take such a checkpoint for a dense one: transformers would warn
and continue with random weights. So the file also holds a guard, a tensor of one element under the name of a dense
weight: transformers rejects its shape.

Limit: if the Trainer gathers sharded parameters itself before saving (FSDP), the gathered state is not used; keep
cores replicated.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from scantling.errors import UserError
from scantling.numerics.torch_private import remove_load_state_dict_pre_hooks
from scantling.saved_models import (
    CONFIG,
    GENERATION,
    Weights,
    blame,
    check_layer_counts,
    check_model_size,
    check_weights,
    read_model_config,
    without_byte_order_marks,
)
from scantling.tensor.embedding import TTMHead
from scantling.tensor.layer import TTLayer
from scantling.tensor.layout import Entry, describe, rebuild
from scantling.tensor.replace import find_tt_layers, record_tied_names, rename_tied_names, restore_dense_layers
from scantling.tensor.resize import support_resizing
from scantling.tensor.slicing import freeze_if_empty

METHOD = "scantling"
FORMAT = 1

support_resizing()


@register_quantization_config(METHOD)
class TTConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Description of a TT model in `config.quantization_config`.

    Args:
        layers: entries from `layout.describe`.
        guard: name of the guard tensor, for readers of the file; loading ignores a tensor of this name.
        format: version of this description.
    """

    def __init__(self, layers: dict[str, Entry] | None = None, guard: str = "", format: int = FORMAT, **_: Any) -> None:
        if format > FORMAT:
            raise UserError(f"given format {format} of a newer scantling; this version reads {FORMAT}: upgrade it")
        self.quant_method = METHOD
        self.layers, self.guard, self.format = layers or {}, guard, format


@register_quantizer(METHOD)
class TTQuantizer(HfQuantizer):  # type: ignore[misc]
    """Quantization method of transformers that builds TT layers before loading and describes them before saving."""

    quantization_config: TTConfig
    is_trainable = True
    is_qat_trainable = True
    is_compileable = True

    def validate_environment(self, *_: Any, **__: Any) -> None:
        if not self.pre_quantized:
            raise UserError("a model cannot be tensorized while it is loaded; load it, then call scantling.tensorize")

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the state with a guard; also updates the model's configuration."""
        layers = describe(model)
        guard = _guard_name(model, layers)
        model.config.quantization_config = self.quantization_config = TTConfig(layers, guard)
        return {**model.state_dict(), guard: torch.zeros(1, dtype=model.dtype)}, {}

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        tied_names = record_tied_names(model)
        local_name, config = _local_names(model), self.quantization_config
        rebuild(model, _rename_entries(config.layers, local_name))
        rename_tied_names(tied_names)
        if any(layer.rank_gates is not None for layer in model.modules() if isinstance(layer, TTLayer)):
            # Rank gates stay in fp32, whatever dtype the model is loaded in.
            model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "rank_gates"}
        # Loading must not report the guard as an unexpected tensor.
        path, name = config.guard.rpartition(".")[::2]
        known = set(model._keys_to_ignore_on_load_unexpected or ())
        guards = {f"^{re.escape(f'{module}.{name}')}$" for module in (path, local_name(path))}
        model._keys_to_ignore_on_load_unexpected = known | guards
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for layer, names in find_tt_layers(model).items():
            for name, parameter in layer.named_parameters():
                freeze_if_empty(parameter)
                # transformers marks parameters that it has loaded.
                if getattr(parameter, "_is_hf_initialized", False):
                    continue
                if not isinstance(layer, TTMHead):
                    if parameter.is_meta:
                        raise UserError(f"{names[0]} is a TT layer, which device_map cannot offload to disk")
                    raise UserError(f"the checkpoint holds no values for {names[0]}.{name}")
                nn.init.zeros_(parameter)  # a new head on a base model
        model.is_quantized = False  # weights are not quantized: .half() etc. must work
        attach(model)
        return model

    def _dequantize(self, model: Any, **_: Any) -> Any:
        restore_dense_layers(model)
        detach(model)
        return model


def attach(model: nn.Module) -> None:
    """Let the transformers models inside `model` save their TT layers."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and find_tt_layers(module):
            if not isinstance(getattr(module, "hf_quantizer", None), TTQuantizer):
                module.hf_quantizer = TTQuantizer(TTConfig())
            module.register_load_state_dict_pre_hook(_drop_guard)


def detach(model: nn.Module) -> None:
    """Undo `attach` after all TT layers have been removed."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and isinstance(getattr(module, "hf_quantizer", None), TTQuantizer):
            module.hf_quantizer.remove_quantization_config(module)
            remove_load_state_dict_pre_hooks(module, _drop_guard)


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device_map: Any = None,
    state: dict[str, Tensor] | None = None,
) -> Any:
    """Load a model that `save_pretrained` wrote, of a transformers class or one registered with `AutoModel`.

    Args:
        folder, dtype, device_map: as in `scantling.load`.
        state: tensors of the model, if the folder does not hold them in transformers' format.

    Raises:
        UserError: if the folder does not exist, the class is unknown, weights are missing, or tensors of a TT model
            do not belong to it.
    """
    import transformers

    folder = Path(folder)
    if not (folder / CONFIG).exists() and not (folder / CONFIG).is_symlink():
        raise UserError(f"cannot load {folder}: it has no {CONFIG}; give a folder that save_pretrained wrote")
    content = read_model_config(folder / CONFIG)
    name = next(iter(content.get("architectures") or ()), None)
    with blame(folder / CONFIG):
        model_class = _find_model_class(name, content)
        if model_class is None:
            raise UserError(f"transformers {transformers.__version__} has no model class {name!r}")
    # Read only the headers of the files here.
    if state is None:
        weights = check_weights(folder)
    else:
        elements = sum(tensor.numel() for tensor in state.values())
        weights = Weights("quantized.safetensors, unpacked with quantized.json,", len(state), elements)
    files = weights.files if weights is not None else "the weights"
    options = {"dtype": "auto" if dtype is None else dtype, "device_map": device_map, "local_files_only": True}
    with without_byte_order_marks(folder) as readable:
        config = _load_config(folder, readable, model_class, content, weights)
        generation = None
        if (folder / GENERATION).is_file():
            with blame(folder / GENERATION):
                generation = transformers.GenerationConfig.from_pretrained(readable, local_files_only=True)
        with blame(f"{folder}, whose {CONFIG} and {files} do not fit each other"):
            model, report = model_class.from_pretrained(
                None if state is not None else readable,
                config=config,
                state_dict=state,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    model.name_or_path = model.config.name_or_path = str(folder)
    if generation is not None and model.can_generate():
        model.generation_config = generation
    _check_report(model, report, f"{folder}: {files}", name)
    return model


def _load_config(
    folder: Path, readable: Path, model_class: Any, content: dict[str, Any], weights: Weights | None
) -> Any:
    """Return the model's configuration, checked against the files of its weights before memory is allocated.

    Args:
        folder: folder that the user gave, for messages.
        readable: the same folder, in a form that transformers reads.
        model_class: class of the model.
        content: content of the configuration file.
        weights: description of the files; None if unknown.
    """
    with blame(folder / CONFIG):
        config = model_class.config_class.from_pretrained(readable, local_files_only=True)
        if not isinstance(config.dtype, torch.dtype | dict | None):
            raise UserError(f"given dtype={config.dtype!r}; it must be the name of a dtype")
        if weights is not None:
            check_layer_counts(content, weights)
            check_model_size(_meta_model(model_class, config), weights)
    return config


def _check_report(model: Any, report: dict[str, Any], source: str, class_name: str | None) -> None:
    """Raise if the weights that transformers has loaded do not fit the model.

    Args:
        model: loaded model.
        report: loading information of transformers.
        source: folder and files, for messages.
        class_name: class of the model, for messages.
    """
    if report["mismatched_keys"]:
        tensor, saved, expected = min(report["mismatched_keys"])
        raise UserError(f"{source} holds {tensor} of shape {list(saved)}, {CONFIG} describes {list(expected)}")
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(
            f"{source} holds no values for {len(missing)} parameters that {CONFIG} describes, such as "
            f"{', '.join(missing[:3])}"
        )
    if beyond := sorted(name for name in report["unexpected_keys"] if _is_beyond_end(model, name)):
        raise UserError(
            f"{source} holds {len(beyond)} tensors of layers that {CONFIG} does not have, such as {beyond[0]}"
        )
    if report["unexpected_keys"] and find_tt_layers(model):
        unknown = sorted(report["unexpected_keys"])
        raise UserError(
            f"{source} holds {len(unknown)} tensors that the {class_name} of {CONFIG} does not have, such as "
            f"{', '.join(unknown[:3])}; if sc.tensorize was given only the base model, a tied head was saved as an "
            "untied one: give it the whole model"
        )


def _is_beyond_end(model: nn.Module, name: str) -> bool:
    """True if a tensor belongs to a layer after the last one of a list in the model."""
    parts = name.split(".")
    modules = dict(model.named_modules(remove_duplicate=False))
    lists = ((modules.get(".".join(parts[:i])), part) for i, part in enumerate(parts) if part.isdecimal())
    return any(isinstance(module, nn.ModuleList) and int(part) >= len(module) for module, part in lists)


def _find_model_class(name: str | None, config: dict[str, Any]) -> Any:
    """Return the class of a saved model: of transformers, or registered with `AutoModel`. None if unknown."""
    import transformers

    exported: Any = getattr(transformers, str(name), None)
    classes: list[Any] = [exported] if isinstance(exported, type) else []
    classes += [each for each in _registered_classes(config) if each.__name__ == name]
    return next((each for each in classes if issubclass(each, PreTrainedModel) and each.config_class), None)


def _meta_model(model_class: Any, config: Any) -> Any:
    """Return the model of a configuration on the meta device, including its TT layers."""
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    cores = getattr(config, "quantization_config", None)
    if isinstance(cores, dict) and cores.get("quant_method") == METHOD:
        TTQuantizer(TTConfig(**cores))._process_model_before_weight_loading(model)
    return model


def _registered_classes(config: dict[str, Any]) -> list[Any]:
    """Return the class that `AutoModel` uses for such a configuration, as a list of at most one."""
    kind = config.get("model_type")
    try:
        return [AutoModel._model_mapping[type(AutoConfig.for_model(kind))]]
    except (KeyError, TypeError, ValueError):
        return []


def _guard_name(model: Any, layers: dict[str, Entry]) -> str:
    """Return the name of a replaced dense weight, in the base model if possible, since all architectures share it."""
    prefix = f"{model.base_model_prefix}."
    # Linear layers and tables before experts, the base model before the rest, then by name.
    first = min(layers, key=lambda name: ("up" in layers[name], not name.startswith(prefix), name))
    return f"{first}.down_proj" if "up" in layers[first] else f"{first}.weight"


def _drop_guard(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Drop the guard from a state read from a file, so that it can be loaded strictly."""
    layers = describe(module)
    if layers:
        state.pop(prefix + _guard_name(module, layers), None)


def _local_names(model: Any) -> Callable[[str], str]:
    """Return a function from names in the saved model to names in this one, which may be its base or contain it."""
    prefix = f"{model.base_model_prefix}."
    own = {name for name, _ in model.named_modules(remove_duplicate=False)}

    def local_name(name: str) -> str:
        # The same model, then the base of the saved model, then a model around it.
        return next((each for each in (name, name.removeprefix(prefix), prefix + name) if each in own), name)

    return local_name


def _rename_entries(layers: dict[str, Entry], local_name: Callable[[str], str]) -> dict[str, Entry]:
    renamed: dict[str, Entry] = {}
    for name, entry in layers.items():
        names: Entry = {key: [local_name(each) for each in entry[key]] for key in ("names", "heads") if key in entry}
        renamed[local_name(name)] = {**entry, **names}
    return renamed
