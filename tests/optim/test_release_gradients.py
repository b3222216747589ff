"""Tests of gradients that are used and freed within the backward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad_norm_ as early_clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.optim import CAME, release, release_gradients


class Tied(nn.Module):
    """An embedding tied to the output layer, with layers in between."""

    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def make(seed: int = 0) -> tuple[Tied, CAME]:
    torch.manual_seed(seed)
    model = Tied()
    groups = param_groups(model, weight_decay=0.1)
    return model, CAME(groups, lr=1e-2, betas=(0.9, 0.95, 0.995), debias=True, momentum="int4")


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (4, 8), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_release_matches_ordinary_steps(accumulation: int) -> None:
    ordinary, optimizer = make()
    released, other = make()
    handle = release_gradients(released, other, accumulation=accumulation)
    for number, ids in enumerate(batches(6)):
        (ordinary(ids) / accumulation).backward()
        (released(ids) / accumulation).backward()
        if (number + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            assert all(param.grad is None for param in released.parameters())
            other.step()  # has nothing to do
    for (name, a), b in zip(ordinary.named_parameters(), released.parameters(), strict=True):
        assert torch.equal(a, b), name
    handle.remove()
    released(batches(1)[0]).backward()
    assert all(param.grad is not None for param in released.parameters())


def test_release_with_unused_parameters() -> None:
    """The layers alternate, so some gradients come from an earlier pass when the last pass ends."""
    ordinary, optimizer = make()
    released, other = make()
    release_gradients(released, other, accumulation=3)
    for number, ids in enumerate(batches(9)):
        for model in (ordinary, released):
            layer = model.layers[number % 4]
            (nn.functional.cross_entropy(model.head(layer(model.embed(ids))).flatten(0, 1), ids.flatten())).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            assert all(param.grad is None for param in released.parameters())
    for (name, a), b in zip(ordinary.named_parameters(), released.named_parameters(), strict=True):
        assert torch.equal(a, b[1]), name


def test_step_after_interrupted_accumulation() -> None:
    ordinary, optimizer = make()
    released, other = make()
    release_gradients(released, other, accumulation=3)
    for count in (3, 1, 3, 2):
        for ids in batches(count):
            ordinary(ids).backward()
            released(ids).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ordinary.parameters(), released.parameters(), strict=True))


def test_before_step_sees_each_gradient() -> None:
    ordinary, _ = make()
    released, optimizer = make()
    norms = {}
    release_gradients(released, optimizer, before_step=lambda p: norms.update({id(p): float(p.grad.norm())}))
    ordinary(batches(1)[0]).backward()
    released(batches(1)[0]).backward()
    assert [norms[id(p)] for p in released.parameters()] == [float(p.grad.norm()) for p in ordinary.parameters()]


def test_failed_pass_does_not_count() -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("failed")

    model, optimizer = make()
    release_gradients(model, optimizer, accumulation=2)
    handle = model.embed.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="failed"):
        model(batches(1)[0]).backward()
    handle.remove()
    model.zero_grad()
    for number in range(2):
        assert not optimizer.state
        model(batches(2)[number]).backward()
    assert len(optimizer.state) == len(list(model.parameters()))


def test_reentrant_checkpoints_are_refused() -> None:
    """With use_reentrant=True, each segment runs its own backward pass with a part of a shared gradient."""
    for reentrant in (False, True):
        layer = nn.Linear(32, 32)
        optimizer = CAME([layer.weight, layer.bias], lr=2e-4)
        release_gradients(layer, optimizer)
        x = torch.ones(2, 32, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        if reentrant:
            with pytest.raises(UserError, match="use_reentrant=True"):
                x.sum().backward()
        else:
            x.sum().backward()
            assert all(int(state["step"]) == 1 for state in optimizer.state.values())


@pytest.mark.parametrize("release", [False, True])
def test_release_frees_gradients_one_by_one(release: bool) -> None:
    model, optimizer = make()
    params = list(model.parameters())
    counts = []
    for param in params:  # each hook runs when its parameter's gradient is ready but not yet stored
        param.register_hook(lambda _: counts.append(sum(other.grad is not None for other in params)))
    if release:
        release_gradients(model, optimizer)
    model(batches(1)[0]).backward()
    assert len(counts) == len(params)
    assert max(counts) == (0 if release else len(params) - 1)


def test_release_follows_schedules_loads_and_copies() -> None:
    model, optimizer = make()
    with release_gradients(model, optimizer):
        model(batches(1)[0]).backward()
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            group["lr"] = 0.0
        optimizer.load_state_dict(saved)
        released = set(optimizer.released)
        with pytest.raises(UserError, match="has the keys state and param_groups"):
            optimizer.load_state_dict({"param_groups": saved["param_groups"]})
        broken = copy.deepcopy(saved)
        next(iter(broken["state"].values())).pop("step")
        with pytest.raises(UserError):
            optimizer.load_state_dict(broken)
        assert optimizer.released == released
        before = [param.detach().clone() for param in model.parameters()]
        model(batches(2)[1]).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_release_keeps_frozen_parameters() -> None:
    model, optimizer = make()
    model.layers[0].weight.requires_grad_(False)
    before = model.layers[0].weight.clone()
    with release_gradients(model, optimizer):
        model(batches(1)[0]).backward()
    assert torch.equal(before, model.layers[0].weight)


def test_release_refuses_bad_arguments() -> None:
    model, optimizer = make()
    with pytest.raises(UserError, match=r"works with scantling[.]CAME; given AdamW"):
        release_gradients(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="at least 1; given 0"):
        release_gradients(model, optimizer, accumulation=0)
    with pytest.raises(UserError, match="at least 1; given True"):
        release_gradients(model, optimizer, accumulation=True)
    with pytest.raises(UserError, match="has no trainable parameter of this model"):
        release_gradients(nn.Linear(2, 2), optimizer)
    handle = release_gradients(model, optimizer)
    with pytest.raises(UserError, match="remove the earlier handle"):
        release_gradients(model, optimizer)
    handle.remove()
    handle.remove()
    release_gradients(model, optimizer).remove()


def test_clip_after_release_is_refused() -> None:
    model, optimizer = make()
    with release_gradients(model, optimizer):
        model(batches(1)[0]).backward()
        for clip in (early_clip_grad_norm_, nn.utils.clip_grad_norm_):
            with pytest.raises(UserError, match=r"to 0\.5: .* \(50, 32\).*max_grad_norm=0"):
                clip(model.parameters(), 0.5)
        with pytest.raises(UserError, match=r"to 0\.5: release_gradients"):
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, torch.tensor(1.0))
        # as in a Trainer that only reads the norm
        assert nn.utils.clip_grad_norm_(model.parameters(), float("inf")) == 0
        other = nn.Linear(3, 3)
        other(torch.ones(1, 3)).sum().backward()
        nn.utils.clip_grad_norm_(other.weight, 0.1)
        torch.testing.assert_close(other.weight.grad.norm(), torch.tensor(0.1), atol=1e-4, rtol=0)
    model(batches(1)[0]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert torch.linalg.vector_norm(torch.stack([param.grad.norm() for param in model.parameters()])) <= 0.5


def test_clip_functions_are_restored_after_last_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "_CLIP_GUARD", release._ClipGuard())  # handles of other tests still exist

    def clips() -> tuple[object, ...]:
        return nn.utils.clip_grads_with_norm_, nn.utils.clip_grad._clip_grads_with_norm_

    before = clips()
    first, second = (release_gradients(*make()) for _ in range(2))
    for handle in (first, second):
        assert not set(before) & set(clips())
        handle.remove()
        handle.remove()
    assert clips() == before


def test_several_steps_per_loop_step_warn(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make()
    with release_gradients(model, optimizer):
        for step in range(3):
            for ids in batches(2 if step == 2 else 1):
                model(ids).backward()
            assert not caplog.text
            optimizer.step()
    assert "2 steps of a parameter since the last optimizer.step()" in caplog.text
    assert "give accumulation=2" in caplog.text


def test_ddp_and_fsdp1_are_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, optimizer = make()
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(UserError, match="cannot be released under DistributedDataParallel"):
            release_gradients(wrapped, optimizer)
        with pytest.raises(UserError, match="cannot be released under FullyShardedDataParallel"):
            release_gradients(FullyShardedDataParallel(make()[0], device_id=torch.device("cpu")), optimizer)
        with release_gradients(model, optimizer):  # the wrapped model
            before = [param.detach().clone() for param in model.parameters()]
            with pytest.raises(UserError, match="under DistributedDataParallel, which averages"):
                wrapped(torch.randn(4, 20)).sum().backward()
            assert all(map(torch.equal, before, model.parameters()))
    finally:
        torch.distributed.destroy_process_group()
