"""PyTorch's private API: every use of it in Scantling, each with the public API that is missing.

PyTorch may change any of this in a minor release. `tests/numerics/test_torch_private.py` checks each one, so that a new
version fails there with a clear name and not somewhere in a training run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

# One kernel for a list of tensors. Public optimizers have `foreach=True`, but there is no public function.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sign_ = torch._foreach_sign_
foreach_zero_ = torch._foreach_zero_

# Products of int8 and float8 codes. `torch.matmul` refuses these dtypes.
float8_matmul = torch._scaled_mm


def int8_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product of int8 matrices in int32; (m, k), (k, n) -> (m, n).

    On a CPU with int8 instructions, PyTorch 2.13 reads a matrix of one row by the stride between rows, which a
    transposed column has as 1.
    """
    return torch._int_mm(_with_row_stride(left), _with_row_stride(right))


def _with_row_stride(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.shape[0] != 1 or matrix.device.type != "cpu":
        return matrix
    return matrix.contiguous().as_strided(matrix.shape, (matrix.shape[1], 1))


# A context without the `__torch_function__` of tensor subclasses. There is no public counterpart.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# An assertion on the device, without a synchronization. There is no public counterpart.
assert_async = torch._assert_async


def cpu_has_matmul(dtype: str) -> bool:
    """True if this x86 CPU has instructions for products in "int8", "bf16" or "fp16".

    `torch.backends` reports which libraries are built in, but no such instructions.
    """
    if dtype == "int8":
        return bool(torch.cpu._is_vnni_supported())
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported")())


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage. `data_ptr` is 0 for all fake and meta storages; Python objects are remade."""
    key: int = storage._cdata
    return key


def version_counter(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place. `increment_version` is public, reading is not."""
    return tensor._version


def is_zero_tensor(tensor: Tensor) -> bool:
    """True for autograd's symbolic zeros, which have no memory. The public flags are `is_neg` and `is_conj` only."""
    return tensor._is_zerotensor()


def make_subclass(cls: type[Tensor], data: Tensor, requires_grad: bool) -> Any:
    """Return data as a tensor of a subclass. After the public `as_subclass`, the subclass sees `requires_grad_` too."""
    return torch.Tensor._make_subclass(cls, data, requires_grad)


def post_accumulate_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the post-accumulate-grad hooks of a parameter. They can be registered publicly, but not listed."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def current_backward_id() -> int:
    """Return the number of the backward pass that is running; -1 outside of one. Hooks get no such number."""
    return torch._C._current_graph_task_id()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass. Public hooks belong to tensors or nodes."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def saved_tensor_hooks(*, even_if_tracing: bool) -> Any:
    """Return the innermost saved-tensor hooks; None without any. The public context manager can only push and pop."""
    return torch._C._autograd._top_saved_tensors_default_hooks(even_if_tracing)


def is_batched(values: Tensor) -> bool:
    """True if the values belong to one example inside `torch.func.vmap`, at any level, or to one of batched gradients
    (`is_grads_batched` of `torch.autograd.grad`). Nothing public says so.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(values):
        if functorch.is_batchedtensor(values):
            return True
        values = functorch.get_unwrapped(values)
    return torch._C._dispatch_keys(values).has("Batched")


def is_in_transform() -> bool:
    """True inside a `torch.func` transform or forward-mode differentiation. Nothing public says so."""
    return torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0


def is_in_dispatch_mode() -> bool:
    """True inside a dispatch mode of this thread, such as one that counts operations. Nothing public says so."""
    return bool(torch._C._len_torch_dispatch_stack())


# A context that leaves all dispatch modes. They can only be left one by one publicly, by the code that entered them.
without_dispatch_modes = _python_dispatch._disable_current_modes


# Keeps a method out of compiled graphs. The public `torch.compiler.disable` imports the whole compiler at once.
disable_dynamo = _disable_dynamo


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module inside of `torch.compile(model)`, or the model itself. The wrapper has no public attribute."""
    return getattr(model, "_orig_mod", model)


def overload_packet(operation: Any) -> Any:
    """Return `aten.mm` for `aten.mm.default`, the key of the public `flop_registry`."""
    return operation._overloadpacket


def cpu_flash_attention() -> Any:
    """Return the operation of fused attention on CPUs, for which `flop_registry` has no formula."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def cpu_flash_attention_backward() -> Any:
    """Return the operation of its gradients."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# Base classes of all batch and instance norms, and of all convolutions. Only the subclasses are public.
NormBase = nn.modules.batchnorm._NormBase
ConvBase = nn.modules.conv._ConvNd


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary of a module's own parameters.

    The public `named_parameters` builds sets in each call, hides entries that are None, and goes through the slow
    `ParameterList`; layers read this in each forward pass.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary of a module's own buffers, None entries included."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary of a module's own submodules, None entries included."""
    return module._modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's buffers that are not saved. `named_buffers` does not tell them apart."""
    return module._non_persistent_buffers_set


_FORWARD_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_FORWARD_PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook")


def share_hooks(source: nn.Module, target: nn.Module) -> None:
    """Give a module the forward and backward hooks of another one. Hooks cannot be listed publicly."""
    for name in (*_FORWARD_HOOKS, *_FORWARD_PRE_HOOKS, *_BACKWARD_HOOKS):
        if name in vars(source):
            vars(target)[name] = vars(source)[name]


def runs_own_forward(module: nn.Module) -> bool:
    """True if a call of a module runs the `forward` of its class and nothing else: no hook, and no other `forward`."""
    has_hooks = (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
    return not (has_hooks or "forward" in vars(module) or torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def remove_forward_hooks(module: nn.Module, functions: Iterable[Callable[..., Any]]) -> None:
    """Remove forward hooks and pre-hooks by their functions. Public handles do not survive copies of a model."""
    functions = tuple(functions)
    for names in (_FORWARD_HOOKS, _FORWARD_PRE_HOOKS):
        hooks, *flags = (getattr(module, name) for name in names)
        for key in [key for key, hook in hooks.items() if hook in functions]:
            for entries in (hooks, *flags):
                entries.pop(key, None)


def remove_load_state_dict_pre_hooks(module: nn.Module, function: Callable[..., Any]) -> None:
    """Remove pre-hooks of `load_state_dict` by their function. Public handles do not survive copies of a model."""
    hooks = module._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is function]:
        del hooks[key]


def load_state_dict_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """Return the hooks before and after `load_state_dict`, which an override of it must call."""
    before, after = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    return list(before.values()), list(after.values())


def found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the overflow flag of each device after `unscale_`. There is no public way to share it between ranks."""
    flags: dict[Any, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return list(flags.values())


CLIP_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
    (torch.nn.utils, "clip_grads_with_norm_"),
)
"""The second half of `clip_grad_norm_`, which has no hooks, as (module, name), and its public name."""


def default_store() -> Any:
    """Return the store of the default process group. `init_process_group` makes one and returns nothing."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def default_group_devices() -> list[torch.device]:
    """Return the device types that the default process group can send. `get_backend` only names backends."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_group()._device_types


def group_timeout(group: ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a process group on one device. It can be set publicly, but not read."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def all_gather_into(group: Any, output: Tensor, input: Tensor) -> Any:
    """Start an all-gather in a group that is not registered with torch.distributed, as torchft's are not."""
    return group._allgather_base(output, input)


def active_ddp_module() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward pass is running; a module does not know its wrapper."""
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call, no-any-return]


def comm_hooks(wrapper: nn.Module) -> list[Any]:
    """Return the communication hooks of a DistributedDataParallel. They can be registered publicly, but not listed."""
    return [hook for hook, _ in getattr(wrapper, "_comm_hooks", [])]


local_part = attrgetter("_local_tensor")
dtensor_spec = attrgetter("_spec")
"""Local part, and mesh and placements, of a DTensor. The public `to_local` takes a hundred times longer."""


def fsdp_state(module: Any) -> Any:
    """Return the object that manages a `fully_shard` module's parameters. Nothing public says what belongs together."""
    return module._get_fsdp_state()


def fsdp_managed_modules(module: nn.Module) -> set[nn.Module]:
    """Return the modules whose parameters `fully_shard` manages, anywhere inside a module.

    A managed parameter is a DTensor only while it is sharded.
    """
    managed: set[nn.Module] = set()
    for part in module.modules():
        if hasattr(part, "_get_fsdp_state"):
            state = fsdp_state(part)
            # PyTorch 2.12 and older have one group.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            infos = [param._module_info for group in groups if group is not None for param in group.fsdp_params]
            managed.update(owner for info in infos for owner in (info.module, *info.shared_modules))
    return managed


def checkpoint_storage_info(file: str, offset: int, length: int) -> Any:
    """Return the place of a tensor in a distributed checkpoint. The index has to be built from private classes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def checkpoint_file_prefix(prefix: str) -> Any:
    """Return the plan entry that names the files of one rank in a distributed checkpoint."""
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    return _StoragePrefix(prefix)
