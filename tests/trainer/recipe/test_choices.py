"""Tests that the recipe schema's choices equal those of the parts."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import BaseModel

from scantling.comm import config
from scantling.distributed.context import DEVICES
from scantling.tensor import options as tensor_options
from scantling.tensor import replace
from scantling.trainer.recipe import schema
from scantling.trainer.tasks import TASKS


@pytest.mark.parametrize(
    ("section", "key", "choices"),
    [
        (schema.TensorSection, "format", tensor_options.Format),
        (schema.TensorSection, "init", replace.Init),
        (schema.TensorSection, "unit", tensor_options.Unit),
    ],
)
def test_recipe_accepts_the_options_of_each_method(section: type[BaseModel], key: str, choices: Any) -> None:
    assert get_args(section.model_fields[key].annotation) == get_args(choices)


def test_comm_section_has_every_option_of_the_exchange() -> None:
    fields = schema.CommSection.model_fields
    chosen = dict.fromkeys(schema.BUDGET_OPTIONS, int | None)
    assert {name: fields[name].annotation for name in config.OPTIONS} == {**config.TYPES, **chosen}
    assert {name: fields[name].default for name in config.OPTIONS} == {
        name: option.default for name, option in config.OPTIONS.items()
    }


def test_task_and_device_names_match_the_schema() -> None:
    choices: Any = schema.ModelSection.model_fields["task"].annotation
    named = [name for part in get_args(choices) for name in get_args(part)]
    assert sorted(named) == sorted(TASKS) == sorted(schema.TASKS)
    assert sorted(get_args(schema.TrainSection.model_fields["device"].annotation)) == sorted(DEVICES)
