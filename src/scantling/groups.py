"""Parameter groups with the role of each parameter: matrix, embedding or vector.

A method may need more than the shape of a parameter: which dims form the rows of a factored statistic, if weight decay
applies, if an optimizer for matrices may step it. It reads these from the keys of the parameter's group. Keys of a
group survive `deepcopy`, `fully_shard` and a state dict; attributes of a parameter do not.

A module whose parameters do not follow the rules of `param_groups` declares their roles with one method:

    def parameter_roles(self) -> dict[str, tuple[Role, MatrixDims | None]]:
        return {"cores.0": ("matrix", ((0, 1), (2,))), "scale": ("vector", None)}

The names are those of `self.named_parameters()`; parameters without a declaration follow the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from scantling.errors import UserError
from scantling.numerics.torch_private import ConvBase, NormBase

Role: TypeAlias = Literal["matrix", "embedding", "vector"]
MatrixDims: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    NormBase,
)
# Several modules can claim a tied parameter; the highest claim decides.
_BY_SHAPE, _BY_LAYER, _BY_EMBEDDING, _BY_DECLARATION = range(4)


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    core_lr: float | None = None,
    embedding_core_lr: float | None = None,
    control_lr: float | None = None,
    embedding_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Sort the parameters of a model into groups for any `torch.optim.Optimizer`.

    Frozen parameters (`requires_grad=False`) are in the groups too. An optimizer keeps no state for them and does not
    change them while they have no gradient, and steps them after they are unfrozen.

    The first rule that applies gives the role:

    - the role that a module declares in `parameter_roles()`;
    - `embedding`: weights of `nn.Embedding` and `nn.EmbeddingBag`, tied or not, and of the output layer that
      `get_output_embeddings()` returns;
    - `vector`: all parameters of a norm, biases (also the stacked ones of expert layers), 0-D and 1-D parameters, and
      parameters of a custom module with at most one dim longer than 1, such as a class token;
    - `matrix`: the rest. A convolution is O x (I * kernel); 3-D and more are stacks of matrices in their last two dims.

    Args:
        model: any module; tied parameters appear once. Frozen parameters of other dtypes than fp32, bf16, fp16 and
            fp64, such as packed codes, are left out, and so are empty ones.
        weight_decay: weight decay of matrices and embeddings; vectors always get 0.
        core_lr: learning rate of TT cores except those of embeddings; they then have separate groups with the key `lr`.
            All cores of a weight move it, so they need a lower rate than dense weights: a third is a good start.
            Default: the rate of the optimizer.
        embedding_core_lr: learning rate of the cores of embeddings, also in separate groups. A row rarely has a
            gradient, so tables need a higher rate than matrices. Default: the rate of the optimizer.
        control_lr: learning rate of the rank gates of a `RankAdapter`, also in separate groups. A gate scales its rank
            in the whole weight, so a higher rate than that of the cores makes training unstable. Default: `core_lr`.
        embedding_lr: learning rate of parameters of role `embedding` that are not cores, also in separate groups. T5
            starts with entries of 1, ten times or more those of its matrices, and learns faster with ten times the
            rate.

    Returns:
        Non-empty groups in the order in which their first parameter appears in the model. Each has the keys `params`
        (list of (fully qualified name, parameter)), `weight_decay`, `role`, and `matrix_dims`: the pair (dims that form
        the rows, dims that form the columns), None for vectors. Dims in neither are batch dims.

    Raises:
        UserError: a negative weight decay or rate, no trainable parameter, lazy parameters without a shape, or a wrong
            declaration.

    Example:
        >>> optimizer = sc.CAME(sc.param_groups(model, weight_decay=0.1), lr=1e-3)
    """
    if not weight_decay >= 0.0:
        raise UserError(f"weight_decay must be at least 0; given {weight_decay!r}")
    # Role of each parameter, then learning rates by parameter, then groups by (role, matrix dims, rate).
    claims = _claims(model)
    cores, controls = _list_ids(model, "cores"), _list_ids(model, "rank_gates")
    tables = {key for key, (role, _) in claims.items() if role == "embedding"}
    rates: dict[int, float] = {}
    for name, params, rate in (
        ("embedding_lr", tables - cores, embedding_lr),
        ("core_lr", cores - tables, core_lr),
        ("embedding_core_lr", tables & cores, embedding_core_lr),
        ("control_lr", controls, core_lr if control_lr is None else control_lr),
    ):
        if rate is not None:
            if not rate >= 0.0:
                raise UserError(f"{name} must be at least 0; given {rate!r}")
            rates |= dict.fromkeys(params, rate)
    groups: dict[tuple[Role, MatrixDims | None, float | None], dict[str, Any]] = {}
    if not any(param.requires_grad for param in model.parameters()):
        raise UserError(f"{type(model).__name__} has no trainable parameter; set requires_grad=True on what to train")
    for name, param in model.named_parameters():
        # No optimizer can step packed codes and empty tensors.
        if not param.requires_grad and (param.dtype not in _TRAINABLE or not param.numel()):
            continue
        role, matrix_dims = claims[id(param)]
        group = groups.setdefault(
            (role, matrix_dims, rates.get(id(param))),
            {
                "params": [],
                "role": role,
                "matrix_dims": matrix_dims,
                "weight_decay": 0.0 if role == "vector" else weight_decay,
                **({"lr": rates[id(param)]} if id(param) in rates else {}),
            },
        )
        group["params"].append((name, param))
    return list(groups.values())


def _list_ids(model: nn.Module, name: str) -> set[int]:
    """Return ids of the parameters in the `ParameterList`s of this name in modules that declare roles."""
    lists = (getattr(module, name, None) for module in model.modules() if hasattr(module, "parameter_roles"))
    return {id(param) for each in lists if isinstance(each, nn.ParameterList) for param in each}


def num_non_embedding(model: nn.Module) -> int:
    """Return the number of parameters outside of embeddings and output layer, frozen or not: N of scaling laws."""
    tables = [
        m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) or hasattr(m, "num_embeddings")
    ]
    excluded = {id(param) for module in (*tables, *output_layers(model)) for param in module.parameters()}
    return sum(param.numel() for param in model.parameters() if id(param) not in excluded)


def default_matrix_dims(ndim: int) -> MatrixDims:
    """Return (row dims, column dims) of a matrix, a stack of matrices, or a convolution without group keys."""
    return ((ndim - 2,), (ndim - 1,)) if ndim < 4 else ((0,), tuple(range(1, ndim)))


def check_matrix_dims(matrix_dims: Any, ndim: int) -> MatrixDims:
    """Return the pair (row dims, column dims) as tuples of ints.

    Args:
        matrix_dims: two sequences of dims; lists are accepted, since JSON has no tuples.
        ndim: number of dims of the parameter.

    Raises:
        UserError: not two sequences, a dim out of range or given twice, no rows or no columns.
    """
    pair = isinstance(matrix_dims, Sequence) and len(matrix_dims) == 2
    if not pair or not all(isinstance(dims, Sequence) and not isinstance(dims, str) for dims in matrix_dims):
        raise UserError(f"matrix_dims must be (row dims, column dims), such as ((0,), (1,)); given {matrix_dims!r}")
    rows, cols = (tuple(dims) for dims in matrix_dims)
    if not all(isinstance(dim, int) and 0 <= dim < ndim for dim in rows + cols):
        raise UserError(
            f"matrix_dims must hold dims from 0 to {ndim - 1} of a {ndim}-D parameter; given {matrix_dims!r}"
        )
    if not rows or not cols or len(set(rows + cols)) != len(rows + cols):
        raise UserError(
            f"matrix_dims needs at least one row and one column dim, none of them twice; given {matrix_dims!r}"
        )
    return rows, cols


def _claims(model: nn.Module) -> dict[int, tuple[Role, MatrixDims | None]]:
    """Return role and matrix dims by parameter id, from the highest claim; the first of equal ones."""
    best: dict[int, tuple[int, Role, MatrixDims | None]] = {}
    heads = {id(getattr(head, "weight", None)) for head in output_layers(model)}
    for path, module in model.named_modules():
        claims = [*_declared(path, module), *_by_rule(path, module, heads)]
        for param, rank, role, matrix_dims in claims:
            if id(param) not in best or rank > best[id(param)][0]:
                best[id(param)] = (rank, role, matrix_dims)
    return {key: (role, matrix_dims) for key, (_, role, matrix_dims) in best.items()}


_Claim: TypeAlias = tuple[nn.Parameter, int, Role, MatrixDims | None]


def _declared(path: str, module: nn.Module) -> Iterator[_Claim]:
    declare = getattr(module, "parameter_roles", None)
    if not callable(declare):
        return
    # a declaration may use any name of a tied parameter
    params = dict(module.named_parameters(remove_duplicate=False))
    for name, (role, matrix_dims) in declare().items():
        where = f"parameter_roles() of {type(module).__name__} at '{path}'"
        if name not in params:
            raise UserError(f"{where} names '{name}'; its parameters are {', '.join(params) or '(none)'}")
        if role not in get_args(Role):
            raise UserError(f"{where}: the role of '{name}' must be one of {', '.join(get_args(Role))}; given {role!r}")
        if role == "vector":
            yield params[name], _BY_DECLARATION, role, None
            continue
        try:
            yield params[name], _BY_DECLARATION, role, check_matrix_dims(matrix_dims, params[name].ndim)
        except UserError as error:
            raise UserError(f"{where}, '{name}': {error}") from None


def _by_rule(path: str, module: nn.Module, heads: set[int]) -> Iterator[_Claim]:
    for name, param in module.named_parameters(recurse=False):
        if nn.parameter.is_lazy(param):
            raise UserError(f"'{path}.{name}' has no shape yet; run one forward pass before grouping the parameters")
        ndim = param.ndim
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag) or id(param) in heads
        # The first rule that applies; the class of the module goes before the shape.
        if is_embedding and ndim == 2:
            yield param, _BY_EMBEDDING, "embedding", ((0,), (1,))
        elif isinstance(module, _NORMS) or ndim < 2 or _is_bias(name):
            yield param, _BY_LAYER, "vector", None
        elif isinstance(module, ConvBase):
            yield param, _BY_LAYER, "matrix", ((0,), tuple(range(1, ndim)))
        elif isinstance(module, nn.Linear):
            yield param, _BY_LAYER, "matrix", ((0,), (1,))
        elif sum(size > 1 for size in param.shape) < 2:
            yield param, _BY_SHAPE, "vector", None
        else:
            yield param, _BY_SHAPE, "matrix", ((ndim - 2,), (ndim - 1,))


def _is_bias(name: str) -> bool:
    """True if the name of a parameter contains the word bias: `bias`, `bias_k`, `gate_up_proj_bias`."""
    return "bias" in name.split("_")


def output_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the output layers that `get_output_embeddings()` of a Hugging Face model, or of a submodel, returns."""
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        if isinstance(head, nn.Module):
            yield head
