"""TTMEmbedding and TTMEmbeddingBag: embedding tables as tensor-train matrices; TTMHead: output layers tied to them.

    E[(i_1..i_d), (e_1..e_d)] = F_1[:, i_1, e_1, :] F_2[:, i_2, e_2, :] ... F_d[:, i_d, e_d, :]

Core F_t has the shape (r_{t-1}, m_t, n_t, r_t), with row mode m_t and column mode n_t (CoMERA, arXiv 2405.14377,
section 3). The digits of an id are computed by division, without index tables; repeated ids are looked up once.
Neighboring cores are merged into tables if that is cheaper than multiplying row by row, which depends on the number of
unique ids: `contraction.py` decides.

Cost: `num_parameters()` parameters; `plan(n)` returns the cost of n unique ids. The output layer of a language model
that is tied to such a table computes h E^T + bias with `logits`, which never holds the full table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from operator import index
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.groups import MatrixDims, Role
from scantling.tensor.contraction import Head, Lookup, Plan, best_plan, core_indices
from scantling.tensor.cores import clip_ranks, dense, random_cores
from scantling.tensor.layer import TTLayer
from scantling.tensor.lazy_weight import LazyWeight
from scantling.tensor.modes import boxes, check_modes, check_size, split
from scantling.tensor.table_ops import check_ids, lookup_multiply, multiply_by_blocks, multiply_by_rows, unique_ids


class TTMEmbedding(TTLayer):
    """`nn.Embedding` with its table as TT cores.

    Args:
        num_embeddings, embedding_dim: as in `nn.Embedding`.
        rank: rank of every bond between cores, or one for each; clipped to the largest that the modes allow.
        num_modes: number of cores if modes are not given.
        row_modes, col_modes: modes of the rows and columns, equally many; their products may exceed the dimensions.
        padding_idx: id whose row is and stays zero.
        capacity: maximum number of unique ids per call, for compiled code and captured graphs, whose shapes cannot
            depend on data: unique ids are collected in this many rows. Default: the actual number of unique ids.
            Compiled code and captured graphs then look up every id separately, or all rows if there are fewer rows
            than ids.
        device, dtype: device and dtype of the parameters.

    Attributes:
        cores: `nn.ParameterList` of (r, row mode, column mode, r') tensors.

    Raises:
        UserError: if ranks, modes or padding_idx do not fit.

    Example:
        >>> table = sc.TTMEmbedding(30522, 768, rank=32, row_modes=(16, 20, 10, 10), col_modes=(4, 4, 8, 6))
        >>> table.ranks, table.num_parameters()
        ((1, 32, 32, 32, 1), 167808)
    """

    core_role: Role = "embedding"
    core_dims: MatrixDims = ((0, 1), (2, 3))

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int | Sequence[int],
        *,
        num_modes: int = 4,
        row_modes: Sequence[int] | None = None,
        col_modes: Sequence[int] | None = None,
        padding_idx: int | None = None,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_embeddings = self.num_embeddings = check_size(num_embeddings, "num_embeddings")
        embedding_dim = self.embedding_dim = check_size(embedding_dim, "embedding_dim")
        if row_modes is not None:
            num_modes = len(tuple(row_modes))
        elif col_modes is not None:
            num_modes = len(tuple(col_modes))
        self.row_modes = (
            split(num_embeddings, num_modes)
            if row_modes is None
            else check_modes(row_modes, num_embeddings, "row_modes")
        )
        self.col_modes = (
            split(embedding_dim, num_modes)[::-1]  # pairs large column modes with small row modes
            if col_modes is None
            else check_modes(col_modes, embedding_dim, "col_modes")
        )
        if len(self.row_modes) != len(self.col_modes):
            raise UserError(
                f"given row_modes={self.row_modes} and col_modes={self.col_modes}; they must have the same length, "
                "one row mode and one column mode for each core"
            )
        self.padding_idx = _check_padding_idx(padding_idx, num_embeddings)
        self.capacity = None if capacity is None else check_size(capacity, "capacity")
        self.set_empty_cores(clip_ranks(rank, [prod(shape) for shape in self.mode_shapes()]), device, dtype)
        if self.cores[0].device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self, norm: float | None = None, generator: torch.Generator | None = None) -> None:
        """Draw new random cores.

        Args:
            norm: exact Frobenius norm of the table; default that of `nn.Embedding`, whose entries have variance 1.
            generator: random generator.
        """
        norm = sqrt(self.num_embeddings * self.embedding_dim) if norm is None else norm
        # Boxes of the table that are not padding: for each core a slice of its row mode and one of its column mode.
        valid = [
            list(zip(rows, cols, strict=True))
            for rows in boxes(self.num_embeddings, self.row_modes)
            for cols in boxes(self.embedding_dim, self.col_modes)
        ]
        center = len(self.cores) // 2
        self.set_core_values(random_cores(self.mode_shapes(), self.ranks, norm, valid, center, generator=generator))

    @property
    def network(self) -> Lookup:
        return self.network_at(self.ranks)

    def network_at(self, ranks: tuple[int, ...]) -> Lookup:
        return Lookup(self.row_modes, self.col_modes, ranks)

    @property
    def weight(self) -> Tensor:
        """Table as in `nn.Embedding`, (num_embeddings, embedding_dim).

        Reading its dtype, device or shape costs nothing; any operation on it builds the table.
        """
        if torch.compiler.is_compiling():
            return self.dense_weight()  # the compiler drops it if only the dtype is read
        return LazyWeight(self.dense_weight, (self.num_embeddings, self.embedding_dim), self.cores[0])

    def dense_weight(self) -> Tensor:
        """Build the table from the cores: (num_embeddings, embedding_dim), with a zero row at `padding_idx`."""
        num_cores = len(self.cores)
        order = [*range(0, 2 * num_cores, 2), *range(1, 2 * num_cores, 2)]  # all row modes, then all column modes
        padded = dense(self.gated_cores()).permute(order).reshape(prod(self.row_modes), prod(self.col_modes))
        table = padded[: self.num_embeddings, : self.embedding_dim]
        if self.padding_idx is None:
            return table
        # A product instead of an assignment in place, so that the padding row gets no gradient.
        mask = torch.ones(self.num_embeddings, 1, dtype=table.dtype, device=table.device)
        mask[self.padding_idx] = 0
        return table * mask

    def plan(self, num_ids: int) -> Plan:
        """Return the contraction order for a number of unique ids; print it to see the costs.

        Args:
            num_ids: unique ids of a call.
        """
        return best_plan(self.network, num_ids)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the table: (n) ids to (n, embedding_dim), each id looked up separately."""
        strides = [prod(self.row_modes[i + 1 :]) for i in range(len(self.cores))]
        num_ids = ids.numel()
        state: Tensor | None = None
        steps = self._best_steps(num_ids)
        for step, block in zip(steps, self.blocks(steps), strict=True):
            # The block is a table (r, rows, columns, r'), which the digits of its cores index.
            last = core_indices(step.tree)[-1]
            # The merged row modes of a block act as one mode.
            digits = ids.div(strides[last], rounding_mode="floor").remainder(block.shape[1])
            table = block.transpose(0, 1).flatten(1)  # (rows, r columns r')
            if state is None:
                state = nn.functional.embedding(digits, table)
            else:
                # (ids, P, r) times the selected (r, columns r') of each id -> (ids, P, columns r')
                state = lookup_multiply(state, table, digits, step)
            state = state.view(num_ids, step.leading * block.shape[2], block.shape[3])  # (ids, columns, r')
        assert state is not None
        values = state.reshape(num_ids, prod(self.col_modes))[:, : self.embedding_dim]
        values = values.to(self.chain[0].dtype)  # the dtype of a dense table, also under autocast
        if self.padding_idx is None:
            return values
        return values.masked_fill((ids == self.padding_idx).unsqueeze(1), 0.0)

    def forward(self, input: Tensor) -> Tensor:
        """Return rows of the table: (...) integer ids to (..., embedding_dim).

        Raises:
            IndexError: if an id is below 0 or not below `num_embeddings`. Compiled code raises a RuntimeError instead,
                and a GPU a device-side assertion.
            RuntimeError: if there are more unique ids than the capacity.
            UserError: if `check_input` raises it.
        """
        ids = input  # `nn.Embedding`'s keyword is `input`
        self.check_input(ids)
        check_ids(ids, self.num_embeddings)
        unique, inverse = unique_ids(ids, self.num_embeddings, self.capacity)
        rows = self.rows(unique)
        if inverse is None:
            return rows.contiguous().view(*ids.shape, self.embedding_dim)
        return nn.functional.embedding(inverse, rows)

    def logits(self, hidden: Tensor, max_elements: int = 1 << 24) -> Tensor:
        """Return h E^T without building the table: (..., embedding_dim) to (..., num_embeddings).

        If multiplying by dense rows takes the fewest multiplications, the rows are built part by part, and rebuilt in
        the backward pass.

        Args:
            hidden: vectors to multiply by every row.
            max_elements: maximum number of elements of intermediate results; tokens are processed in parts to respect
                it.

        Returns:
            The logits, (..., num_embeddings).

        Raises:
            UserError: if `check_input` raises it.
        """
        self.check_input(hidden)
        x = hidden.reshape(-1, self.embedding_dim)
        x = x if self.formats is None else self.formats.input(x)
        # (tokens, product of the column modes)
        x = nn.functional.pad(x, (0, prod(self.col_modes) - self.embedding_dim))
        steps = self._best_steps(x.shape[0], is_head=True)
        tree = steps[0].tree
        if not isinstance(tree, int) and len(core_indices(tree)) == len(self.cores):  # all cores in one block
            # Leave out the last merge of the best order, so that the full table never exists.
            left, right = self.merged_blocks(tree)
            logits = multiply_by_rows(x, left.squeeze(0), right.squeeze(-1), max_elements)
        else:
            logits = multiply_by_blocks(x, self.blocks(steps), steps, max_elements)
        logits = logits[:, : self.num_embeddings].contiguous()  # without the padding of the row modes
        if self.padding_idx is not None:
            # `arange` writes on the device; a copy from the host is not allowed in graph capture.
            padding = torch.arange(self.padding_idx, self.padding_idx + 1, device=logits.device)
            logits = logits.index_fill(1, padding, 0.0)
        return logits.reshape(*hidden.shape[:-1], self.num_embeddings)

    @classmethod
    def from_dense(
        cls,
        embedding: nn.Embedding | nn.EmbeddingBag,
        rank: int | Sequence[int] | None = None,
        *,
        error: float = 0.0,
        allow_larger: bool = False,
        num_modes: int = 4,
        row_modes: Sequence[int] | None = None,
        col_modes: Sequence[int] | None = None,
        **options: Any,
    ) -> TTMEmbedding:
        """Return the closest TT table that TT-SVD finds.

        Args:
            embedding: layer whose weight is decomposed.
            rank: maximum ranks, as in the constructor; None for as many as the error needs.
            error: allowed relative Frobenius error of the table, from 0 to 1.
            allow_larger: True to allow cores with more parameters than the dense weight. Otherwise such a result
                raises if only `error` is given, and logs a warning if `rank` is given.
            num_modes, row_modes, col_modes: as in the constructor.
            options: further arguments of the constructor.

        Returns:
            The layer, in the dtype and on the device of `embedding`. If the row of `padding_idx` is not zero, as in a
            loaded table, it is returned by lookups like any other row.

        Raises:
            UserError: if the layer is of another kind, neither a rank nor an error is given, the error needs more
                parameters than the dense weight has, TT cores cannot represent the table, or the constructor raises
                it.
        """
        if not isinstance(embedding, nn.Embedding | nn.EmbeddingBag):
            raise UserError(
                f"{cls.__name__}.from_dense takes an nn.Embedding or nn.EmbeddingBag, given {type(embedding).__name__}"
            )
        reason = unsupported_reason(embedding)
        if reason is not None:
            raise UserError(f"from_dense: {reason}")
        if isinstance(embedding, nn.EmbeddingBag) != issubclass(cls, TTMEmbeddingBag):
            right = "TTMEmbeddingBag" if isinstance(embedding, nn.EmbeddingBag) else "TTMEmbedding"
            raise UserError(f"{cls.__name__} cannot replace an {type(embedding).__name__}; use {right}.from_dense")
        if isinstance(embedding, nn.EmbeddingBag):
            options = {"mode": embedding.mode, "include_last_offset": embedding.include_last_offset, **options}
        weight = embedding.weight.detach()
        made = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            1 if rank is None else rank,
            num_modes=num_modes,
            row_modes=row_modes,
            col_modes=col_modes,
            padding_idx=embedding.padding_idx,
            device="meta",
            dtype=weight.dtype,
            **options,
        )
        padding = (0, prod(made.col_modes) - made.embedding_dim, 0, prod(made.row_modes) - made.num_embeddings)
        # (row modes..., column modes...), zero in the padding
        tensor = nn.functional.pad(weight, padding).reshape(*made.row_modes, *made.col_modes)
        num_cores = len(made.row_modes)
        tensor = tensor.permute([dim for core in range(num_cores) for dim in (core, num_cores + core)])
        made._set_closest_cores(
            tensor,  # (row mode 1, column mode 1, row mode 2, column mode 2, ...)
            has_ranks=rank is not None,
            error=error,
            dense_numel=weight.numel(),
            allow_larger=allow_larger,
        )
        made.set_trainable(embedding.weight.requires_grad)
        # Lookups return zeros at `padding_idx`; without it they return the loaded row.
        if made.padding_idx is not None and bool(weight[made.padding_idx].any()):
            made.padding_idx = None
        return made.train(embedding.training)

    def to_dense(self) -> nn.Embedding:
        """Return an `nn.Embedding` with the same rows."""
        made = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        made.weight = nn.Parameter(self.dense_weight().detach().contiguous(), self.is_trainable)
        return made.train(self.training)

    def flops(self, tokens: int) -> int:
        """Return the floating-point operations of looking up this many ids, as many of them unique as possible."""
        return 2 * self.plan(min(tokens, self.num_embeddings)).macs

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, row_modes={self.row_modes}, col_modes={self.col_modes}, "
            f"ranks={self.ranks}, padding_idx={self.padding_idx}"
            + ("" if self.formats is None else f", {self.formats}")
        )

    def mode_shapes(self) -> list[tuple[int, ...]]:
        return list(zip(self.row_modes, self.col_modes, strict=True))


class TTMEmbeddingBag(TTMEmbedding):
    """`nn.EmbeddingBag` with its table as TT cores: sums or means of rows per bag.

    Like `nn.EmbeddingBag` it has no second derivatives, which would need every row of every bag separately.

    Args:
        num_embeddings, embedding_dim, rank: as in `TTMEmbedding`, whose keyword arguments are accepted, too.
        mode: "sum" or "mean".
        include_last_offset: True if `offsets` ends with the number of ids.

    Raises:
        UserError: if the mode is neither, or `TTMEmbedding` raises it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int | Sequence[int],
        *,
        mode: Literal["sum", "mean"] = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        if mode not in ("sum", "mean"):
            raise UserError(f"given mode={mode!r}; it must be 'sum' or 'mean'")
        super().__init__(num_embeddings, embedding_dim, rank, **options)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return sums or means of rows per bag, as `nn.EmbeddingBag` does.

        Args:
            input: ids, (bags, length), or (n) with offsets.
            offsets: (bags), start of each bag.
            per_sample_weights: weights of the shape of `input`, for sums.

        Returns:
            (bags, embedding_dim).
        """
        ids = input
        self.check_input(ids)
        check_ids(ids, self.num_embeddings)
        unique, inverse = unique_ids(ids, self.num_embeddings, self.capacity)
        rows = self.rows(unique)
        if inverse is None:
            # Every id was looked up separately: id i is in row i.
            inverse = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        padding = None
        if self.padding_idx is not None:  # means exclude padding: give it a separate row
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            padding = rows.shape[0] - 1
            inverse = inverse.masked_fill(ids == self.padding_idx, padding)
        return nn.functional.embedding_bag(
            inverse,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def to_dense(self) -> nn.EmbeddingBag:  # type: ignore[override]
        """Return an `nn.EmbeddingBag` with the same rows."""
        made = nn.EmbeddingBag(
            self.num_embeddings,
            self.embedding_dim,
            mode=self.mode,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
            device="meta",
        )
        made.weight = nn.Parameter(self.dense_weight().detach().contiguous(), self.is_trainable)
        return made.train(self.training)


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


def unsupported_reason(table: nn.Embedding | nn.EmbeddingBag) -> str | None:
    """Return the reason that a table cannot become a TT table; None if it can."""
    if table.max_norm or table.scale_grad_by_freq:
        return "max_norm and scale_grad_by_freq need the rows of a dense table"
    if isinstance(table, nn.EmbeddingBag) and table.mode == "max":
        return "TT bags support the modes sum and mean, not max"
    return None


def _check_padding_idx(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, SupportsIndex):
        raise UserError(f"given padding_idx={padding_idx!r}; it must be an integer")
    padding_idx = index(padding_idx)
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise UserError(f"given padding_idx={padding_idx}; it must be within the {num_embeddings} rows")
    return padding_idx % num_embeddings
