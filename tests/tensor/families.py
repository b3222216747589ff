"""Tiny transformers models, one of every family that treats its weights differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

VOCAB, LENGTH = 96, 12
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
_IMAGES = {
    **{name: size for name, size in _SHAPE.items() if name not in ("vocab_size", "max_position_embeddings")},
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 3,
    "num_labels": 5,
}
_GQA = {**_SHAPE, "num_key_value_heads": 2}


def _gpt2() -> Any:
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "vocab_size": VOCAB}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**shape, bos_token_id=None, eos_token_id=None))


def _t5() -> Any:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": VOCAB}
    return hf.T5ForConditionalGeneration(hf.T5Config(**shape, decoder_start_token_id=0))


def _qwen_moe() -> Any:
    widths = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**_GQA, **widths, num_experts_per_tok=2))


def _gpt_oss() -> Any:
    extra = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default"},
    }
    return hf.GptOssForCausalLM(hf.GptOssConfig(**_GQA, **extra))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GQA)),
    "llama-tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GQA, tie_word_embeddings=True, pad_token_id=0)),
    "gpt2": _gpt2,
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_SHAPE)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GQA, tie_word_embeddings=True)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GQA, head_dim=8)),
    "qwen2-moe": _qwen_moe,
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GQA)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_GQA, num_local_experts=4, num_experts_per_tok=2)),
    "gpt-oss": _gpt_oss,
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_SHAPE)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**_SHAPE)),
    "t5": _t5,
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**_IMAGES)),
}


def make_model(family: str, seed: int = 0) -> Any:
    """Return a model of a family, in evaluation mode."""
    torch.manual_seed(seed)
    return FAMILIES[family]().eval()


def batch(rows: int = 4, seed: int = 1, *, model: Any = None) -> dict[str, torch.Tensor]:
    """Return ids that are also the labels, without special ids; for an image model, images with labels."""
    source = torch.Generator().manual_seed(seed)
    if model is not None and model.main_input_name == "pixel_values":
        shape = (rows, model.config.num_channels, model.config.image_size, model.config.image_size)
        labels = torch.arange(rows) % model.config.num_labels
        return {"pixel_values": torch.randn(shape, generator=source), "labels": labels}
    ids = torch.randint(4, VOCAB, (rows, LENGTH), generator=source)
    return {"input_ids": ids, "labels": ids}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return logits of the batch: (rows, length, vocabulary), or (rows, labels)."""
    found: torch.Tensor = model(**batch(model=model)).logits
    return found
