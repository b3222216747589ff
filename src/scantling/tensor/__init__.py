"""TT layers: weights as chains of small tensors (tensor trains)."""

from scantling.tensor.peft_support import support_peft

support_peft()
