"""TTMEmbedding and TTMEmbeddingBag: tables of rows as tensor-train matrices.

    E[(i_1..i_d), (e_1..e_d)] = F_1[:, i_1, e_1, :] F_2[:, i_2, e_2, :] ... F_d[:, i_d, e_d, :]

A core F_t has the shape (r_{t-1}, m_t, n_t, r_t), m_t the modes of the rows, n_t those of the columns (CoMERA, arXiv
2405.14377, section 3). The digits of an id come from divisions, no index tables are kept; an id that occurs more than
once is looked up once. Neighbouring cores are merged into tables as far as that is cheaper than multiplying row by row,
which depends on the number of distinct ids: `contraction.py` decides.

Cost: `num_parameters()` numbers; `plan(n)` says what n distinct ids take. The output layer of a language model that is
tied to such a table takes `logits`, which never holds the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from operator import index
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from scantling.errors import UserError
from scantling.groups import MatrixDims, Role
from scantling.numerics.compute import without_autocast
from scantling.tensor.contraction import Lookup, Plan, Step, best_plan, cores_of
from scantling.tensor.cores import clip_ranks, dense, random_cores
from scantling.tensor.layer import CoreLayer
from scantling.tensor.lazy import LazyWeight
from scantling.tensor.modes import boxes, check_modes, check_size, split


class TTMEmbedding(CoreLayer):
    """`nn.Embedding` with its table as cores.

    Args:
        num_embeddings, embedding_dim: as of `nn.Embedding`.
        rank: of every bond between cores, or one for each; clipped to what the modes can carry.
        num_modes: how many cores, where modes are not given.
        row_modes, col_modes: of the rows and columns, as many of either; their products may be larger than the
            dimensions.
        padding_idx: the row of this id is zero and stays so.
        capacity: most distinct ids of one call, for compiled code and captured graphs, whose shapes do not depend on
            data: ids are told apart within this many rows. Default: as many as there are, where that may be known; in
            compiled code and captured graphs every id by itself, or all rows where they are fewer.
        device, dtype: of the parameters.

    Attributes:
        cores: `nn.ParameterList` of (r, row mode, column mode, r') tensors.

    Raises:
        UserError: ranks, modes or a padding_idx that do not fit.

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
            split(embedding_dim, num_modes)[::-1]  # the large ones beside the small ones of the rows
            if col_modes is None
            else check_modes(col_modes, embedding_dim, "col_modes")
        )
        if len(self.row_modes) != len(self.col_modes):
            raise UserError(
                f"row_modes and col_modes must be as many as each other; given {self.row_modes} and {self.col_modes}"
            )
        self.padding_idx = _checked_padding(padding_idx, num_embeddings)
        self.capacity = None if capacity is None else check_size(capacity, "capacity")
        shapes = self._shapes()
        ranks = clip_ranks(rank, [prod(shape) for shape in shapes])
        self.cores = nn.ParameterList(
            torch.empty(left, *shape, right, device=device, dtype=dtype)
            for left, shape, right in zip(ranks[:-1], shapes, ranks[1:], strict=True)
        )
        if self.cores[0].device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self, norm: float | None = None, generator: torch.Generator | None = None) -> None:
        """Draw the cores anew.

        Args:
            norm: Frobenius norm of the table, exact; default that of `nn.Embedding`, whose entries have variance 1.
            generator: of the draw.
        """
        norm = sqrt(self.num_embeddings * self.embedding_dim) if norm is None else norm
        valid = [
            list(zip(rows, cols, strict=True))
            for rows in boxes(self.num_embeddings, self.row_modes)
            for cols in boxes(self.embedding_dim, self.col_modes)
        ]
        shapes = self._shapes()
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
        """The table, (num_embeddings, embedding_dim), as of `nn.Embedding`.

        To ask for its dtype, device or shape costs nothing; any operation on it builds the table.
        """
        if torch.compiler.is_compiling():
            return self.dense_weight()  # dropped by the compiler where only the dtype is read
        return LazyWeight(self.dense_weight, (self.num_embeddings, self.embedding_dim), self.cores[0])

    def dense_weight(self) -> Tensor:
        """The table, built from the cores: (num_embeddings, embedding_dim), the row of `padding_idx` zero."""
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
        """How so many distinct ids are looked up; print it.

        Args:
            num_ids: distinct ids of a call.
        """
        return best_plan(self.network, num_ids)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the table: (n) ids to (n, embedding_dim), each id looked up by itself."""
        strides = [prod(self.row_modes[place + 1 :]) for place in range(len(self.cores))]
        num_ids = ids.numel()
        found: Tensor | None = None
        steps = self._order(num_ids)
        for step, table in zip(steps, self.blocks(steps), strict=True):
            places = cores_of(step.tree)
            digits = ids.div(strides[places[-1]], rounding_mode="floor").remainder(table.shape[1])
            flat = table.transpose(0, 1).flatten(1)
            if found is None:
                found = nn.functional.embedding(digits, flat)
            else:
                found = _absorbed(found, flat, digits, step)
            found = found.view(num_ids, step.before * table.shape[2], table.shape[3])
        assert found is not None
        values = found.reshape(num_ids, prod(self.col_modes))[:, : self.embedding_dim]
        values = values.to(self.chain[0].dtype)  # as those of a dense table, also under autocast
        if self.padding_idx is None:
            return values
        return values.masked_fill((ids == self.padding_idx).unsqueeze(1), 0.0)

    def forward(self, input: Tensor) -> Tensor:
        """Rows of the table: (...) integer ids to (..., embedding_dim).

        Raises:
            IndexError: an id below 0 or not below `num_embeddings`; a RuntimeError in compiled code, and on a GPU a
                device-side assertion.
            RuntimeError: more distinct ids than the capacity.
            UserError: what `check_input` refuses.
        """
        ids = input  # which is its name where `nn.Embedding` is called by keyword
        self.check_input(ids)
        _check_ids(ids, self.num_embeddings)
        distinct, inverse = self._distinct(ids)
        rows = self.rows(distinct)
        if inverse is None:
            return rows.contiguous().view(*ids.shape, self.embedding_dim)
        return nn.functional.embedding(inverse, rows)

    def _distinct(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Ids to look up, 1-D, and for each id given its place among them; None where they are all of them in order."""
        if self.capacity is not None:
            return _within(ids, self.capacity)
        if _is_unknown(ids):
            if ids.numel() > self.num_embeddings:
                return torch.arange(self.num_embeddings, dtype=ids.dtype, device=ids.device), ids
            return ids.reshape(-1), None
        distinct, inverse = torch.unique(ids, return_inverse=True)
        return distinct, inverse

    def logits(self, hidden: Tensor, most_numbers: int = 1 << 24) -> Tensor:
        """h E^T without the table: (..., embedding_dim) to (..., num_embeddings).

        Where it takes the fewest multiplications to multiply rows as they are, they are built a part of the table at a
        time, and built again in the backward pass.

        Args:
            hidden: what is multiplied with every row.
            most_numbers: of what is held at once beside the result; tokens are taken in parts to keep to it.

        Returns:
            The logits, (..., num_embeddings).

        Raises:
            UserError: what `check_input` refuses.
        """
        self.check_input(hidden)
        flat = hidden.reshape(-1, self.embedding_dim)
        flat = flat if self.formats is None else self.formats.input(flat)
        flat = nn.functional.pad(flat, (0, prod(self.col_modes) - self.embedding_dim))
        steps = self._order(flat.shape[0], of_head=True)
        whole = steps[0].tree
        if not isinstance(whole, int) and len(cores_of(whole)) == len(self.cores):
            left, right = self.merged_blocks(whole)
            values = _products_by_rows(flat, left.squeeze(0), right.squeeze(-1), most_numbers)
            return self._finished(values, hidden)
        matrices = [
            block.transpose(1, 2).reshape(step.inner, step.width)
            for block, step in zip(self.blocks(steps), steps, strict=True)
        ]
        widest = max(step.before * step.width * step.behind for step in steps)
        parts = [
            _products(part, matrices, steps, prod(self.row_modes))
            for part in torch.split(flat, max(1, most_numbers // widest))
        ]
        return self._finished(torch.cat(parts) if len(parts) > 1 else parts[0], hidden)

    def _finished(self, values: Tensor, hidden: Tensor) -> Tensor:
        """Logits of all rows, (tokens, padded rows), as those of the rows there are."""
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
        """The closest table of cores that TT-SVD finds.

        Args:
            embedding: its weight is split.
            rank: most ranks, as of the constructor; None for as much as the error needs.
            error: relative Frobenius error of the table that may be made, from 0 to 1.
            allow_larger: allow cores that hold more numbers than the dense weight. Unless given, such a result of
                `error` alone is refused, and one of a `rank` is a warning.
            num_modes, row_modes, col_modes: as of the constructor.
            options: further arguments of the constructor.

        Returns:
            The layer, in the dtype and on the device of `embedding`. A row of `padding_idx` that is not zero, as of a
            table that was loaded, is given out as it is.

        Raises:
            UserError: another kind of layer, neither a rank nor an error, an error that needs more numbers than the
                dense weight has, a table that cores cannot stand for, or what the constructor refuses.
        """
        if not isinstance(embedding, nn.Embedding | nn.EmbeddingBag):
            raise UserError(
                f"{cls.__name__}.from_dense takes an nn.Embedding or nn.EmbeddingBag, given {type(embedding).__name__}"
            )
        reason = why_no_cores(embedding)
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
        made._become_closest(
            whole,
            made._shapes(),
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
        """An `nn.Embedding` with the same rows."""
        made = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        made.weight = nn.Parameter(self.dense_weight().detach().contiguous(), self.is_trainable)
        return made.train(self.training)

    def flops(self, tokens: int) -> int:
        """Floating-point operations of a lookup of so many ids, all of them different as far as there are so many."""
        return 2 * self.plan(min(tokens, self.num_embeddings)).macs

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, row_modes={self.row_modes}, col_modes={self.col_modes}, "
            f"ranks={self.ranks}, padding_idx={self.padding_idx}"
            + ("" if self.formats is None else f", {self.formats}")
        )

    def _shapes(self) -> list[tuple[int, ...]]:
        return list(zip(self.row_modes, self.col_modes, strict=True))


class TTMEmbeddingBag(TTMEmbedding):
    """`nn.EmbeddingBag` with its table as cores: sums or means of rows, bag by bag.

    Like `nn.EmbeddingBag` it has no second derivatives: they would take every row of every bag by itself.

    Args:
        num_embeddings, embedding_dim, rank: as of `TTMEmbedding`, and what it takes by keyword.
        mode: "sum" or "mean".
        include_last_offset: whether `offsets` ends with the number of ids.

    Raises:
        UserError: another mode, or what `TTMEmbedding` refuses.
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
        """Bags of rows, as of `nn.EmbeddingBag`.

        Args:
            input: ids, (bags, length), or (n) with offsets.
            offsets: (bags), where each bag begins.
            per_sample_weights: of the shape of `input`, for sums.

        Returns:
            (bags, embedding_dim).
        """
        ids = input
        self.check_input(ids)
        _check_ids(ids, self.num_embeddings)
        distinct, inverse = self._distinct(ids)
        rows = self.rows(distinct)
        if inverse is None:
            inverse = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        padding = None
        if self.padding_idx is not None:  # a bag's mean is not over padding: give it a row of its own
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
        """An `nn.EmbeddingBag` with the same rows."""
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


def _absorbed(found: Tensor, flat: Tensor, digits: Tensor, step: Step) -> Tensor:
    """What was found of each id, (ids, P, K), with its row of a merged block, (rows, K Q): (ids, P, Q)."""
    device = found.device.type
    if torch.is_autocast_enabled(device):  # which a function of its own does not know of in its backward pass
        found, flat = (value.to(torch.get_autocast_dtype(device)) for value in (found, flat))
    result: Tensor = _Absorb.apply(found, flat, digits, step.inner, step.width)  # type: ignore[no-untyped-call]
    return result


class _Absorb(torch.autograd.Function):
    """Rows of a block are wider than what is found by r: they are looked up again in the backward pass, not kept."""

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
        if _is_batched(of_rows):
            of_flat = of_rows.new_zeros(flat.shape).index_add(0, digits, of_rows)
        else:
            of_flat = torch.ops.aten.embedding_dense_backward(of_rows, digits, flat.shape[0], -1, False)
        del of_rows  # as large as the rows
        block = nn.functional.embedding(digits, flat).view(digits.numel(), *ctx.sides)
        return grad @ block.transpose(1, 2), of_flat, None, None, None


def why_no_cores(table: nn.Embedding | nn.EmbeddingBag) -> str | None:
    """What keeps a table from becoming cores; None for nothing."""
    if table.max_norm or table.scale_grad_by_freq:
        return "max_norm and scale_grad_by_freq need the rows of a dense table"
    if isinstance(table, nn.EmbeddingBag) and table.mode == "max":
        return "bags of cores take sums and means, no maxima"
    return None


def _products(flat: Tensor, matrices: Sequence[Tensor], steps: Sequence[Step], num_rows: int) -> Tensor:
    """Like `contract`, but that what a step adds to the result lies before what is left: (tokens, rows)."""
    state = flat
    for step, matrix in zip(steps, matrices, strict=True):
        state = matrix.t() @ state.reshape(flat.shape[0] * step.before, step.inner, step.behind)
    return state.reshape(flat.shape[0], num_rows)


def _products_by_rows(flat: Tensor, left: Tensor, right: Tensor, most_numbers: int) -> Tensor:
    """x with all rows of a table in two blocks, a part of the rows at a time: (tokens, rows).

    Args:
        flat: (tokens, columns).
        left: (row modes, column modes, r).
        right: (r, row modes, column modes).
        most_numbers: of a part, which is a quarter of the table at most.
    """
    numbers = flat.shape[1] * right.shape[1]
    rows = max(1, min(most_numbers // numbers, -(-left.shape[0] // 4)))

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


def _within(ids: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The distinct ids in `capacity` places, 0 in those that are not needed, and the place of each id given."""
    ordered, order = ids.reshape(-1).sort()
    is_new = torch.cat([ordered.new_zeros(min(1, len(ordered))), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
    place = is_new.cumsum(0)
    torch._assert_async((place < capacity).all(), f"more than {capacity} distinct ids, the capacity of this table")
    place = place.clamp(max=capacity - 1)
    distinct = ordered.new_zeros(capacity).scatter(0, place, ordered)
    return distinct, torch.empty_like(place).scatter(0, order, place).view(ids.shape)


def _is_unknown(ids: Tensor) -> bool:
    """Whether the number of distinct ids is not to be had: while compiling or capturing, or without memory."""
    if torch.compiler.is_compiling() or ids.is_meta or isinstance(ids, FakeTensor) or _is_batched(ids):
        return True
    return ids.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_batched(values: Tensor) -> bool:
    """Whether these are of one example within `torch.func.vmap`, so that nobody may ask for a number of them."""
    while not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(values):
        if torch._C._functorch.is_batchedtensor(values):
            return True
        values = torch._C._functorch.get_unwrapped(values)
    return False


def _is_transformed() -> bool:
    """Whether this is within a transform of `torch.func`, in which nothing can be checkpointed."""
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None


def _check_ids(ids: Tensor, num_embeddings: int) -> None:
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(f"ids must be integers; given {ids.dtype}")
    if isinstance(ids, FakeTensor) or ids.is_meta or _is_batched(ids):
        return
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        # with a message, or compiled code drops it
        torch._assert_async(
            ((ids >= 0) & (ids < num_embeddings)).all(), f"id out of range: rows 0 to {num_embeddings - 1}"
        )
        return
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < num_embeddings):
        worst = ids.min() if int(ids.min()) < 0 else ids.max()
        raise IndexError(f"id {int(worst)} is out of range: this table has the rows 0 to {num_embeddings - 1}")


def _checked_padding(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, SupportsIndex):
        raise UserError(f"padding_idx must be an integer; given {padding_idx!r}")
    padding_idx = index(padding_idx)
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise UserError(f"padding_idx must be within the {num_embeddings} rows; given {padding_idx}")
    return padding_idx % num_embeddings
