"""Tests that README, docs, Makefile and CI describe the project correctly."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scantling.trainer.models.presets import PRESETS
from scantling.trainer.recipe import check_recipe, load_recipe, read_yaml
from scantling.trainer.recipe.loading import is_sweep
from scantling.trainer.recipe.schema import (
    CommSection,
    DataSection,
    ModelSection,
    OptimSection,
    PrecisionSection,
    TensorSection,
    TrainSection,
)
from scantling.trainer.sweeping.grid import expand_sweep
from scantling.trainer.sweeping.schema import Sweep, load_sweep

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of one language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def code(page: Path) -> list[str]:
    """Return every line of code on a page, from blocks and from inline code."""
    text = page.read_text()
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", text)]
    return [line for block in fenced for line in block.splitlines()] + spans


PYTHON = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]
NEEDS_A_RUN = ("sc.train(", "from_pretrained(")
README = ROOT / "README.md"
QUICK = [
    (page, number)
    for page, number in PYTHON
    if page != README and not any(word in blocks(page, "python")[number] for word in NEEDS_A_RUN)
]
ARCHITECTURE = ROOT / "docs" / "design" / "architecture.md"
MOST_FILES = {"One training step": 8, "One CAME step": 6, "One exchange": 8, "One TT layer, forward and backward": 8}
"""How many files a reader may have to open to follow one step."""


def table_cells(page: Path) -> list[str]:
    """Return all cells of the tables on a page, without those of code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [cell.strip() for line in text.splitlines() if line.startswith("|") for cell in line.split("|")[1:-1]]


def test_pages_name_existing_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {
        match[1]
        for page in [*PAGES, ROOT / ".ci" / "run"]
        for line in code(page)
        if (match := re.match(r"make ([a-z-]+)", line))
    }
    assert {"demo", "test", "setup"} <= named
    assert named <= targets


def test_make_help_lists_every_target() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert phony
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert re.findall(r"^  make ([a-z-]+) +\S", done.stdout, flags=re.MULTILINE) == phony[1].split()


def command_line() -> dict[str, Any]:
    """Return the commands of the command line by name."""
    import typer.main

    from scantling.cli.app import app

    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_pages_name_existing_commands_and_options() -> None:
    commands = command_line()
    seen = set()
    for page in PAGES:
        for line in code(page):
            for command, rest in re.findall(r"(?<!import )\bscantling ([a-z]+)([^#|]*)", line):
                assert command in commands, f"{page.name}: {line}"
                known = {option for parameter in commands[command].params for option in parameter.opts}
                assert set(re.findall(r"--[a-z-]+", rest)) <= known, f"{page.name}: {line}"
                seen.add(command)
    assert seen == set(commands)


def test_ci_runs_the_makefile() -> None:
    """The same commands everywhere, with pytest last, so that its summary is the last output."""
    script = (ROOT / ".ci" / "run").read_text()
    assert script.splitlines()[-1] == "make test"
    assert "set -euo pipefail" in script
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = {step.split()[1] for step in steps if step.startswith("make ")}
    assert targets == {"lint", "test-unit", "test-dist", "docs"}
    recipe = re.search(r"^test: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert recipe
    assert "$(TEST)" in recipe[1].splitlines()[-1]


@pytest.mark.parametrize("path", [".ci/run", "scripts/setup.sh", "scripts/constraints.sh"])
def test_scripts_are_whole(path: str) -> None:
    shell = (ROOT / path).read_text().splitlines()[0].split("/")[-1].split()[-1]
    subprocess.run([shell, "-n", ROOT / path], check=True)
    assert (ROOT / path).stat().st_mode & 0o111


def test_constraints_pin_what_the_tests_need() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert "+" not in "".join(pins.values()), "a local tag names one build"
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in project["dependencies"] + extras["test"]]
    for requirement in wanted:
        if requirement.name == "scantling":
            wanted += [Requirement(text) for extra in requirement.extras for text in extras[extra]]
            continue
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.y*ml")), ids=lambda path: path.stem)
def test_every_recipe_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a sweep names its base recipe relative to this folder
    if is_sweep(read_yaml(path)):
        sweep, base = load_sweep(path)
        assert sweep.name == path.stem
        assert len(expand_sweep(sweep, base, str(path))) > 1
    else:
        assert load_recipe(path).name == path.stem


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_recipes_on_the_pages_are_valid(page: Path) -> None:
    for text in blocks(page, "yaml"):
        content = yaml.safe_load(text)
        if is_sweep(content):
            base = {"model": {"preset": "llama-1m"}, "data": {"corpus": "python-stdlib"}, "train": {"batch_size": 1}}
            assert expand_sweep(Sweep.model_validate(content), base, page.name)
        else:
            assert check_recipe(content, page.name).train.steps >= 1


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(("page", "number"), QUICK, ids=lambda value: getattr(value, "stem", str(value)))
def test_python_on_the_pages_runs(page: Path, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)  # files that an example writes must not end up in the repository
    text = blocks(page, "python")[number]
    if "import torchft" in text:
        pytest.importorskip("torchft")
    exec(compile(text, page.name, "exec"), {"__name__": "example"})


def test_readme_shows_each_method_in_four_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each example with the names that the README introduces."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import scantling as sc

    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    examples = blocks(README, "python")
    assert len(examples) == 5  # optimizer, parameters, network, bits, planning
    for example in examples:
        assert len(example.splitlines()) == 4
        model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=320))
        scope = {"sc": sc, "model": model, "ids": torch.randint(320, (2, 16))}
        exec(compile(example, "README.md", "exec"), scope)


def test_readme_fits_one_screen() -> None:
    text = README.read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) <= 2 + 8  # a head, a rule and eight rows
    assert len(text.splitlines()) <= 110


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_table_cell_holds_a_paragraph(page: Path) -> None:
    words = {cell: len(re.sub(r"\]\([^)]*\)", "]", cell).split()) for cell in table_cells(page)}
    assert [cell for cell, number in words.items() if number > 25] == []


def test_figures_are_up_to_date() -> None:
    """`make figures` gives the committed files: charts from raw results, the packages from the imports."""
    from scripts.figures.__main__ import FOLDER, all_figures

    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(all_figures())
    for name, text in all_figures().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"docs/figures/{name}: run make figures"


@pytest.mark.parametrize("section", MOST_FILES)
def test_architecture_walks_one_step_through_few_files(section: str) -> None:
    text = ARCHITECTURE.read_text()
    start = text.index(f"## {section}\n")
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`", text[start:].split("\n## ")[0], flags=re.MULTILINE)
    assert 0 < len(steps) <= MOST_FILES[section]


@pytest.mark.parametrize("page", sorted(ARCHITECTURE.parent.glob("*.md")), ids=lambda page: page.stem)
def test_design_pages_name_existing_files(page: Path) -> None:
    source = ROOT / "src" / "scantling"
    named = re.findall(r"`([\w/]+\.py)`", page.read_text())
    packages = re.findall(r"^\| `([\w/]+)`", page.read_text(), flags=re.MULTILINE)
    assert [name for name in [*named, *packages] if not (source / name).exists() and not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_the_run_in_the_first_run_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "get-started" / "first-run.md"
    example = next(text for text in blocks(page, "python") if "sc.train(" in text)
    scope: dict[str, object] = {"__name__": "example"}
    exec(compile(example, page.name, "exec"), scope)
    assert (tmp_path / "runs" / "demo-lean" / "report.html").is_file()


def test_the_recipe_reference_names_every_preset() -> None:
    page = (ROOT / "docs" / "reference" / "recipe.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([\w-]+) \|$", page, flags=re.MULTILINE)
    assert rows == [(name, preset.task) for name, preset in PRESETS.items()]


@pytest.fixture(scope="module")
def built_docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the documentation; a warning is an error."""
    pytest.importorskip("sphinx", reason="Sphinx is not installed (pip install 'scantling[docs]')")
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", folder / "trees"]
    done = subprocess.run(
        [*command, ROOT / "docs", folder / "html"], capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_python_reference_has_the_main_names(built_docs: Path) -> None:
    reference = (built_docs / "reference" / "api.html").read_text()
    assert all(f'id="scantling.{name}"' in reference for name in ("train", "plan", "CAME", "param_groups"))


def test_recipe_reference_is_made_from_the_schema(built_docs: Path) -> None:
    recipe = (built_docs / "reference" / "recipe.html").read_text()
    sections = (ModelSection, DataSection, OptimSection, TensorSection, CommSection, PrecisionSection, TrainSection)
    names = {name for section in sections for name in section.model_fields}
    assert [name for name in names if name not in recipe] == []


def test_command_reference_has_every_option(built_docs: Path) -> None:
    page = (built_docs / "reference" / "cli.html").read_text()
    for name, command in command_line().items():
        assert f'id="{name}"' in page
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        assert [option for option in options if option not in page] == [], name


def test_no_page_is_wider_than_a_phone(built_docs: Path, tmp_path: Path) -> None:
    """Wide tables and code scroll in their own boxes."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(names)} is installed")
    pages = [page.as_uri() for page in sorted(built_docs.glob("*/*.html")) if page.parent.name[0] != "_"]
    frame = tmp_path / "phone.html"
    frame.write_text(
        f"""<body><script>(async () => {{
            for (const page of {json.dumps(pages)}) {{
                const frame = document.createElement("iframe");
                frame.style = "width: 390px; height: 800px; border: 0";
                frame.src = page;
                document.body.append(frame);
                await new Promise(done => frame.onload = done);
                const width = frame.contentDocument.documentElement.scrollWidth;
                frame.replaceWith(`${{page}} is ${{width}} pixels wide; `);
            }}
        }})()</script>"""
    )
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --allow-file-access-from-files --dump-dom"
    command = [browser, *flags.split(), "--virtual-time-budget=60000", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, frame.as_uri()], capture_output=True, text=True, timeout=200, check=True)
    widths = dict(re.findall(r"(file://\S+) is (\d+) pixels wide; ", done.stdout))
    assert sorted(widths) == pages
    assert {page: width for page, width in widths.items() if int(width) > 390} == {}
