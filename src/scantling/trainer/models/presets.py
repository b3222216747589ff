"""Named architectures, as configurations of transformers or DLRM; imports neither torch nor transformers.

The Llama shapes from 60 m on are those of the GaLore comparison (Zhao et al., arXiv 2403.03507), which most papers on
memory-efficient pre-training use. `llama-1m` and `llama-10m` have about 1 and 10 million parameters with the byte
vocabulary. Embeddings and output head are not tied. `t5-small` is the Small model of Raffel et al. (arXiv 1910.10683,
section 3.7): 60 million parameters with its vocabulary of 32,128. A Llama or T5 preset takes the vocabulary of the
tokenizer, rounded up to a multiple of 64; encoders keep the vocabulary of the model they are named after. `dlrm` has
the MLP widths of the public DLRM's run on Criteo Kaggle; its features and tables come from the data. `vit-base` is
ViT-B/16 of Dosovitskiy et al. (arXiv 2010.11929, table 1). `vit-digits` is a small ViT with 16 patches for images of
8 x 8 pixels; its initial weights are larger because it is narrow. For both, image size, channels and classes come
from the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named architecture.

    Attributes:
        task: the task it is trained on, unless the recipe names another.
        model_type: the architecture's name in transformers, or "dlrm".
        config: configuration keys that differ from transformers' defaults.
        fixed_vocab: True if the vocabulary size is the preset's own, False if it is the tokenizer's.
    """

    task: str
    model_type: str
    config: dict[str, Any]
    fixed_vocab: bool = False


# as many key-value heads as heads: the GaLore models have no grouped-query attention
def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> Preset:
    config = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    return Preset("causal-lm", "llama", config)


_BERT_6_ENCODER = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
# 514 = 512 + 2: positions start after the padding id 1
_ROBERTA_CODE = {
    "vocab_size": 50265,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
_T5_SMALL = {
    "d_model": 512,
    "d_ff": 2048,
    "d_kv": 64,
    "num_heads": 8,
    "num_layers": 6,
    "decoder_start_token_id": 0,
}
_VIT_DIGITS = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "patch_size": 2,
    "initializer_range": 0.1,
}
_VIT_BASE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
}
_DLRM = {
    "embedding_dim": 16,
    "bottom_mlp": [512, 256, 64],
    "top_mlp": [512, 256],
}

PRESETS: dict[str, Preset] = {
    "llama-1m": _llama(128, 352, 5, 4),
    "llama-10m": _llama(320, 864, 8, 5),
    "llama-60m": _llama(512, 1376, 8, 8),
    "llama-130m": _llama(768, 2048, 12, 12),
    "llama-350m": _llama(1024, 2736, 24, 16),
    # 5461 = floor(8/3 * 2048), as in the GaLore configuration, not a multiple of 8
    "llama-1b": _llama(2048, 5461, 24, 32),
    "bert-6-encoder": Preset("masked-lm", "bert", _BERT_6_ENCODER, fixed_vocab=True),
    "roberta-code": Preset("masked-lm", "roberta", _ROBERTA_CODE, fixed_vocab=True),
    "t5-small": Preset("seq2seq", "t5", _T5_SMALL),
    "dlrm": Preset("clicks", "dlrm", _DLRM, fixed_vocab=True),
    "vit-digits": Preset("image-classification", "vit", _VIT_DIGITS, fixed_vocab=True),
    "vit-base": Preset("image-classification", "vit", _VIT_BASE, fixed_vocab=True),
}
