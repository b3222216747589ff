"""DLRM: predict the logit of a click from numeric and categorical features.

A bottom MLP maps the numeric features to a vector x as wide as the embedding tables. Each categorical column has a
table. With z_0 = x and the looked-up rows z_1, ..., z_t, the top MLP reads x and all products z_i . z_j, i > j.

Source: Naumov et al., "Deep learning recommendation model for personalization and recommendation systems", arXiv
1906.00091, sections 2 and 3. As in the public implementation, both MLPs have ReLU after each hidden layer, and the
bottom MLP also after its last layer. Initialization: a table of n rows is uniform in +-1/sqrt(n); a weight of m
outputs and n inputs is normal with variance 2/(m + n), its bias normal with variance 1/m.

`DLRM` is a `PreTrainedModel`, so saving, loading, export and reports work as for every other model. Its tables are
plain `nn.EmbeddingBag`s and its layers plain `nn.Linear`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput

from scantling.errors import UserError


class DLRMConfig(PretrainedConfig):  # type: ignore[misc]
    """Shape of a DLRM.

    Args:
        num_numeric: number of numeric features; 0 means no bottom MLP.
        table_sizes: rows of each embedding table.
        embedding_dim: width of the tables and of the bottom MLP's output.
        bottom_mlp: widths of the bottom MLP's hidden layers.
        top_mlp: widths of the top MLP's hidden layers.

    Raises:
        ValueError: a size below 1, or fewer than two vectors, which leaves no interactions.
    """

    model_type = "dlrm"

    def __init__(
        self,
        num_numeric: int = 13,
        table_sizes: Sequence[int] = (1000,) * 26,
        embedding_dim: int = 16,
        bottom_mlp: Sequence[int] = (512, 256, 64),
        top_mlp: Sequence[int] = (512, 256),
        **kwargs: Any,
    ) -> None:
        # as lists, the way config.json stores them, so that a loaded configuration equals the saved one
        self.num_numeric = num_numeric
        self.table_sizes = list(table_sizes)
        self.embedding_dim = embedding_dim
        self.bottom_mlp = list(bottom_mlp)
        self.top_mlp = list(top_mlp)
        sizes = {"embedding_dim": [embedding_dim], "table_sizes": self.table_sizes}
        for name, values in {**sizes, "bottom_mlp": self.bottom_mlp, "top_mlp": self.top_mlp}.items():
            if any(not isinstance(value, int) or value < 1 for value in values):
                raise ValueError(f"{name} must hold whole numbers from 1 on; given {values}")
        if num_numeric < 0 or len(self.table_sizes) + (num_numeric > 0) < 2:
            raise ValueError("a DLRM needs numeric features and a table, or two tables")
        super().__init__(**kwargs)


class DLRM(PreTrainedModel):  # type: ignore[misc]
    """Deep learning recommendation model.

    Args:
        config: its shape.

    Attributes:
        bottom: the bottom MLP, or None without numeric features.
        tables: one `nn.EmbeddingBag` per categorical column.
        top: the top MLP.

    Example:
        >>> model = DLRM(DLRMConfig(num_numeric=13, table_sizes=[1460, 583, 305], embedding_dim=16))
        >>> model(torch.randn(2, 13), torch.tensor([[0, 1, 2], [1459, 582, 304]])).logits.shape
        torch.Size([2])
    """

    config_class = DLRMConfig
    base_model_prefix = "dlrm"
    main_input_name = "categorical"
    _supports_sdpa = True  # the model has no attention, so any implementation is fine

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__(config)
        dim, numeric = config.embedding_dim, config.num_numeric
        # z_0, if there are numeric features, and one vector per table
        vectors = len(config.table_sizes) + (numeric > 0)
        self.bottom = _mlp([numeric, *config.bottom_mlp, dim], last_relu=True) if numeric else None
        # `_weight` skips the normal initialization of nn.EmbeddingBag; post_init fills the tables
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="sum", _weight=torch.empty(rows, dim)) for rows in config.table_sizes
        )
        # the top MLP reads x and count * (count - 1) / 2 products
        self.top = _mlp([(dim if numeric else 0) + vectors * (vectors - 1) // 2, *config.top_mlp, 1], last_relu=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            # the functions of transformers, unlike torch's, skip weights that were loaded
            init.normal_(module.weight, std=sqrt(2 / (module.in_features + module.out_features)))
            init.normal_(module.bias, std=sqrt(1 / module.out_features))
        elif isinstance(module, nn.EmbeddingBag):
            bound = 1 / sqrt(module.num_embeddings)
            init.uniform_(module.weight, -bound, bound)

    def forward(
        self, numeric: Tensor | None = None, categorical: Tensor | None = None, labels: Tensor | None = None, **_: Any
    ) -> SequenceClassifierOutput:
        """Return the logits of a click.

        Args:
            numeric: (batch, num_numeric), or None without numeric features.
            categorical: ids, (batch, number of tables).
            labels: (batch), 0 or 1, or None.

        Returns:
            `logits` of shape (batch,), and with labels `loss`, the binary cross-entropy.

        Raises:
            UserError: features are missing, or their number differs from the model's.
        """
        given = tuple(0 if part is None else part.shape[-1] for part in (numeric, categorical))
        wanted = (self.config.num_numeric, len(self.tables))
        if categorical is None or given != wanted:
            raise UserError(
                f"DLRM: {wanted[0]} numeric and {wanted[1]} categorical features are wanted, given {given[0]} and "
                f"{given[1]}"
            )
        # ids (batch,) -> bags of one id (batch, 1) -> rows (batch, dim)
        vectors = [table(ids[:, None]) for table, ids in zip(self.tables, categorical.unbind(1), strict=True)]
        dense = None if self.bottom is None else self.bottom(numeric)
        if dense is not None:
            vectors = [dense, *(vector.to(dense.dtype) for vector in vectors)]  # autocast leaves lookups in fp32
        # (batch, count, dim) -> (batch, count * (count - 1) / 2)
        products = interactions(torch.stack(vectors, dim=1))
        features = products if dense is None else torch.cat([dense, products], dim=1)
        # (batch, dim + products) -> (batch, 1) -> (batch,)
        logits = self.top(features).squeeze(1)
        # in fp32: bf16 has too few digits for differences between losses
        loss = None if labels is None else binary_cross_entropy_with_logits(logits.float(), labels.float())
        return SequenceClassifierOutput(loss=loss, logits=logits)


def interactions(vectors: Tensor) -> Tensor:
    """Return the products of all pairs of vectors: z_1.z_0, z_2.z_0, z_2.z_1, z_3.z_0 and so on.

    Args:
        vectors: (batch, count, dim).

    Returns:
        (batch, count * (count - 1) / 2).
    """
    count = vectors.shape[1]
    row, col = torch.tril_indices(count, count, offset=-1, device=vectors.device)
    # Gram matrix: entry (i, j) is z_i . z_j
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    # (batch, count, count) -> strict lower triangle, row by row
    return products.flatten(1).index_select(1, row * count + col)


def _mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    """Return linear layers with ReLU between them, and after the last one if `last_relu`."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


def register() -> None:
    """Register DLRM with transformers' `AutoConfig` and `AutoModel`, so that they load DLRM folders."""
    # exist_ok, because each loader registers it again
    AutoConfig.register(DLRMConfig.model_type, DLRMConfig, exist_ok=True)
    AutoModel.register(DLRMConfig, DLRM, exist_ok=True)
