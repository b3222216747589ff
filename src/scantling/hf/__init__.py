"""Scantling in Hugging Face transformers: optimizers for its Trainer, TT models in `from_pretrained`.

Importing this module registers the TT layers, so that the Auto classes load TT models that `save_pretrained` wrote.
"""

from scantling.hf.exchange import ExchangeCallback, attach
from scantling.hf.optimizers import CAMEFactory, MuonFactory, SignFactory, came, muon, sign
from scantling.hf.ranks import RankCallback
from scantling.tensor.pretrained import load  # registers the TT layers

__all__ = [
    "CAMEFactory",
    "ExchangeCallback",
    "MuonFactory",
    "RankCallback",
    "SignFactory",
    "attach",
    "came",
    "load",
    "muon",
    "sign",
]
