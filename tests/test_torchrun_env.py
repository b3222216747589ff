"""Tests of the environment that torchrun sets for its processes."""

from __future__ import annotations

import pytest

from scantling.errors import UserError
from scantling.torchrun_env import local_rank_from_env, rank_from_env, require_single_process, world_size_from_env


@pytest.mark.parametrize("given", [None, "", "3"])
def test_ranks_and_sizes_from_the_environment(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    found = world_size_from_env(), rank_from_env(), local_rank_from_env()
    assert found == ((3, 3, 3) if given else (1, 0, 0))
    if not given:
        require_single_process("export")
        return
    with pytest.raises(UserError, match="export runs in one process; torchrun started 3"):
        require_single_process("export")


def test_non_numeric_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UserError, match="RANK must be a number, as torchrun sets it; given 'first'"):
        rank_from_env()
