"""A tiny Llama and its input, in a separate module so that processes of a group import nothing else."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

INPUT = torch.randint(0, 64, (2, 19), generator=torch.Generator().manual_seed(0))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            tie_word_embeddings=True,
        )
    )
