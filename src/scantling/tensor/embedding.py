"""TTMEmbedding and TTMEmbeddingBag: embedding tables as tensor-train matrices.

    E[(i_1..i_d), (e_1..e_d)] = F_1[:, i_1, e_1, :] F_2[:, i_2, e_2, :] ... F_d[:, i_d, e_d, :]

Core F_t has the shape (r_{t-1}, m_t, n_t, r_t), with row mode m_t and column mode n_t (CoMERA, arXiv 2405.14377,
section 3). The digits of an id are computed by division, without index tables; repeated ids are looked up once.
Neighboring cores are merged into tables if that is cheaper than multiplying row by row, which depends on the number of
unique ids: `contraction.py` decides.

Cost: `num_parameters()` parameters; `plan(n)` returns the cost of n unique ids. The output layer of a language model
that is tied to such a table uses `logits`, which never holds the full table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from operator import index
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scantling.errors import UserError
from scantling.groups import MatrixDims, Role
from scantling.numerics.device import without_autocast
from scantling.numerics.torch_private import FakeTensor, assert_async, is_batched, is_in_functorch
from scantling.tensor.contraction import Lookup, Plan, Step, best_plan, core_indices
from scantling.tensor.cores import clip_ranks, dense, random_cores
from scantling.tensor.layer import TTLayer
from scantling.tensor.lazy_weight import LazyWeight
from scantling.tensor.modes import boxes, check_modes, check_size, split


class TTMEmbedding(TTLayer):
    """`nn.Embedding` with its table as TT cores.

    Args:
        num_embeddings, embedding_dim: as in `nn.Embedding`.
        rank: rank of every bond between cores, or one for each; clipped to what the modes allow.
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
                f"row_modes and col_modes must be as many as each other; given {self.row_modes} and {self.col_modes}"
            )
        self.padding_idx = _check_padding_idx(padding_idx, num_embeddings)
        self.capacity = None if capacity is None else check_size(capacity, "capacity")
        shapes = self._mode_shapes()
        ranks = clip_ranks(rank, [prod(shape) for shape in shapes])
        self.cores = nn.ParameterList(
            torch.empty(left, *shape, right, device=device, dtype=dtype)
            for left, shape, right in zip(ranks[:-1], shapes, ranks[1:], strict=True)
        )
        if self.cores[0].device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self, norm: float | None = None, generator: torch.Generator | None = None) -> None:
        """Draw new random cores.

        Args:
            norm: exact Frobenius norm of the table; default that of `nn.Embedding`, whose entries have variance 1.
            generator: random generator.
        """
        norm = sqrt(self.num_embeddings * self.embedding_dim) if norm is None else norm
        valid = [
            list(zip(rows, cols, strict=True))
            for rows in boxes(self.num_embeddings, self.row_modes)
            for cols in boxes(self.embedding_dim, self.col_modes)
        ]
        shapes = self._mode_shapes()
        drawn = random_cores(shapes, self.ranks, norm, valid, len(shapes) // 2, generator=generator)
        with torch.no_grad():
            for core, value in zip(self.cores, drawn, strict=True):
                core.copy_(value)

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
        num = len(self.cores)
        order = [*range(0, 2 * num, 2), *range(1, 2 * num, 2)]
        whole = dense(self.gated()).permute(order).reshape(prod(self.row_modes), prod(self.col_modes))
        table = whole[: self.num_embeddings, : self.embedding_dim]
        if self.padding_idx is None:
            return table
        kept = torch.ones(self.num_embeddings, 1, dtype=table.dtype, device=table.device)
        kept[self.padding_idx] = 0
        return table * kept

    def plan(self, num_ids: int) -> Plan:
        """Return the contraction order for a number of unique ids; print it to see the costs.

        Args:
            num_ids: unique ids of a call.
        """
        return best_plan(self.network, num_ids)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the table: (n) ids to (n, embedding_dim), each id looked up separately."""
        strides = [prod(self.row_modes[place + 1 :]) for place in range(len(self.cores))]
        num_ids = ids.numel()
        found: Tensor | None = None
        steps = self._best_steps(num_ids)
        for step, table in zip(steps, self.blocks(steps), strict=True):
            places = core_indices(step.tree)
            digits = ids.div(strides[places[-1]], rounding_mode="floor").remainder(table.shape[1])
            flat = table.transpose(0, 1).flatten(1)
            if found is None:
                found = nn.functional.embedding(digits, flat)
            else:
                found = _absorb(found, flat, digits, step)
            found = found.view(num_ids, step.before * table.shape[2], table.shape[3])
        assert found is not None
        values = found.reshape(num_ids, prod(self.col_modes))[:, : self.embedding_dim]
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
        _check_ids(ids, self.num_embeddings)
        distinct, inverse = self._unique_ids(ids)
        rows = self.rows(distinct)
        if inverse is None:
            return rows.contiguous().view(*ids.shape, self.embedding_dim)
        return nn.functional.embedding(inverse, rows)

    def _unique_ids(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the 1-D ids to look up, and each id's index among them; None if these are all ids in order."""
        if self.capacity is not None:
            return _unique_within(ids, self.capacity)
        if _is_count_unknown(ids):
            if ids.numel() > self.num_embeddings:
                return torch.arange(self.num_embeddings, dtype=ids.dtype, device=ids.device), ids
            return ids.reshape(-1), None
        distinct, inverse = torch.unique(ids, return_inverse=True)
        return distinct, inverse

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
        flat = hidden.reshape(-1, self.embedding_dim)
        flat = flat if self.formats is None else self.formats.input(flat)
        flat = nn.functional.pad(flat, (0, prod(self.col_modes) - self.embedding_dim))
        steps = self._best_steps(flat.shape[0], of_head=True)
        whole = steps[0].tree
        if not isinstance(whole, int) and len(core_indices(whole)) == len(self.cores):
            left, right = self.merged_blocks(whole)
            values = _products_by_rows(flat, left.squeeze(0), right.squeeze(-1), max_elements)
            return self._trim_logits(values, hidden)
        matrices = [
            block.transpose(1, 2).reshape(step.inner, step.width)
            for block, step in zip(self.blocks(steps), steps, strict=True)
        ]
        widest = max(step.before * step.width * step.behind for step in steps)
        parts = [
            _products(part, matrices, steps, prod(self.row_modes))
            for part in torch.split(flat, max(1, max_elements // widest))
        ]
        return self._trim_logits(torch.cat(parts) if len(parts) > 1 else parts[0], hidden)

    def _trim_logits(self, values: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits of the actual rows from those of all rows, (tokens, padded rows)."""
        values = values[:, : self.num_embeddings].contiguous()
        if self.padding_idx is not None:
            padding = torch.arange(self.padding_idx, self.padding_idx + 1, device=values.device)
            values = values.index_fill(1, padding, 0.0)
        return values.reshape(*hidden.shape[:-1], self.num_embeddings)

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
            raise UserError(f"{cls.__name__} cannot stand for an {type(embedding).__name__}; that is a {right}")
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
        whole = nn.functional.pad(weight, padding).reshape(*made.row_modes, *made.col_modes)
        num = len(made.row_modes)
        whole = whole.permute([place for pair in range(num) for place in (pair, num + pair)])
        made._set_closest_cores(
            whole,
            made._mode_shapes(),
            held=rank is not None,
            error=error,
            numel=weight.numel(),
            allow_larger=allow_larger,
        )
        made.cores.requires_grad_(embedding.weight.requires_grad)
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

    def _mode_shapes(self) -> list[tuple[int, ...]]:
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
            raise UserError(f"mode must be sum or mean; given {mode!r}")
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
        _check_ids(ids, self.num_embeddings)
        distinct, inverse = self._unique_ids(ids)
        rows = self.rows(distinct)
        if inverse is None:
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


def _absorb(found: Tensor, flat: Tensor, digits: Tensor, step: Step) -> Tensor:
    """Multiply the state of each id, (ids, P, K), by its row of a merged block, (rows, K Q): (ids, P, Q)."""
    device = found.device.type
    if torch.is_autocast_enabled(device):  # custom autograd functions ignore it in the backward pass
        found, flat = (value.to(torch.get_autocast_dtype(device)) for value in (found, flat))
    result: Tensor = _AbsorbFunction.apply(found, flat, digits, step.inner, step.width)  # type: ignore[no-untyped-call]
    return result


class _AbsorbFunction(torch.autograd.Function):
    """Product of each id's state with its looked-up row of a block.

    The rows are r times larger than the state, so the backward pass looks them up again instead of saving them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(found: Tensor, flat: Tensor, digits: Tensor, inner: int, width: int) -> Tensor:
        return found @ nn.functional.embedding(digits, flat).view(digits.numel(), inner, width)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        found, flat, digits, *ctx.sides = inputs
        ctx.save_for_backward(found, flat, digits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found, flat, digits = ctx.saved_tensors
        of_rows = (found.transpose(1, 2) @ grad).flatten(1)
        if _is_vmapped(of_rows):
            of_flat = of_rows.new_zeros(flat.shape).index_add(0, digits, of_rows)
        else:
            of_flat = torch.ops.aten.embedding_dense_backward(of_rows, digits, flat.shape[0], -1, False)
        del of_rows  # free it, since it is as large as the rows
        block = nn.functional.embedding(digits, flat).view(digits.numel(), *ctx.sides)
        return grad @ block.transpose(1, 2), of_flat, None, None, None


def unsupported_reason(table: nn.Embedding | nn.EmbeddingBag) -> str | None:
    """Return why a table cannot become TT cores; None if it can."""
    if table.max_norm or table.scale_grad_by_freq:
        return "max_norm and scale_grad_by_freq need the rows of a dense table"
    if isinstance(table, nn.EmbeddingBag) and table.mode == "max":
        return "TT bags take sums and means, no maxima"
    return None


def _products(flat: Tensor, matrices: Sequence[Tensor], steps: Sequence[Step], num_rows: int) -> Tensor:
    """Contract like `contract`, but put each step's new dims before the remaining ones: (tokens, rows)."""
    state = flat
    for step, matrix in zip(steps, matrices, strict=True):
        state = matrix.t() @ state.reshape(flat.shape[0] * step.before, step.inner, step.behind)
    return state.reshape(flat.shape[0], num_rows)


def _products_by_rows(flat: Tensor, left: Tensor, right: Tensor, max_elements: int) -> Tensor:
    """Multiply x by all rows of a table in two blocks, some rows at a time: (tokens, rows).

    Args:
        flat: (tokens, columns).
        left: (row modes, column modes, r).
        right: (r, row modes, column modes).
        max_elements: maximum number of elements of a part, which is at most a quarter of the table.
    """
    numbers = flat.shape[1] * right.shape[1]
    rows = max(1, min(max_elements // numbers, -(-left.shape[0] // 4)))

    def product(flat: Tensor, part: Tensor, right: Tensor) -> Tensor:
        with without_autocast(flat.device):
            wide = part.flatten(0, 1) @ right.flatten(1)
        wide = wide.view(part.shape[0], part.shape[1], right.shape[1], right.shape[2])
        return flat @ wide.permute(1, 3, 0, 2).reshape(flat.shape[1], -1).to(flat.dtype)

    parts = torch.split(left, rows)
    if torch.is_grad_enabled() and not _is_transformed():
        made = [checkpoint(product, flat, part, right, use_reentrant=False, preserve_rng_state=False) for part in parts]
    else:
        made = [product(flat, part, right) for part in parts]
    return torch.cat(made, dim=1)


def _unique_within(ids: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the unique ids in a vector of length `capacity`, padded with 0, and the index of each id in it."""
    ordered, order = ids.reshape(-1).sort()
    is_new = torch.cat([ordered.new_zeros(min(1, len(ordered))), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
    place = is_new.cumsum(0)
    assert_async((place < capacity).all(), f"more than {capacity} distinct ids, the capacity of this table")
    place = place.clamp(max=capacity - 1)
    distinct = ordered.new_zeros(capacity).scatter(0, place, ordered)
    return distinct, torch.empty_like(place).scatter(0, order, place).view(ids.shape)


def _is_count_unknown(ids: Tensor) -> bool:
    """True if the number of unique ids is data-dependent and unavailable (compile, graph capture, meta, vmap)."""
    if torch.compiler.is_compiling() or ids.is_meta or isinstance(ids, FakeTensor) or _is_vmapped(ids):
        return True
    return ids.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_vmapped(values: Tensor) -> bool:
    """True if the values belong to one example inside `torch.func.vmap`, so that their values cannot be read."""
    return not torch.compiler.is_compiling() and is_batched(values)


def _is_transformed() -> bool:
    """True inside a `torch.func` transform, which does not support checkpointing."""
    return not torch.compiler.is_compiling() and is_in_functorch()


def _check_ids(ids: Tensor, num_embeddings: int) -> None:
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(f"ids must be integers; given {ids.dtype}")
    if isinstance(ids, FakeTensor) or ids.is_meta or _is_vmapped(ids):
        return
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        # The assertion needs a message; compiled code drops it otherwise.
        assert_async(((ids >= 0) & (ids < num_embeddings)).all(), f"id out of range: rows 0 to {num_embeddings - 1}")
        return
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < num_embeddings):
        worst = ids.min() if int(ids.min()) < 0 else ids.max()
        raise IndexError(f"id {int(worst)} is out of range: this table has the rows 0 to {num_embeddings - 1}")


def _check_padding_idx(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, SupportsIndex):
        raise UserError(f"padding_idx must be an integer; given {padding_idx!r}")
    padding_idx = index(padding_idx)
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise UserError(f"padding_idx must be within the {num_embeddings} rows; given {padding_idx}")
    return padding_idx % num_embeddings
