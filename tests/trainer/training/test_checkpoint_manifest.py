"""Tests of a checkpoint's manifest and index: damage and edits are found, hostile content is refused with a message."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scantling.errors import UserError
from scantling.trainer.training import checkpoint_index, checkpoint_manifest
from scantling.trainer.training.checkpoint import Checkpointer, State, load_tensors
from scantling.trainer.training.checkpoint_index import INDEX, METADATA
from scantling.trainer.training.checkpoint_manifest import MANIFEST, file_digest, read_manifest, write_manifest
from scantling.trainer.training.checkpoint_state import merge_states, rng_state
from tests.damage import find_damage
from tests.trainer.training.test_checkpoint import SINGLE_PROCESS, newest_path

Content = dict[str, Any]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    values = {"step": 4, "tokens": 32, "data": {"seed": 0, "epoch": 0, "index": 16}, "scaler": {}, "joules": None}
    group = {"names": ["x"], "hyper": {"lr": 0.002, "initial_lr": 0.003, "betas": (0.9, 0.95), "limit": float("inf")}}
    values["optimizer"] = {"plain": {"x": {"step": 4}}, "on_cpu": [], "groups": [group]}
    values["exchange"] = {"0": {}}
    state = State({"model/x": torch.arange(100.0), "optimizer/x/m": torch.ones(3, 5, dtype=torch.bfloat16)}, values)
    return Checkpointer(tmp_path / "checkpoints", SINGLE_PROCESS).save(
        4, merge_states(state, rng_state(SINGLE_PROCESS))
    )


def rewrite(path: Path, change: Callable[[Content], object]) -> None:
    """Change the content of a manifest and recompute its checksum."""
    content = json.loads((path / MANIFEST).read_text())
    del content["checksum"]
    change(content)
    content["checksum"] = checkpoint_manifest._checksum(content)
    (path / MANIFEST).write_text(json.dumps(content))


def test_complete_checkpoint_has_no_damage(checkpoint: Path) -> None:
    assert find_damage(checkpoint) is None
    assert read_manifest(checkpoint)["values"]["optimizer"]["groups"][0]["hyper"]["limit"] == float("inf")
    rewrite(checkpoint, lambda content: None)
    assert find_damage(checkpoint) is None, "the helper of these tests must not break a valid manifest"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"initial_lr": 0.003', '"initial_lr": 0.007'),
        ('"index": 16', '"index": 8'),
        ('"step": 4, "world', '"step": 2, "world'),
        ('"tokens": 32', '"tokens": 33'),
        ('"world_size": 1', '"world_size": 2'),
        ('"tokens": 32', '"tokens": 31, "tokens": 32'),
    ],
)
def test_manifest_edited_by_hand_is_damaged(checkpoint: Path, old: str, new: str) -> None:
    text = (checkpoint / MANIFEST).read_text()
    assert old in text
    (checkpoint / MANIFEST).write_text(text.replace(old, new))
    assert find_damage(checkpoint) is not None
    with pytest.raises(UserError, match=MANIFEST):
        read_manifest(checkpoint)


def test_emptied_list_of_files_does_not_hide_a_flipped_byte(checkpoint: Path) -> None:
    data = next(checkpoint.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    for files in ({}, {METADATA: file_digest(checkpoint / METADATA)}):
        rewrite(checkpoint, lambda found, files=files: found.update(files=files))
        assert find_damage(checkpoint) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "3",
        "{}",
        '{"format":1,"files":{}}',
        '{"format":3,"files":{}}',
        '{"format":true}',
        '{"format":[' + "[" * 50_000,
        "[" * 100_000 + "]" * 100_000,
        '{"format": ' + "9" * 10_000 + "}",
        '{"format": NaN}',
        '\ufeff{"format": 3}',
        '{"format": 3, "checksum": "\\ud800"}',
    ],
    ids=lambda text: text[:16],
)
def test_any_json_as_manifest_is_damaged(checkpoint: Path, text: str) -> None:
    (checkpoint / MANIFEST).write_text(text)
    assert find_damage(checkpoint) is not None
    with pytest.raises(UserError):
        read_manifest(checkpoint)


@pytest.mark.parametrize("name", [MANIFEST, INDEX])
def test_unusual_manifest_file_is_damaged(checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = checkpoint / name
    file.write_bytes(b"\xff\xfe{")
    assert find_damage(checkpoint) is not None
    file.unlink()
    os.mkfifo(file)  # reading it would wait for a writer
    assert find_damage(checkpoint) is not None
    file.unlink()
    file.mkdir()
    assert find_damage(checkpoint) is not None
    file.rmdir()
    file.symlink_to(file)
    assert find_damage(checkpoint) is not None
    file.unlink()
    monkeypatch.setattr({MANIFEST: checkpoint_manifest, INDEX: checkpoint_index}[name], "MAX_BYTES", 10)
    file.write_text(" " * 11)
    with pytest.raises(UserError, match="11 bytes"):
        {MANIFEST: read_manifest, INDEX: checkpoint_index.read_index}[name](checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(files={}),
        lambda content: content.update(files=[]),
        lambda content: content["files"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}),
        lambda content: content["files"].update({"other.distcp": {"bytes": 1, "sha256": "0" * 64}}),
        lambda content: content["files"][METADATA].update(bytes=-1),
        lambda content: content["files"][METADATA].update(sha256=None),
        lambda content: content.update(step=-1),
        lambda content: content.update(step=True),
        lambda content: content.update(step="4"),
        lambda content: content.update(world_size=0),
        lambda content: content.update(more=1),
        lambda content: content.update(values=None),
        lambda content: content["values"].update(step=3),
        lambda content: content["values"].update(more=3),
        lambda content: content["values"].pop("tokens"),
        lambda content: content["values"].pop("optimizer"),
        lambda content: content["values"].pop("rng"),
        lambda content: content["values"].update(rng={}),
        lambda content: content["values"].update(optimizer=None),
        lambda content: content["values"].update(data={}),
        lambda content: content["values"].update(data={"index": -1}),
        lambda content: content["values"].update(tokens=1e400),
        lambda content: content["values"].update(joules=float("nan")),
        lambda content: content["values"].update(optimizer={"plain": {}, "on_cpu": []}),
        lambda content: content["values"]["optimizer"].update(groups=[{"names": [1], "hyper": {}}]),
        lambda content: content["values"].update(exchange={"1": {}}),
        lambda content: content["values"].update(rng={"0": {"python": [], "numpy": []}}),
        lambda content: content.pop("versions"),
    ],
)
def test_fields_of_a_manifest_with_valid_checksum_are_checked(
    checkpoint: Path, change: Callable[[Content], object]
) -> None:
    rewrite(checkpoint, change)
    assert find_damage(checkpoint) is not None


def test_checkpoint_under_the_name_of_another_step_is_damaged(checkpoint: Path) -> None:
    shutil.copytree(checkpoint, checkpoint.with_name("step-9"))
    assert find_damage(checkpoint.with_name("step-9")) == "its manifest is that of step 4"
    assert newest_path(Checkpointer(checkpoint.parent, SINGLE_PROCESS)) == checkpoint


def test_manifest_of_another_checkpoint_is_damaged(checkpoint: Path) -> None:
    other = Checkpointer(checkpoint.parent / "other", SINGLE_PROCESS).save(4, State({"model/x": torch.zeros(100)}))
    shutil.copy(other / MANIFEST, checkpoint / MANIFEST)
    assert find_damage(checkpoint) is not None


def test_unlisted_files_are_ignored(checkpoint: Path) -> None:
    before = load_tensors(checkpoint)
    (checkpoint / "__7_0.distcp").write_bytes(b"not ours")
    (checkpoint / "notes.txt").write_text("mine")
    assert find_damage(checkpoint) is None
    assert all(torch.equal(tensor, before[key]) for key, tensor in load_tensors(checkpoint).items())


def test_state_that_is_no_json_is_refused_at_once(checkpoint: Path) -> None:
    content = read_manifest(checkpoint)
    del content["format"], content["checksum"]
    with pytest.raises(RuntimeError, match=r"values\.tokens"):
        write_manifest(checkpoint, {**content, "values": {"tokens": -1}})


def damaged(content: bytes, source: random.Random) -> bytes:
    """Return content with a few bytes flipped, truncated, duplicated or randomized."""
    position = source.randrange(max(1, len(content)))
    kind = source.randrange(5)
    if kind == 0:
        return content[:position]
    if kind == 1:
        return content + content[position : position + 8]
    if kind == 2:
        return content[:position] + content[position + source.randrange(1, 9) :]
    changed = bytearray(content)
    for _ in range(source.choice([1, 1, 4])):
        context = source.randrange(len(content))
        changed[context] = changed[context] ^ (1 << source.randrange(8)) if kind == 3 else source.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("name", [MANIFEST, INDEX, METADATA, "__0_0.distcp"])
def test_random_damage_is_detected_or_harmless(checkpoint: Path, name: str) -> None:
    source, file = random.Random(name), checkpoint / name
    content, values, tensors = file.read_bytes(), read_manifest(checkpoint)["values"], load_tensors(checkpoint)
    found = 0
    for _ in range(60):
        file.write_bytes(damaged(content, source))
        if find_damage(checkpoint) is not None:
            found += 1
            continue
        assert json.dumps(read_manifest(checkpoint)["values"]) == json.dumps(values)
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in load_tensors(checkpoint).items())
    assert found > 50


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


HOSTILE = [
    # BUILD with a dictionary and with a pair, on a class instead of an instance
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n(NS'__init__'\nNstb.",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(S'__setattr__'\nNdtb.",
    b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n(N(S'__setstate__'\nNdtb.",
    b"\x80\x04\x8c\x08builtins\x8c\x0cobject.\x5f_doc\x93.",
    b"\x80\x04r\xff\xff\xff\x7f.",
    b"(" * 100_000 + b"t" * 100_000 + b".",
]


def test_pickled_index_is_never_read(checkpoint: Path, tmp_path: Path) -> None:
    before = load_tensors(checkpoint)
    for content in [*HOSTILE, pickle.dumps(Touch(tmp_path / "harmed"))]:
        (checkpoint / METADATA).write_bytes(content)
        assert find_damage(checkpoint) is not None
        rewrite(checkpoint, lambda found: found["files"].update({METADATA: file_digest(checkpoint / METADATA)}))
        assert find_damage(checkpoint) is None
        assert all(torch.equal(tensor, before[key]) for key, tensor in load_tensors(checkpoint).items())
    assert not (tmp_path / "harmed").exists()
    for name in ("torch.distributed.checkpoint.metadata.Metadata", "os.system"):
        assert name not in Path(checkpoint_index.__file__).read_text()


def test_pickle_among_the_tensors_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """`torch.load` reads weights only; here a chunk contains a pickle that would run a command."""
    content = json.loads((checkpoint / INDEX).read_text())
    chunk = content["tensors"]["model/x"]["chunks"][0]
    torch.save(Touch(tmp_path / "harmed"), tmp_path / "hostile")
    hostile = (tmp_path / "hostile").read_bytes()
    chunk.update(file="__9_0.distcp", offset=0, length=len(hostile))
    (checkpoint / "__9_0.distcp").write_bytes(hostile)
    (checkpoint / INDEX).write_text(json.dumps(content))
    with pytest.raises(UserError, match="cannot be read"):
        load_tensors(checkpoint)
    assert not (tmp_path / "harmed").exists()


def set_chunks(tensor: Content, *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Give a tensor of 100 elements chunks at offsets and of sizes, all of which lie in its file."""
    (whole,) = tensor["chunks"]
    dims = len(chunks[0][0])
    made = [{**whole, "offsets": list(offsets), "sizes": list(sizes)} for offsets, sizes in chunks]
    tensor.update(size=[100] if dims == 1 else [10, 10], chunks=made)


@pytest.mark.parametrize(
    "chunks",
    [
        [((0,), (40,)), ((60,), (40,)), ((40,), (20,)), ((100,), (0,))],
        [((0, 0), (6, 3)), ((0, 3), (6, 7)), ((6, 0), (4, 3)), ((6, 3), (4, 7)), ((10, 0), (0, 3))],
        [((0, 4), (10, 6)), ((0, 0), (10, 4))],
    ],
)
def test_index_of_a_grid_of_chunks_is_read(checkpoint: Path, chunks: list[Any]) -> None:
    content = json.loads((checkpoint / INDEX).read_text())
    set_chunks(content["tensors"]["model/x"], *chunks)
    (checkpoint / INDEX).write_text(json.dumps(content))
    found = checkpoint_index.read_index(checkpoint).metadata.state_dict_metadata["model/x"]
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks] == chunks


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.update(dtype="save"),
        lambda tensor: tensor.update(dtype="float32.__class__"),
        lambda tensor: tensor.update(size=[2**52]),
        lambda tensor: tensor.update(size=[2**52], chunks=[{**tensor["chunks"][0], "sizes": [2**52]}]),
        lambda tensor: tensor.update(size=[-1]),
        lambda tensor: tensor.update(size=[10, 10]),
        lambda tensor: tensor.update(size=[1.5]),
        lambda tensor: tensor.update(chunks=[]),
        lambda tensor: tensor.update(chunks=tensor["chunks"] * 2),
        lambda tensor: tensor["chunks"][0].update(file="../../../etc/passwd"),
        lambda tensor: tensor["chunks"][0].update(file="__3_0.distcp"),
        lambda tensor: tensor["chunks"][0].update(file=MANIFEST),
        lambda tensor: tensor["chunks"][0].update(offset=10**9),
        lambda tensor: tensor["chunks"][0].update(offset=-1),
        lambda tensor: tensor["chunks"][0].update(length=10**9),
        lambda tensor: tensor["chunks"][0].update(length=4),
        lambda tensor: tensor["chunks"][0].update(offsets=[1]),
        lambda tensor: tensor["chunks"][0].update(more=1),
        lambda tensor: tensor.update(__class__="x"),
        lambda tensor: set_chunks(tensor, ((0,), (60,)), ((40,), (40,))),
        lambda tensor: set_chunks(tensor, ((0, 0), (10, 6)), ((0, 4), (10, 4))),
        lambda tensor: set_chunks(tensor, ((0, 0), (6, 5)), ((4, 0), (6, 5)), ((0, 5), (5, 4)), ((5, 5), (5, 4))),
    ],
)
def test_invalid_index_is_refused(checkpoint: Path, change: Callable[[Content], object]) -> None:
    content = json.loads((checkpoint / INDEX).read_text())
    change(content["tensors"]["model/x"])
    (checkpoint / INDEX).write_text(json.dumps(content))
    rewrite(checkpoint, lambda found: found["files"].update({INDEX: file_digest(checkpoint / INDEX)}))
    assert find_damage(checkpoint) is not None
    with pytest.raises(UserError, match="cannot be read"):
        load_tensors(checkpoint)


@pytest.mark.parametrize("text", ["", "[]", '{"tensors": 3}', '{"tensors": {"a": ' + "[" * 50_000])
def test_any_json_as_index_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / INDEX).write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        load_tensors(checkpoint)


def test_expanded_and_empty_tensors_round_trip(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1).expand(1000), "b": torch.zeros(0, 3), "c": torch.tensor(3.5), "d": torch.ones(4, 6).T}
    path = Checkpointer(tmp_path, SINGLE_PROCESS).save(1, State(tensors))
    assert find_damage(path) is None
    assert all(torch.equal(found, tensors[key]) for key, found in load_tensors(path).items())
