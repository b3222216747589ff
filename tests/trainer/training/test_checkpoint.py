"""Tests of checkpoints: bits and dtypes are preserved, and no content can run code."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scantling.distributed.context import DistContext
from scantling.distributed.peers import ARRIVED, group_store
from scantling.errors import UserError
from scantling.trainer.training import checkpoint, checkpoint_parts
from scantling.trainer.training.checkpoint import Checkpoint, Checkpointer, State
from scantling.trainer.training.checkpoint_state import (
    load_model,
    load_optimizer,
    load_rng,
    merge_states,
    model_state,
    optimizer_state,
    rng_state,
)
from tests import processes
from tests.damage import find_damage

SINGLE_PROCESS = DistContext(0, 1, torch.device("cpu"))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids)))


def stepped(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randint(0, 7, (5,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("reader", [False, True])
def test_interrupt_while_saving_or_loading_is_no_damage(
    tmp_path: Path, reader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    checkpointer = Checkpointer(tmp_path, SINGLE_PROCESS)
    saved = checkpointer.save(1, State({"a": torch.arange(3)}, {}))
    part, name = (checkpoint.IndexedReader, "read_data") if reader else (checkpoint_parts.RankWriter, "write_data")
    with monkeypatch.context() as patched:
        patched.setattr(part, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.load_tensors(saved) if reader else checkpointer.save(2, State({"a": torch.arange(3)}, {}))
    assert newest_path(checkpointer) == saved
    checkpointer.save(2, State({"a": torch.arange(3)}, {}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_keeps_bits_and_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = stepped(0, dtype)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-7  # fp32 state of a low-precision parameter
    other, other_optimizer = stepped(1, dtype)
    saver = Checkpointer(tmp_path, SINGLE_PROCESS)
    own = State(values={"step": 3, "tokens": 48, "data": {"seed": 0, "epoch": 0, "index": 6}})
    path = saver.save(
        3, merge_states(own, model_state(model), optimizer_state(optimizer, model), rng_state(SINGLE_PROCESS))
    )
    want_random = torch.rand(3)
    load_model(other, Checkpoint.read(path))
    load_optimizer(other_optimizer, other, Checkpoint.read(path))
    load_rng(Checkpoint.read(path), SINGLE_PROCESS)
    assert torch.equal(torch.rand(3), want_random)
    assert other.head.weight is other.embed.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert value.dtype == other_optimizer.state[b][key].dtype
            assert torch.equal(value, other_optimizer.state[b][key])


def test_keeps_the_newest_k(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, SINGLE_PROCESS, keep=2)
    for step in (5, 10, 15):
        saver.save(step, State({"x": torch.arange(step)}))
    assert saver.steps() == [15, 10]
    assert newest_path(saver) == tmp_path / "step-15"


def test_next_save_removes_unfinished_checkpoints(tmp_path: Path) -> None:
    torn = tmp_path / "step-3.tmp"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    Checkpointer(tmp_path, SINGLE_PROCESS).save(5, State({"x": torch.arange(5)}))
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


def newest_path(checkpointer: Checkpointer) -> Path:
    newest = checkpointer.newest()
    assert newest is not None
    return newest.path


def slow_sums(folder: Path) -> None:
    """Sum a file only once the other process waits outside of collectives, where their timeout does not apply."""
    context = DistContext(dist.get_rank(), 2, torch.device("cpu"))
    store, digest = group_store(), checkpoint.file_digest

    def summed(path: Path) -> dict[str, Any]:
        until = time.monotonic() + 60
        while store.add(f"{ARRIVED}1", 0) <= store.add(f"{ARRIVED}0", 0):
            assert time.monotonic() < until, "the other process waits in a collective"
            time.sleep(0.01)
        return digest(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "file_digest", summed)
        saver = Checkpointer(folder, context)
        assert saver.newest() is None
        saver.save(1, State({"x": torch.arange(5)}))
        assert newest_path(saver) == folder / "step-1"


@pytest.mark.dist
def test_processes_wait_for_checksums_of_large_files(tmp_path: Path) -> None:
    processes.run(2, slow_sums, tmp_path)


def test_new_checkpoint_replaces_damaged_ones_of_later_steps(tmp_path: Path) -> None:
    """The run has resumed from the checkpoint before the damaged ones."""
    for step in (5, 10):
        Checkpointer(tmp_path, SINGLE_PROCESS).save(step, State({"x": torch.arange(step)}))
    (tmp_path / "step-10" / "__0_0.distcp").unlink()
    saver = Checkpointer(tmp_path, SINGLE_PROCESS, keep=1)
    saver.save(6, State({"x": torch.arange(6)}))
    assert saver.steps() == [6]
    assert newest_path(saver) == tmp_path / "step-6"


@pytest.mark.parametrize("name", ["manifest.json", "index.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("harm", ["remove", "truncate", "flip"])
def test_any_damage_is_detected(tmp_path: Path, name: str, harm: str) -> None:
    saver = Checkpointer(tmp_path, SINGLE_PROCESS)
    path = saver.save(1, State({"x": torch.randn(100)}))
    assert find_damage(path) is None
    file = path / name
    content = bytearray(file.read_bytes())
    if harm == "remove":
        file.unlink()
    elif harm == "truncate":
        file.write_bytes(content[:-3])
    else:
        content[len(content) // 2] ^= 255
        file.write_bytes(content)
    assert find_damage(path) is not None
    assert saver.newest() is None


def test_other_model_is_refused(tmp_path: Path) -> None:
    model, _ = stepped(0)
    path = Checkpointer(tmp_path, SINGLE_PROCESS).save(1, model_state(model))
    with pytest.raises(UserError, match="does not fit the model"):
        load_model(nn.Linear(4, 7), Checkpoint.read(path))
    other = Tied()
    other.norm = nn.BatchNorm1d(5)
    with pytest.raises(UserError, match="shape"):
        load_model(other, Checkpoint.read(path))
