"""Tokenizers as Hugging Face saves them: byte-level BPE with the templates of well-known model families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATES: dict[str, tuple[str, str, dict[str, str]]] = {
    "gpt2": ("$A", "$A $B", {"eos_token": "</s>"}),
    "llama": ("<s> $A", "<s> $A <s> $B:1", {"bos_token": "<s>", "eos_token": "</s>"}),
    "llama-eos": ("<s> $A </s>", "<s> $A </s> <s> $B:1 </s>:1", {"bos_token": "<s>", "eos_token": "</s>"}),
    "t5": ("$A </s>", "$A </s> $B </s>", {"eos_token": "</s>", "pad_token": "<pad>"}),
    "bart": (
        "<s> $A </s>",
        "<s> $A </s> </s> $B </s>",
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
            "cls_token": "<s>",
            "sep_token": "</s>",
        },
    ),
    "bert": (
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:1 [SEP]:1",
        {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "<pad>", "mask_token": "<mask>"},
    ),
}
"""By family: the template of one text, the template of a pair, and the special tokens that the tokenizer names."""
SPECIALS = ("<unused>", "<s>", "</s>", "<pad>", "<mask>", "[CLS]", "[SEP]")
"""Special tokens that all tokenizers have, after the 256 bytes."""
IDS = {token: 256 + number for number, token in enumerate(SPECIALS)}


def made_tokenizer(folder: Path, family: str, **names: Any) -> Path:
    """Write a folder with a tokenizer of one id per byte, 0 to 255; `names` are further named special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from scantling.trainer.data.tokenizers import byte_characters

    single, pair, tokens = TEMPLATES[family]
    backend = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(byte_characters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if family != "gpt2":
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=list(IDS.items())
        )
    PreTrainedTokenizerFast(tokenizer_object=backend, **{**tokens, **names}).save_pretrained(str(folder))
    return folder
