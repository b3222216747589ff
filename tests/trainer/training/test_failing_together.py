"""Tests of a failing process: every machine reports why, and no other process waits until the timeout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import scantling as sc
from scantling.errors import RunError, UserError
from scantling.trainer.data import prepare
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.training import run as training
from tests import processes
from tests.runs import on_machines, tiny_recipe, write_recipe
from tests.trainer.training.test_separate_folders import explain, machines

pytestmark = pytest.mark.dist

FAST_S = 60.0
"""Time limit, much shorter than any timeout of a run."""
HOST = os.uname().nodename


def write(folder: Path) -> Path:
    return write_recipe(folder / "recipe.yaml", tiny_recipe(folder, train={"steps": 2, "batch_size": 8}))


def no_recipe_on_the_second(folders: list[Path]) -> str:
    write(folders[0])
    return "recipe.yaml"


def invalid_recipe_on_the_first(folders: list[Path]) -> str:
    write(folders[1])
    write_recipe(folders[0] / "recipe.yaml", {"nonsense": 1})
    return "nonsense"


def different_recipes(folders: list[Path]) -> str:
    for number, folder in enumerate(folders):
        recipe = tiny_recipe(folder, train={"steps": 2, "batch_size": 8}, optim={"lr": 0.001 * (number + 1)})
        write_recipe(folder / "recipe.yaml", recipe)
    return "the recipe differs from that of rank 0"


def no_data_on_the_second(folders: list[Path]) -> str:
    for folder in folders:
        write(folder)
    (folders[1] / "corpus.txt").unlink()
    return "corpus.txt"


def no_data_on_the_first(folders: list[Path]) -> str:
    return no_data_on_the_second(folders[::-1])


def other_data_on_the_second(folders: list[Path]) -> str:
    for folder in folders:
        write(folder)
    corpus = folders[1] / "corpus.txt"
    corpus.write_text(corpus.read_text().replace("fox", "dog"))
    return "the data differs from that of rank 0"


Case = Callable[[list[Path]], str]


@pytest.mark.parametrize(
    "case",
    [
        no_recipe_on_the_second,
        invalid_recipe_on_the_first,
        different_recipes,
        no_data_on_the_first,
        no_data_on_the_second,
        other_data_on_the_second,
    ],
)
def test_error_on_one_machine_is_reported_on_both(tmp_path: Path, case: Case) -> None:
    check_error_on_one_machine(tmp_path, case)


def _slow_last_rank() -> None:
    if os.environ["RANK"] == "3":
        find_source = prepare.training_source

        def find_later(section: DataSection) -> Any:
            time.sleep(3.0)
            return find_source(section)

        prepare.training_source = find_later


@pytest.mark.parametrize("case", [no_data_on_the_first, no_data_on_the_second])
def test_error_is_reported_once_if_a_rank_is_slow(tmp_path: Path, case: Case) -> None:
    """The slow rank still needs the store of rank 0, which learned of the error seconds before."""
    check_error_on_one_machine(tmp_path, case, _slow_last_rank)


def check_error_on_one_machine(tmp_path: Path, case: Case, before: Callable[[], None] | None = None) -> None:
    folders = machines(tmp_path)
    message = case(folders)
    ended = on_machines(folders, "train", "recipe.yaml", processes=2, before=before, timeout=FAST_S)
    assert [each.code for each in ended] == [2] * 4, explain(ended)
    for first in (ended[0], ended[2]):
        assert first.err.count("scantling: error") == 1, explain(ended)
        assert message in first.err, explain(ended)
    is_first = case in (invalid_recipe_on_the_first, no_data_on_the_first)
    away, ranks = (ended[2], "[01]") if is_first else (ended[0], "[23]")
    assert re.search(rf"rank {ranks} on {HOST}", away.err), explain(ended)
    assert not ended[1].err + ended[3].err, explain(ended)


def test_common_error_is_reported_once_on_every_machine(tmp_path: Path) -> None:
    ended = on_machines(machines(tmp_path), "train", "nosuch.yaml", processes=2, timeout=FAST_S)
    assert [each.code for each in ended] == [2] * 4, explain(ended)
    assert ["nosuch.yaml" in each.err for each in ended] == [True, False, True, False], explain(ended)


def _fail_on_rank_1(error: type[Exception]) -> None:
    build = training.build_loop

    def fail(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise error("no room for the model")
        return build(*args, **kwargs)

    training.build_loop = fail


def _user_error() -> None:
    _fail_on_rank_1(UserError)


def _run_error() -> None:
    _fail_on_rank_1(RunError)


def _any_error() -> None:
    _fail_on_rank_1(ZeroDivisionError)


@pytest.mark.parametrize(
    ("before", "code", "count"), [(_user_error, 2, 2), (_run_error, 1, 1), (_any_error, 1, 1), (_any_error, 1, 2)]
)
def test_failure_to_build_the_model_on_one_rank(
    tmp_path: Path, before: Callable[[], None], code: int, count: int
) -> None:
    """With one machine, rank 1 is not its first process, and the first process reports the error."""
    recipe, folders = write(tmp_path), machines(tmp_path, count)
    ended = on_machines(folders, "train", recipe, processes=2 // count, before=before, timeout=FAST_S)
    assert [each.code for each in ended] == [code, code], explain(ended)
    assert re.search(rf"rank 1 on {HOST} ended: .*no room for the model", ended[0].err), explain(ended)
    if count == 2:
        assert "no room for the model" in ended[1].err


def _train_in_own_group(recipes: list[dict[str, Any]], folder: Path) -> None:
    """Train twice; the second call shows that an error handled by a script does not end the next run."""
    rank = dist.get_rank()
    with pytest.raises(UserError, match="nonsense"):
        sc.train(recipes[rank], run_dir=folder / "failed")
    assert sc.train(recipes[0], run_dir=folder / "run").step == 2


def test_script_with_its_own_process_group(tmp_path: Path) -> None:
    good = tiny_recipe(tmp_path, train={"steps": 2, "batch_size": 8})
    processes.run(2, _train_in_own_group, [good, {**good, "nonsense": 1}], tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "nosuch"),
        ("export", "nosuch", "--to", "hf", "out"),
        ("compare", "a", "b"),
        ("doctor", "--device", "tpu"),
        ("train", "--nonsense"),
        ("plan", "nosuch.yaml"),
    ],
)
def test_other_commands_report_on_every_machine(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ended = on_machines(machines(tmp_path), *arguments, timeout=FAST_S)
    assert [each.code for each in ended] == [2, 2], explain(ended)
    assert all(each.err.strip() for each in ended), explain(ended)


def _without_local_rank() -> None:
    del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


def test_without_a_local_rank_every_process_reports(tmp_path: Path) -> None:
    ended = on_machines(machines(tmp_path), "train", "nosuch.yaml", before=_without_local_rank, timeout=FAST_S)
    assert [each.code for each in ended] == [2, 2], explain(ended)
    assert all("nosuch.yaml" in each.err for each in ended), explain(ended)


def test_second_machine_alone_reports_at_once() -> None:
    names = ("MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "scantling", "train", "nosuch.yaml"],
        env={**env, "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=FAST_S,
    )
    assert done.returncode == 2
    assert "nosuch.yaml" in done.stderr
    assert time.monotonic() - began < FAST_S / 2
