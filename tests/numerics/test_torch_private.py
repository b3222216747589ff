"""Canary tests: each use of PyTorch's private API does what Scantling needs in the installed version."""

from __future__ import annotations

import ast
import itertools
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scantling.numerics import torch_private

SOURCE = Path(torch_private.__file__).parents[1]
TORCH_NAMES = ("torch", "dist", "nn")
DOTTED = re.compile(r"\w+(\.\w+)+")


def private_uses(path: Path) -> list[str]:
    """Return the private names that a file takes from torch by import or by a dotted name."""
    uses = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = re.findall(r"\w+", ast.unparse(node)) if DOTTED.fullmatch(ast.unparse(node)) else [""]
        else:
            continue
        if names[0] in TORCH_NAMES and any(name.startswith("_") and not name.endswith("__") for name in names):
            uses.append(f"{path}:{node.lineno}: {'.'.join(names)}")
    return uses


def test_only_torch_private_uses_private_torch_names() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path.name != "torch_private.py"]
    assert [use for path in files for use in private_uses(path)] == []
    assert private_uses(Path(torch_private.__file__))


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_foreach_functions_match_loops() -> None:
    values = [torch.tensor([3.0, 4.0]), torch.tensor([[6.0, 8.0]])]
    torch.testing.assert_close(list(torch_private.foreach_norm(values)), [torch.tensor(5.0), torch.tensor(10.0)])
    torch.testing.assert_close(
        list(torch_private.foreach_norm(values, 1, torch.float64)),
        [torch.tensor(7.0, dtype=torch.float64), torch.tensor(14.0, dtype=torch.float64)],
    )
    torch_private.foreach_add_(values, 1.0)
    assert values[0].tolist() == [4.0, 5.0]
    torch_private.foreach_div_(values, torch.tensor(2.0))
    assert values[0].tolist() == [2.0, 2.5]
    torch_private.foreach_mul_(values, -2.0)
    assert values[0].tolist() == [-4.0, -5.0]
    torch_private.foreach_sign_(values)
    assert values[0].tolist() == [-1.0, -1.0]
    torch_private.foreach_copy_(values, [torch.ones(2), torch.ones(1, 2)])
    assert values[1].tolist() == [[1.0, 1.0]]
    torch_private.foreach_zero_(values)
    assert values[1].tolist() == [[0.0, 0.0]]


def test_int8_matmul_accumulates_in_int32() -> None:
    a = torch.full((32, 64), 127, dtype=torch.int8)
    product = torch_private.int8_matmul(a, a.t())
    assert product.dtype == torch.int32
    assert int(product[0, 0]) == 64 * 127**2


def test_float8_matmul_takes_scales_and_returns_fp32() -> None:
    a = torch.full((16, 16), 2.0).to(torch.float8_e4m3fn)
    one = torch.ones(())
    product = torch_private.float8_matmul(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    assert product.dtype == torch.float32
    assert float(product[0, 0]) == 64.0


def test_assert_async_raises_with_its_message() -> None:
    torch_private.assert_async(torch.tensor(True), "no error")
    with pytest.raises(RuntimeError, match="too many"):
        torch_private.assert_async(torch.tensor(False), "too many")


@pytest.mark.parametrize("dtype", ["int8", "bf16", "fp16"])
def test_cpu_has_matmul_answers_for_each_dtype(dtype: str) -> None:
    assert torch_private.cpu_has_matmul(dtype) in (True, False)


def test_storage_key_identifies_fake_storages() -> None:
    with torch_private.FakeTensorMode():
        a, b = torch.empty(2), torch.empty(2)
    keys = [torch_private.storage_key(value.untyped_storage()) for value in (a, a.view(1, 2), b)]
    assert keys[0] == keys[1] != keys[2]


def test_version_counter_counts_changes() -> None:
    value = torch.zeros(2)
    before = torch_private.version_counter(value)
    value.add_(1)
    torch.autograd.graph.increment_version([value])
    assert torch_private.version_counter(value) == before + 2


def test_is_zero_tensor_finds_symbolic_zeros() -> None:
    assert torch_private.is_zero_tensor(torch._efficientzerotensor((2,)))
    assert not torch_private.is_zero_tensor(torch.zeros(2))


class Recorder(Tensor):
    """Tensor that records the functions called on it."""

    called: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch_private.DisableTorchFunctionSubclass():
            args[0].called.append(func.__name__)
            return func(*args, **(kwargs or {}))


def test_make_subclass_makes_a_leaf_whose_functions_can_be_bypassed() -> None:
    value = torch_private.make_subclass(Recorder, torch.ones(2), True)
    value.called = []
    assert type(value) is Recorder
    with torch_private.DisableTorchFunctionSubclass():
        assert value.requires_grad
        assert value.is_leaf
    assert value.called == []
    torch.sum(value)
    assert value.called == ["sum"]


def test_post_accumulate_hooks_are_listed() -> None:
    param = nn.Parameter(torch.ones(2))
    assert torch_private.post_accumulate_hooks(param) == []
    handle = param.register_post_accumulate_grad_hook(print)
    assert torch_private.post_accumulate_hooks(param) == [print]
    handle.remove()
    assert torch_private.post_accumulate_hooks(param) == []


def test_backward_passes_have_ids_and_call_functions_at_their_end() -> None:
    param, events, ids = nn.Parameter(torch.ones(2)), [], []

    def hook(_: Tensor) -> None:
        ids.append(torch_private.current_backward_id())
        torch_private.call_after_backward(lambda: events.append(param.grad is not None))

    param.register_hook(hook)
    for _ in range(2):
        param.grad = None
        param.sum().backward()
    assert torch_private.current_backward_id() == -1
    assert -1 not in ids
    assert ids[0] != ids[1]
    assert events == [True, True]


def test_saved_tensor_hooks_returns_the_innermost() -> None:
    def pack(value: Tensor) -> Tensor:
        return value

    assert torch_private.saved_tensor_hooks(even_if_tracing=True) is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        for even_if_tracing in (True, False):
            hooks = torch_private.saved_tensor_hooks(even_if_tracing=even_if_tracing)
            assert hooks[0] is pack
    assert torch_private.saved_tensor_hooks(even_if_tracing=False) is None


def test_functorch_transforms_are_seen() -> None:
    seen: list[tuple[bool, bool]] = []

    def function(x: Tensor) -> Tensor:
        seen.append((torch_private.is_in_transform(), torch_private.is_batched(x)))
        return x.sum()

    x = torch.ones(3, 2)
    function(x)
    torch.func.grad(function)(x)
    torch.func.vmap(function)(x)
    torch.func.vmap(torch.func.grad(function))(x)
    assert seen == [(False, False), (True, False), (True, True), (True, True)]


def test_forward_mode_and_batched_gradients_are_seen() -> None:
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.is_in_transform()
    assert not torch_private.is_in_transform()
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2.0
    y.register_hook(lambda grad: seen.append(torch_private.is_batched(grad)))
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, False]


def test_dispatch_modes_are_seen_and_left() -> None:
    assert not torch_private.is_in_dispatch_mode()
    with torch_private.FakeTensorMode():
        assert torch_private.is_in_dispatch_mode()
        with torch_private.without_dispatch_modes():
            assert not torch_private.is_in_dispatch_mode()
            assert type(torch.ones(1)) is Tensor
        assert torch_private.is_in_dispatch_mode()


def test_fake_tensors_and_dispatch_modes_see_operations() -> None:
    packets = []

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            packets.append(torch_private.overload_packet(func))
            return func(*args, **(kwargs or {}))

    with torch_private.FakeTensorMode(allow_non_fake_inputs=True), Mode():
        result = torch.empty(2, 3) @ torch.empty(3, 4)
    assert isinstance(result, torch_private.FakeTensor)
    assert torch.ops.aten.mm in packets


def test_cpu_flash_attention_is_the_operation_of_cpu_attention() -> None:
    from torch.utils.flop_counter import flop_registry

    assert torch_private.cpu_flash_attention() not in flop_registry
    called = []

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(torch_private.overload_packet(func))
            return func(*args, **(kwargs or {}))

    query = torch.ones(1, 2, 4, 8, requires_grad=True)
    with Mode():
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    assert torch_private.cpu_flash_attention() in called
    assert torch_private.cpu_flash_attention_backward() in called


def test_tree_functions_walk_nested_outputs() -> None:
    assert torch_private.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert torch_private.tree_map_only(int, lambda x: x + 1, ([1, "a"], {"b": 2})) == ([2, "a"], {"b": 3})


def test_disable_dynamo_keeps_the_function() -> None:
    assert torch_private.disable_dynamo(lambda x: x + 1)(1) == 2


def test_unwrap_compiled_returns_the_original_module() -> None:
    model = nn.Linear(2, 2)
    assert torch_private.unwrap_compiled(torch.compile(model)) is model
    assert torch_private.unwrap_compiled(model) is model


def test_base_classes_of_norms_and_convolutions() -> None:
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm2d)
    assert all(issubclass(cls, torch_private.NormBase) for cls in norms)
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
    assert all(issubclass(cls, torch_private.ConvBase) for cls in convolutions)


def test_own_dictionaries_hold_none_entries() -> None:
    module = nn.Linear(2, 2, bias=False)
    module.register_buffer("saved", None)
    module.register_buffer("temporary", torch.ones(1), persistent=False)
    module.child = nn.Identity()
    assert list(torch_private.own_parameters(module)) == ["weight", "bias"]
    assert torch_private.own_parameters(module)["bias"] is None
    assert torch_private.own_parameters(nn.ParameterList([torch.ones(1)]))["0"] is not None
    assert list(torch_private.own_buffers(module)) == ["saved", "temporary"]
    assert torch_private.own_modules(module) == {"child": module.child}
    assert torch_private.non_persistent_buffers(module) == {"temporary"}


def test_module_hooks_are_shared_and_removed() -> None:
    events: list[str] = []

    def before(module: nn.Module, args: Any) -> None:
        events.append("before")

    def after(module: nn.Module, args: Any, output: Any) -> None:
        events.append("after")

    def backward(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        events.append("backward")

    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    source.register_forward_pre_hook(before)
    source.register_forward_hook(after, always_call=True)
    source.register_full_backward_hook(backward)
    torch_private.share_hooks(source, target)
    target(torch.ones(1, 2)).sum().backward()
    assert events == ["before", "after", "backward"]

    torch_private.remove_forward_hooks(target, [before, after])
    events.clear()
    target(torch.ones(1, 2))
    assert events == []


def test_calls_that_run_the_forward_of_a_class_alone_are_told_apart() -> None:
    def hook(*_: Any) -> None: ...

    def with_hook(register: str) -> nn.Module:
        module = nn.Linear(2, 2)
        getattr(module, register)(hook)
        return module

    assert torch_private.runs_own_forward(nn.Linear(2, 2))
    forward, backward = ("register_forward_hook", "register_forward_pre_hook"), ("backward_hook", "backward_pre_hook")
    for register in (*forward, *(f"register_full_{name}" for name in backward)):
        assert not torch_private.runs_own_forward(with_hook(register)), register
    replaced = nn.Linear(2, 2)
    replaced.forward = replaced.forward  # type: ignore[method-assign]
    assert not torch_private.runs_own_forward(replaced)
    handle = nn.modules.module.register_module_forward_hook(hook)
    assert not torch_private.runs_own_forward(nn.Linear(2, 2))
    handle.remove()
    assert torch_private.runs_own_forward(nn.Linear(2, 2))


def test_load_state_dict_pre_hooks_are_removed() -> None:
    def hook(*_: Any) -> None:
        raise AssertionError("not removed")

    module = nn.Linear(2, 2)
    module.register_load_state_dict_pre_hook(hook)
    torch_private.remove_load_state_dict_pre_hooks(module, hook)
    module.load_state_dict(module.state_dict())


def test_modules_call_the_private_methods_that_tt_layers_override() -> None:
    called = []

    class Layer(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            called.append("_apply")
            return super()._apply(fn, recurse)

        def _load_from_state_dict(self, *args: Any) -> None:
            called.append("_load_from_state_dict")
            super()._load_from_state_dict(*args)

    layer = Layer(2, 2).double()
    layer.load_state_dict(layer.state_dict())
    assert called == ["_apply", "_load_from_state_dict"]


def test_load_state_dict_hooks_of_optimizers_are_listed() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.register_load_state_dict_pre_hook(print)
    optimizer.register_load_state_dict_post_hook(repr)
    assert torch_private.load_state_dict_hooks(optimizer) == ([print], [repr])


def test_grad_scaler_has_overflow_flags_and_lets_optimizers_unscale() -> None:
    param = nn.Parameter(torch.ones(2))

    class Unscaling(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> None:
            assert float(self.grad_scale) == 8.0  # type: ignore[attr-defined]

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler.step(Unscaling([param]))

    optimizer, scaler = torch.optim.SGD([param]), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    param.grad[0] = torch.inf  # type: ignore[index]
    scaler.unscale_(optimizer)
    assert [bool(flag) for flag in torch_private.found_inf(scaler, optimizer)] == [True]


def test_clip_grad_norm_looks_up_its_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = torch_private.CLIP_FUNCTIONS[0]
    called = []
    monkeypatch.setattr(module, name, lambda *args, **options: called.append(args))
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    nn.utils.clip_grad_norm_([param], 1.0)
    assert len(called) == 1
    assert all(hasattr(module, name) for module, name in torch_private.CLIP_FUNCTIONS)


def test_default_group_has_a_store_devices_and_a_timeout(process_group: Any) -> None:
    torch_private.default_store().set("key", "value")
    assert torch_private.default_store().get("key") == b"value"
    assert torch.device("cpu") in torch_private.default_group_devices()
    assert torch_private.group_timeout(process_group, torch.device("cpu")) == timedelta(seconds=77)


def test_all_gather_into_fills_the_output(process_group: Any) -> None:
    output = torch.zeros(2)
    torch_private.all_gather_into(process_group, output, torch.ones(2)).wait()
    assert output.tolist() == [1.0, 1.0]


def test_ddp_has_an_active_module_and_a_list_of_hooks(process_group: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    active = []
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda *_: active.append(torch_private.active_ddp_module()))
    wrapper = nn.parallel.DistributedDataParallel(model)
    assert torch_private.comm_hooks(wrapper) == []
    wrapper.register_comm_hook(None, noop_hook)
    assert torch_private.comm_hooks(wrapper) == [noop_hook]
    wrapper(torch.ones(1, 2))
    assert active == [wrapper]
    assert torch_private.active_ddp_module() is None


def test_fsdp_state_is_one_object_per_fully_shard(process_group: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    fully_shard(first)
    fully_shard(second)
    states = [torch_private.fsdp_state(module) for module in (first, first, second)]
    assert states[0] is states[1]
    assert states[1] is not states[2]
    net = nn.Sequential(first, nn.Linear(2, 2))
    assert torch_private.fsdp_managed_modules(net) == {first}
    weight = first.weight
    assert torch.equal(torch_private.local_part(weight), weight.to_local())
    assert torch_private.dtensor_spec(weight).placements == weight.placements


def test_checkpoint_classes_take_our_arguments() -> None:
    info = torch_private.checkpoint_storage_info("__0_0.distcp", 8, 16)
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 8, 16)
    assert torch_private.checkpoint_file_prefix("__3_").prefix == "__3_"


@pytest.mark.parametrize("sizes", [(1, 1, 3), (1, 5, 2), (3, 1, 4), (2, 8, 1), (17, 33, 9)])
@pytest.mark.parametrize("layouts", itertools.product(("rows", "columns", "slice"), repeat=2), ids=" ".join)
def test_int8_products_of_all_layouts_are_exact(sizes: tuple[int, int, int], layouts: tuple[str, str]) -> None:
    """A transposed column has one row, whose stride is 1: CPUs with int8 instructions read past it."""
    generator = torch.Generator().manual_seed(0)

    def make(rows: int, columns: int, layout: str) -> torch.Tensor:
        shape = {"rows": (rows, columns), "columns": (columns, rows), "slice": (rows, columns + 5)}[layout]
        values = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        return values.t() if layout == "columns" else values[:, :columns]

    m, k, n = sizes
    left, right = make(m, k, layouts[0]), make(k, n, layouts[1])
    assert torch.equal(torch_private.int8_matmul(left, right).long(), left.long() @ right.long())
