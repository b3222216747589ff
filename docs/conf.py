"""Sphinx settings, and two directives that write the recipe reference and the command reference from the code."""

from __future__ import annotations

import importlib.metadata
from typing import Any, ClassVar

import typer.main
from docutils import nodes
from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from scantling.cli.app import app as cli
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
smartquotes = False  # would turn the dashes of an option into one long dash
html_static_path = ["_static"]
html_css_files = ["tables.css"]

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


class Commands(SphinxDirective):
    """`{commands}`: all commands with their arguments and options, from the command line itself."""

    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        group: Any = typer.main.get_command(cli)
        sections: list[nodes.Node] = []
        for name, command in group.commands.items():
            section = nodes.section(ids=[name], names=[name])
            section += nodes.title(text=name)
            section += self.parse_text_to_nodes("\n".join(_command_lines(name, command)))
            self.state.document.note_implicit_target(section)
            sections.append(section)
        return sections


def _command_lines(name: str, command: Any) -> list[str]:
    """Return the Markdown of one command: its purpose, how to call it, its arguments and options."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = [f"scantling {name}", *(_placeholder(each) for each in arguments), *(["[OPTIONS]"] if options else [])]
    lines = [command.help, "", "```text", " ".join(usage), "```", ""]
    for each in arguments:
        lines += [f"`{_placeholder(each)}`", f": {each.help}", ""]
    for each in options:
        flag = "" if each.is_flag else f" {each.metavar or each.name.upper()}"
        value = each.default
        default = "" if each.is_flag or value is None or "Default:" in each.help else f" Default: `{value}`."
        lines += [f"`{', '.join(each.opts)}{flag}`", f": {each.help}{' Required.' if each.required else default}", ""]
    return lines


def _placeholder(argument: Any) -> str:
    return (argument.metavar or argument.name.upper()) + ("..." if argument.nargs == -1 else "")


def setup(app: Sphinx) -> None:
    app.add_directive("recipe-fields", RecipeFields)
    app.add_directive("commands", Commands)
