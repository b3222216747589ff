"""Build a transformers model from a recipe's model section, with random weights or those of a folder.

Weights are read from safetensors only, and code in a model folder is never executed. A name on the Hugging Face Hub
refers to the model's folder in the local Hub cache.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from scantling.checksums import check_checksums
from scantling.errors import UserError, did_you_mean, first_line
from scantling.eval_mode import eval_mode
from scantling.precision.packed_files import is_quantized_folder
from scantling.precision.training import quantize_training
from scantling.saved_models import (
    CONFIG,
    MAX_TOKEN_ID,
    Weights,
    blame,
    check_layer_counts,
    check_model_size,
    check_weights,
    read_model_config,
    without_byte_order_marks,
)
from scantling.tensor import pretrained
from scantling.tensor.convert import tensorize
from scantling.tensor.layer import TTLayer
from scantling.tensor.layout import rebuild
from scantling.trainer.hub import hub_folder, is_hub_name
from scantling.trainer.models.presets import PRESETS
from scantling.trainer.models.token_ids import SUFFIX, config_ids, set_generation_ids, set_text_ids
from scantling.trainer.models.values import Read, parameters_on_meta, stored_values
from scantling.trainer.recipe import Recipe, load_recipe
from scantling.trainer.recipe.schema import TASKS, ModelSection
from scantling.trainer.tasks.base import Task, without_cache
from scantling.trainer.tasks.chunked_loss import chunk_loss

logger = logging.getLogger(__name__)

VOCABULARY_MULTIPLE = 64
_POSITIONS_AFTER_PADDING = {
    *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
}
"""Model types whose position ids start after the padding id, which leaves fewer usable positions."""
_OF_THE_DATA = {
    "num_numeric": "data.clicks",
    "table_sizes": "data.clicks",
    "image_size": "data.image_size",
    "num_channels": "data.image_channels",
}
"""Configuration keys that only the data can determine, and the recipe key that each follows from."""
TEXT_TASKS = ("causal-lm", "masked-lm", "seq2seq", "classification")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def convert_model(model: Any, recipe: Recipe) -> Any:
    """Apply the sections `tensor` and `precision`, and `train.loss_chunk`, of a recipe to a dense model in fp32.

    Args:
        model: on the CPU, or on the meta device, where TT parameters are not initialized.
        recipe: the model's recipe.
    """
    if recipe.tensor is not None:
        tensor = recipe.tensor
        # meta weights have no values, so svd has nothing to approximate
        init = "random" if next(model.parameters()).is_meta else tensor.init
        tensorize(model, tensor.rank, format=tensor.format, num_modes=tensor.num_modes, init=init)
    # after tensorize, because quantization also applies to the TT layers
    if recipe.precision.quantized:
        quantize_training(model, **recipe.precision.quantized)
    if recipe.precision.parameters == "bf16":
        store_weights_in_bf16(model)
    if recipe.train.loss_chunk is not None:
        chunk_loss(model, recipe.train.loss_chunk)
    return model


def store_weights_in_bf16(model: torch.nn.Module) -> None:
    """Round weight matrices and embeddings to bf16 in place; vectors, TT cores and rank gates stay as they are."""
    of_cores = {id(part) for layer in model.modules() if isinstance(layer, TTLayer) for part in layer.parts}
    for parameter in model.parameters():
        if parameter.ndim > 1 and id(parameter) not in of_cores:
            parameter.data = parameter.data.to(torch.bfloat16)


def recipe_task(recipe: Recipe) -> str:
    """Return the name of a recipe's task: `model.task`, or the result of `default_task`.

    Raises:
        RecipeError: settings that do not apply to the task of the model folder, or settings that it needs and lacks.
        UserError: as in `default_task`.
    """
    if recipe.model.task is not None:
        return recipe.model.task
    task = default_task(recipe.model)
    # the checks of a recipe did not know this task yet: repeat them with it
    if recipe.model.hf is not None:
        load_recipe(recipe, sections={"model": {"task": task}})
    return task


def default_task(section: ModelSection) -> str:
    """Return the task of a model section that names none: the preset's, or the one its architecture is made for.

    Raises:
        UserError: the configuration does not name an architecture with a known task; set `model.task`.
    """
    if section.preset is not None:
        return PRESETS[section.preset].task
    content = _read_config(section)
    architectures = content.get("architectures") or []
    # the first match wins, so a longer ending precedes the shorter one that it contains
    for ending, task in (
        ("T5WithLMHeadModel", "seq2seq"),  # the name of T5ForConditionalGeneration when T5 was published
        ("ForConditionalGeneration", "seq2seq"),
        ("ForCausalLM", "causal-lm"),
        ("ForVisionText2Text", "causal-lm"),  # of Idefics
        ("LMHeadModel", "causal-lm"),
        ("ForMaskedLM", "masked-lm"),
        ("ForSequenceClassification", "classification"),
        ("ForImageClassification", "image-classification"),
        ("DLRM", "clicks"),
    ):
        if any(str(name).endswith(ending) for name in architectures):
            # decoders that read images share the name ForConditionalGeneration with T5 and BART
            return "causal-lm" if task == "seq2seq" and _is_decoder(content) else task
    # configurations of multimodal models often list no architectures
    if not architectures and _is_decoder(content, multimodal=True):
        return "causal-lm"
    raise UserError(
        f"model.task: {_config_path(section)} names no training task (its architectures: "
        f"{architectures}); give one of {', '.join(TASKS)}"
    )


def _is_decoder(content: dict[str, Any], *, multimodal: bool = False) -> bool:
    """Return True for the configuration of a model without a text encoder.

    Gemma 3, for example, is conditioned on images: its `ForConditionalGeneration` predicts each token from those
    before it.

    Args:
        content: the contents of config.json.
        multimodal: True to accept only models that read more than text.
    """
    import transformers

    if content.get("model_type") not in transformers.CONFIG_MAPPING:
        return False
    config_class = transformers.CONFIG_MAPPING[content["model_type"]]
    if multimodal and config_class not in transformers.AutoModelForMultimodalLM._model_mapping:
        return False
    return not config_class().is_encoder_decoder


def build_config(
    section: ModelSection, task: Task, *, vocab_size: int, seq_len: int, config_overrides: dict[str, Any]
) -> Any:
    """Return the transformers configuration of a run.

    Args:
        section: the model section of the recipe.
        task: determines the Auto class.
        vocab_size: number of the tokenizer's ids.
        seq_len: the longest sequence of the run.
        config_overrides: settings that the task derives from the data, such as the number of labels, and the ids of
            special tokens for `config_ids`.

    Raises:
        UserError: an unknown key, values that are inconsistent, or a tokenizer or sequence length that does not fit.
    """
    import transformers

    from scantling.trainer.models.dlrm import register

    register()
    if section.preset is not None:
        preset = PRESETS[section.preset]
        given: dict[str, Any] = dict(preset.config)
        if not preset.fixed_vocab:
            # ceiling division: matrix products are faster if the vocabulary is a multiple of 64
            given["vocab_size"] = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
            if "max_position_embeddings" in given:
                given["max_position_embeddings"] = max(seq_len, given["max_position_embeddings"])
        model_type = preset.model_type
    else:
        given = _read_config(section)
        model_type = given.pop("model_type", None)
        if not isinstance(model_type, str):
            raise UserError(f"{section.hf}: its config.json names no model_type")
    try:
        config_class = transformers.CONFIG_MAPPING[model_type]
    except KeyError:
        known = did_you_mean(str(model_type), transformers.CONFIG_MAPPING.keys())
        raise UserError(
            f"{_source(section)}: transformers {transformers.__version__} knows no model_type '{model_type}'"
            + _hint(known)
        ) from None
    # the keys that the class knows are the attributes of an instance with defaults
    plain = config_class()
    for key in section.overrides:
        # hasattr is also True for methods such as to_dict, which are no settings
        if key.startswith("_") or not hasattr(plain, key) or callable(getattr(plain, key)):
            known = did_you_mean(key, plain.to_dict())
            raise UserError(f"model.overrides.{key}: {config_class.__name__} has no such key" + _hint(known))
        if key in _OF_THE_DATA and key in config_overrides:
            raise UserError(f"model.overrides.{key}: follows from the data; see {_OF_THE_DATA[key]}")
    # the head_dim of the folder belongs to its old hidden_size; without it the class derives a new one
    if "hidden_size" in section.overrides and "head_dim" not in section.overrides:
        given.pop("head_dim", None)
    if not hasattr(plain, "use_cache"):
        given.pop("use_cache", None)
    # ids of special tokens are merged with those of the folder; the other settings replace them
    token_ids = {key: id_ for key, id_ in config_overrides.items() if key.endswith(SUFFIX)}
    others = {key: value for key, value in config_overrides.items() if key not in token_ids}
    pretrained = reads_weights(section)
    others |= config_ids(token_ids, given, plain, pretrained=pretrained)
    try:
        with quiet():
            # later entries win: settings of the data replace those of the folder, and the user's overrides replace both
            config = config_class(**{**given, **others, **_merged(given, section.overrides)})
            set_text_ids(config, token_ids, pretrained=pretrained)
    except Exception as error:  # configuration classes raise errors of many kinds for invalid values
        text = f"{config_class.__name__} refuses these settings: {first_line(error)}"
        raise UserError(f"{_source(section)}: {text}") from None
    try:
        _check_fit(config, vocab_size, seq_len)
    except UserError as error:
        raise error if section.hf is None else UserError(f"{_source(section)}: {error}") from None
    return config


def _merged(given: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides, with nested configurations such as `text_config` merged instead of replaced."""
    # a plain update would drop every key of text_config that the override does not name
    parts = {key: given.get(key) for key, value in overrides.items() if isinstance(value, dict)}
    return overrides | {key: {**part, **overrides[key]} for key, part in parts.items() if isinstance(part, dict)}


def _source(section: ModelSection) -> str:
    """Return the recipe key or file that the settings of a model come from, for messages."""
    return "model" if section.hf is None else f"model.hf: {_config_path(section)}"


def build_model(
    section: ModelSection,
    task: Task,
    *,
    vocab_size: int,
    seq_len: int,
    config_overrides: dict[str, Any],
    seed: int,
    device: str = "cpu",
    buffers: bool = False,
) -> Any:
    """Return a model in fp32 and in training mode; the same seed always gives the same weights.

    Args:
        section, task, vocab_size, seq_len, config_overrides: as in `build_config`.
        seed: for weights that are not loaded.
        device: "cpu", or "meta" for a model without memory (no weights are loaded then).
        buffers: on the meta device, have the values of buffers on the CPU.

    Raises:
        UserError: as in `build_config`; weights that are missing, are not safetensors, or do not fit.
    """
    config = build_config(section, task, vocab_size=vocab_size, seq_len=seq_len, config_overrides=config_overrides)
    auto_class = task.find_auto_class(config)
    # restore the CPU generator afterwards, so that building a model leaves the random state of the run unchanged
    place = parameters_on_meta() if buffers else torch.device(device)
    with torch.random.fork_rng([]), quiet(), place:
        torch.manual_seed(seed)
        try:
            if device == "cpu" and reads_weights(section):
                model = _load(auto_class, section, config)
            else:
                model = auto_class.from_config(config, attn_implementation=section.attention, dtype=torch.float32)
                _rebuild_cores(model, section, device)
            # after the weights are there, because it replaces a padding row of zeros
            _learn_padding(model)
            set_generation_ids(model)
            if task.name == "causal-lm":
                _freeze_other_inputs(model)
        except UserError:
            raise
        except Exception as error:  # torch and transformers do not document which errors they raise
            if section.attention == "sdpa" and "scaled_dot_product_attention" in str(error):
                raise UserError(f"model.attention: {config.model_type} has no sdpa; set eager") from None
            raise UserError(f"{_source(section)}: transformers cannot build it: {first_line(error)}") from None
    # probing needs weights, so a meta model is judged by its attributes only
    if task.name == "causal-lm" and _is_encoder(model):
        raise UserError(_sees_targets(model))
    if device == "cpu":
        probe_model(model, task)
    return model.train()


def probe_model(model: Any, task: Task) -> None:
    """Refuse a model with weights whose outputs do not fit the task.

    Raises:
        UserError: a causal language model sees its targets, or a model computes nothing from text alone.
    """
    if task.name == "causal-lm" and _sees_ahead(model):
        raise UserError(_sees_targets(model))
    if task.name in TEXT_TASKS:
        _check_text_alone(model, task)


def _sees_targets(model: Any) -> str:
    return (
        f"{type(model).__name__} as configured sees the tokens that it is to predict; "
        "set model.overrides.is_decoder: true, or model.task: masked-lm"
    )


@torch.no_grad()
def _check_text_alone(model: Any, task: Task) -> None:
    """Refuse a model that also reads images or sound and computes nothing without them."""
    # models that read only text need no forward pass to prove it
    if getattr(model, "input_modalities", "text") in ("text", ("text",)):
        return
    try:
        with eval_mode(model):
            inputs = task.probe(model.config, torch.Generator().manual_seed(0))
            model(**{name: value.to(model.device) for name, value in inputs.items()})
    except Exception as error:  # models raise errors of many kinds for inputs that they lack
        raise UserError(
            f"{type(model).__name__} cannot be trained on text alone ({first_line(error)}); give a model that reads "
            "text without images or sound"
        ) from None


def _learn_padding(model: Any) -> None:
    """Make the padding token trainable if it also begins or ends texts; the embedding would keep it at zero."""
    # eos_token_id may be a list
    padding, ends, begin = (getattr(model.config, f"{kind}_token_id", None) for kind in ("pad", "eos", "bos"))
    if padding is None or padding not in [*(ends if isinstance(ends, list) else [ends]), begin]:
        return
    table = model.get_input_embeddings()
    if getattr(table, "padding_idx", None) != padding:
        return
    # nn.Embedding gives the row of padding_idx no gradient
    table.padding_idx = None
    # a row that initialization set to zero gets the scale of the other rows; loaded weights stay
    if not table.weight.is_meta and not table.weight[padding].any():
        torch.nn.init.normal_(table.weight[padding], std=float(table.weight.detach().std()))


def _freeze_other_inputs(model: Any) -> None:
    """Freeze the parameters that text does not reach in a multimodal model; they would get no gradients."""
    # a text-only model: its configuration is that of its text part
    if model.config.get_text_config() is model.config:
        return
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    # compare by identity: tied weights appear in several parts
    trained = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    others = {name: each for name, each in model.named_parameters() if id(each) not in trained}
    for parameter in others.values():
        parameter.requires_grad_(False)
    if others:
        logger.warning("text does not reach %d weights, which stay as they are: %s", len(others), _some(others))


def _is_encoder(model: Any) -> bool:
    """Return True if every position attends to later ones, as in a BERT that is not configured as a decoder."""
    # read from the attention modules: the class name does not tell, because a BERT can be a decoder
    causal = {module.is_causal for module in model.modules() if hasattr(module, "is_causal")}
    return causal == {False} and getattr(model.config, "is_decoder", None) is False


def _sees_ahead(model: Any) -> bool:
    """Return True if the prediction at a position depends on a later token; False if the model cannot be probed."""
    ids = _probe_ids(model)
    other = ids.clone()
    # only the last token differs, so a causal model gives the same logits before it
    other[:, -1] = ids[:, 0]
    return _outputs_differ(model, {"input_ids": ids}, {"input_ids": other}, slice(0, -1))


def mixes_documents(model: Any) -> bool:
    """Return True if tokens attend to earlier documents even though `position_ids` restart at each document."""
    ids = _probe_ids(model)
    other = ids.clone()
    half = ids.shape[1] // 2
    # only the first document differs, so logits of the second must stay the same
    other[:, :half] = ids[:, :half].flip(1)
    # (1, 2 * half): 0 .. half - 1 for each document
    positions = torch.arange(half, device=ids.device).repeat(2)[None]
    return _outputs_differ(
        model,
        {"input_ids": ids, "position_ids": positions},
        {"input_ids": other, "position_ids": positions},
        slice(half, None),
    )


def _probe_ids(model: Any) -> torch.Tensor:
    """Return the last eight ids of the vocabulary, shape (1, 8), without padding, which a model would mask."""
    config = model.config.get_text_config()
    padding = {getattr(config, name, None) for name in ("pad_token_id", "pad_index")}
    # from the end, because the first ids are often special tokens; up to two of the last eleven may be padding
    ids = [token for token in range(max(0, config.vocab_size - 11), config.vocab_size) if token not in padding]
    return torch.tensor(ids[-8:], device=model.device)[None]


@torch.no_grad()
def _outputs_differ(model: Any, one: dict[str, Any], other: dict[str, Any], places: slice) -> bool:
    """Return True if logits at some positions differ between two inputs by more than rounding error."""
    try:
        with eval_mode(model):
            logits, changed = (model(**inputs, **without_cache(model)).logits[:, places] for inputs in (one, other))
    except Exception:  # the model needs other inputs
        return False
    return bool((logits - changed).abs().max() > 1e-5 * logits.abs().max())


def reads_weights(section: ModelSection) -> bool:
    """Return True if the run starts from weights in the model folder."""
    if section.hf is None or section.pretrained is False:
        return False
    if is_hub_name(section.hf):  # a Hub model without weights raises an error when they are loaded
        return True
    folder = Path(section.hf)
    if any(os.path.lexists(folder / name) for name in _WEIGHTS):
        return True
    # before _other_weights, which would tell users to convert these files to safetensors
    if is_quantized_folder(folder):
        raise UserError(
            f"model.hf: {folder} holds packed weights, from which no run starts; give the run's export, a folder of "
            "quantize --dequantized, or train from random weights with model.pretrained: false"
        )
    if name := _other_weights(folder):
        raise UserError(
            f"{folder} holds weights, but no model.safetensors ({name}); convert them to safetensors, "
            "or train from random weights with model.pretrained: false"
        )
    if section.pretrained:
        raise UserError(f"model.pretrained: {folder} holds no model.safetensors")
    return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings; errors still pass."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        # do not enable bars that the caller had disabled
        if bars:
            hf_logging.enable_progress_bar()


def read_values(model: Any, section: ModelSection) -> Read | None:
    """Return a reader of the weights of a model folder, see `stored_values`.

    Args:
        model: result of `build_model` on the meta device with buffers, converted or not.
        section: the model section of the recipe.

    Raises:
        UserError: as in `build_model`.
    """
    _, weights = _find_weights(section)
    read = None if weights is None else stored_values(model, weights)
    config, table = model.config.get_text_config(), model.get_input_embeddings()
    padding = getattr(config, "pad_token_id", None)
    if read is None or padding is None or table.padding_idx is not None:
        return read
    # `_learn_padding` draws a row of zeros from the scale of the others
    name = next(name for name, each in model.named_parameters() if each is table.weight)
    return read if read(name, table.weight)[padding].any() else None


def _find_weights(section: ModelSection) -> tuple[Path, Weights | None]:
    """Return the folder of the weights, and its files after a check; None for weights in another format."""
    folder = _folder(section, weights=True)
    if is_hub_name(str(section.hf)) and not any((folder / name).is_file() for name in _WEIGHTS):
        raise UserError(
            f"model.hf: {section.hf} has no model.safetensors on the Hub or in its cache; download it, or train from "
            "random weights with model.pretrained: false"
        )
    # a damaged file should fail before the model is allocated
    check_checksums(folder)
    return folder, check_weights(folder)


def _load(auto_class: Any, section: ModelSection, config: Any) -> Any:
    """Load weights from the folder; warn of a new head and of unused weights, raise if other weights are missing."""
    folder, weights = _find_weights(section)
    files = "the folder" if weights is None else weights.files
    if weights is not None:
        with blame(folder / CONFIG):
            check_layer_counts(config.to_dict(), weights)
            # a model without memory is enough to compare its size with that of the files
            with torch.device("meta"):
                skeleton = auto_class.from_config(copy.deepcopy(config))
            _rebuild_cores(skeleton, section, "meta")
            check_model_size(skeleton, weights)
    # ignore_mismatched_sizes: shapes that differ are in the report, and a backbone weight among them is refused below
    with without_byte_order_marks(folder) as readable:
        model, report = auto_class.from_pretrained(
            readable,
            config=config,
            attn_implementation=section.attention,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # record the recipe's name instead of the folder that was read, which may be temporary
    model.name_or_path = model.config.name_or_path = str(section.hf)
    # a model without a submodule of this name is all backbone, such as T5 with its encoder and decoder
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    mismatched = {str(entry[0]) for entry in report["mismatched_keys"]}
    new = set(report["missing_keys"]) | mismatched
    # the pooler belongs to the head: masked-LM checkpoints have none, and only a classifier reads it
    backbone = sorted(name for name in new if name.startswith(prefix) and "pooler" not in name.split("."))
    if backbone:
        raise UserError(
            f"{section.hf}: {files} lacks {len(backbone)} weights of the model or has them in another shape, such as "
            f"{backbone[0]}; check {CONFIG} and model.overrides, or train from random weights with "
            "model.pretrained: false"
        )
    if new or report["unexpected_keys"]:
        left = _some(report["unexpected_keys"])
        logger.warning("%s: new weights, not in the folder: %s; weights not taken: %s", section.hf, _some(new), left)
    return model


def _rebuild_cores(model: Any, section: ModelSection, device: str) -> None:
    """Replace layers of a meta-device model by TT layers if the folder holds a TT model."""
    # TT models store their layers under this key, because transformers dispatches loading by it
    cores = getattr(model.config, "quantization_config", None)
    if not isinstance(cores, dict) or cores.get("quant_method") != pretrained.METHOD:
        return
    # a CPU model here has random weights, and rebuilt layers need those of the folder
    if device == "cpu":
        raise UserError(f"model.hf: {section.hf} describes TT layers; give a folder that has their weights")
    rebuild(model, cores["layers"])


def _folder(section: ModelSection, *, weights: bool = False) -> Path:
    """Return the model folder, the cache folder of a Hub name, or the path of a `config.json`."""
    name = str(section.hf)
    if not is_hub_name(name):
        return Path(name)
    try:
        return hub_folder(name, weights=weights)
    except UserError as error:
        raise UserError(f"model.hf: {error}") from None


def _config_path(section: ModelSection) -> Path:
    path = _folder(section)
    return path / CONFIG if path.is_dir() else path


def _read_config(section: ModelSection) -> dict[str, Any]:
    path = _config_path(section)
    if not os.path.lexists(path):
        raise UserError(
            f"model.hf: there is no {path}; give a local folder with config.json, such a file, or a name on the Hub"
        )
    try:
        content = read_model_config(path)
    except UserError as error:
        raise UserError(f"model.hf: {error}") from None
    # custom code in a model folder is never executed
    if content.get("auto_map"):
        logger.warning("%s names custom code (auto_map), which Scantling does not run", path)
        content.pop("auto_map")
    content.pop("transformers_version", None)
    return content


def _check_fit(config: Any, vocab_size: int, seq_len: int) -> None:
    with blame("this model"):
        check_layer_counts(config.to_dict())
    text = config.get_text_config()
    where = "model.overrides" if text is config else "model.overrides.text_config"
    known = getattr(text, "vocab_size", None)
    # far too many ids waste memory in embeddings and logits; published models round up, but not by a factor of 4
    if known is not None and vocab_size and known > max(MAX_TOKEN_ID, 4 * vocab_size):
        raise UserError(
            f"the model's vocabulary has {known} ids, and the tokenizer only {vocab_size}; "
            f"set {where}.vocab_size to {vocab_size} or a little more"
        )
    if known is not None and vocab_size > known:
        raise UserError(
            f"the tokenizer has {vocab_size} ids, the model's vocabulary only {known}; "
            f"set {where}.vocab_size or use a smaller tokenizer"
        )
    heads, key_value_heads = (getattr(text, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if heads and key_value_heads and heads % key_value_heads:
        raise UserError(f"num_attention_heads = {heads} must be a multiple of num_key_value_heads = {key_value_heads}")
    size, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if isinstance(size, int) and isinstance(patch, int) and patch > 0 and size % patch:
        raise UserError(
            f"data.image_size is {size}, which the model's patches of {patch} do not fill; "
            "give a multiple of it or set model.overrides.patch_size"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and positions > 0:  # XLNet sets -1: no limit
        is_learned = getattr(config, "position_embedding_type", "absolute") == "absolute"
        if config.model_type in _POSITIONS_AFTER_PADDING and config.pad_token_id is not None and is_learned:
            # the table has rows for 0 .. pad_token_id that no token uses
            positions -= config.pad_token_id + 1
        if seq_len > positions:
            raise UserError(
                f"data.seq_len is {seq_len}, the model has {positions} positions; "
                f"lower it or set {where}.max_position_embeddings"
            )


def _other_weights(folder: Path) -> str | None:
    """Return the name of a weight file in another format, such as a shard without its index."""
    endings = (".bin", ".pt", ".pth", ".msgpack", ".h5", ".ckpt", ".gguf", ".onnx", ".safetensors")
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return min(
        (name for name in names if name.endswith(endings) and not name.startswith("click_features")), default=None
    )


def _some(names: Iterable[str]) -> str:
    """Return the first few of many names."""
    ordered = sorted(names)
    return (", ".join(ordered[:4]) or "none") + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")


def _hint(text: str | None) -> str:
    return f"; {text}" if text else ""
