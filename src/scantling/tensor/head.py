"""TTMHead: output layer of a language model that is tied to a TT embedding.

    logits = h E^T + bias

The dense table is never built (`TTMEmbedding.logits`). The head references the table without registering it: the cores
belong to the embedding and appear once in a state dict. Copying or moving the model keeps both tied, since the head
references the module instead of its tensors.
"""

from __future__ import annotations

from torch import Tensor, nn

from scantling.tensor.contraction import Head, best_plan
from scantling.tensor.embedding import TTMEmbedding


class TTMHead(nn.Module):
    """Linear layer tied to a `TTMEmbedding`; its only parameter is a bias.

    Args:
        table: the embedding, registered elsewhere in the model.
        bias: (num_embeddings,), used without copying, so that it stays tied; or None.

    Attributes:
        bias: as given.

    Example:
        >>> table = sc.TTMEmbedding(30522, 768, rank=32)
        >>> TTMHead(table)(torch.randn(2, 768)).shape
        torch.Size([2, 30522])
    """

    def __init__(self, table: TTMEmbedding, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self._tied = (table,)  # in a tuple: a module would be registered, and its cores saved twice
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    @property
    def table(self) -> TTMEmbedding:
        """The embedding that the head is tied to."""
        return self._tied[0]

    @property
    def in_features(self) -> int:
        return self.table.embedding_dim

    @property
    def out_features(self) -> int:
        return self.table.num_embeddings

    @property
    def weight(self) -> Tensor:
        """Table, (out_features, in_features); see `TTMEmbedding.weight`."""
        return self.table.weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits, (..., in_features) to (..., out_features)."""
        logits = self.table.logits(input)
        return logits if self.bias is None else logits + self.bias.to(logits.dtype)

    def flops(self, tokens: int) -> int:
        """Return the floating-point operations of a forward pass over this many tokens, merging of cores included."""
        return 2 * best_plan(Head(self.table.network), tokens).macs

    def to_dense(self, weight: nn.Parameter | None = None) -> nn.Linear:
        """Return an equivalent `nn.Linear`.

        Args:
            weight: weight of the dense embedding, to tie to it; default a copy of the table.
        """
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.table.dense_weight().detach()) if weight is None else weight
        linear.register_parameter("bias", self.bias)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
