"""Sphinx settings. The recipe reference is made from the schema, by the directive below."""

from __future__ import annotations

import importlib.metadata
from typing import Any, ClassVar

from docutils import nodes
from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from scantling.trainer.recipe import schema

project = "Scantling"
author = "The Scantling developers"
copyright = author
release = importlib.metadata.version("scantling")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "Scantling"
html_show_sourcelink = False

_TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "mapping",
}
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


class RecipeFields(SphinxDirective):
    """`{recipe-fields} TrainSection`: the keys of a section of the recipe, from the schema itself."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        section: type[BaseModel] = getattr(schema, self.arguments[0])
        content = section.model_json_schema()
        required = content.get("required", [])
        lines = []
        for name, field in content["properties"].items():
            state = "required" if name in required else _default(field.get("default"))
            lines += [f"`{name}` · {_type(field)}" + (f" · {state}" if state else ""), f": {field['description']}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


def _default(value: object) -> str:
    if value is None or value == {}:
        return ""
    return f"default `{str(value).lower() if isinstance(value, bool) else value}`"


def _type(field: dict[str, Any]) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{choice}`" for choice in field["enum"])
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(choice) for choice in field["anyOf"] if choice.get("type") != "null"))
    if "$ref" in field:
        return "`{bpe: SIZE}`" if field["$ref"].endswith("BpeTokenizer") else "mapping"
    if field.get("type") == "array":
        return "list of " + {"text": "texts"}.get(_type(field["items"]), _type(field["items"]))
    limits = [f"{words} {field[key]:,}" for key, words in _LIMITS.items() if key in field]
    return ", ".join([_TYPES[field["type"]], *limits])


def setup(app: Sphinx) -> None:
    app.add_directive("recipe-fields", RecipeFields)
