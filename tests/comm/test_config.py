"""Tests of the list of options: types, checks, docstrings and signatures."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest
from torch import nn

import scantling as sc
from scantling.comm.config import OPTIONS, TYPES, ExchangeOptions, make_config
from scantling.comm.layout import dense_crossover_mbit
from scantling.errors import UserError


def test_typed_options_equal_fields() -> None:
    assert get_type_hints(ExchangeOptions) == TYPES


@pytest.mark.parametrize("cls", [sc.MomentumExchange, sc.DeMo])
def test_options_are_in_signature_and_docstring(cls: type) -> None:
    parameters = inspect.signature(cls).parameters
    for name, option in OPTIONS.items():
        assert parameters[name].default == option.default
        assert f"        {name}: {option.metadata['doc']}" in (cls.__doc__ or "")


def test_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="'chnk' is not an option of the exchange; did you mean 'chunk'"):
        sc.MomentumExchange([nn.Linear(3, 3).weight], chnk=32)  # type: ignore[call-arg]


def test_paper_has_its_own_defaults() -> None:
    optimizer = sc.DeMo([nn.Linear(3, 3).weight], lr=1e-3, compat="paper")
    assert [optimizer.param_groups[0][key] for key in ("decay", "values")] == [0.999, "fp32"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decay": -0.1}, "decay must be from 0 to 1; given -0.1"),
        ({"chunk": 5000}, "chunk must be an integer from 1 to 4096; given 5000"),
        ({"topk": True}, "topk must be an integer of at least 1; given True"),
        ({"overlap": 1}, "overlap must be True or False; given 1"),
    ],
)
def test_make_config_refuses_bad_values(options: dict[str, object], text: str) -> None:
    with pytest.raises(UserError) as error:
        make_config(options)
    assert text in str(error.value)


def test_dense_is_faster_only_on_fast_links() -> None:
    assert dense_crossover_mbit(2) == pytest.approx(762, abs=1)
    assert dense_crossover_mbit(2) < dense_crossover_mbit(64) < 2 * dense_crossover_mbit(2)
