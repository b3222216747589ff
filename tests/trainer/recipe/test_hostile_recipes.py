"""Tests of hostile recipes: any text is read or refused, within limits of time and memory."""

from __future__ import annotations

import contextlib
import random
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scantling.cli import run
from scantling.errors import RecipeError, UserError
from scantling.trainer.recipe import load_recipe
from scantling.trainer.recipe.parsing import MAX_BYTES
from scantling.trainer.sweeping.grid import expand_sweep
from scantling.trainer.sweeping.schema import load_sweep

RECIPES = sorted(path for path in (Path(__file__).parents[3] / "recipes").rglob("*.yaml"))
MINIMAL = "model: {preset: llama-1m}\ndata: {corpus: python-stdlib, seq_len: 64}\ntrain: {steps: 10, batch_size: 4}\n"


def aliases(first: str, each: Callable[[str], str]) -> str:
    """Return ten YAML values, each of which names the previous one ten times."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{level}: &a{level} {each(', '.join([f'*a{level - 1}'] * 10))}" for level in range(1, 10)]
    return "\n".join(lines)


TEXTS = {
    "brackets": "a: " + "[" * 5000 + "]" * 5000,
    "open brackets": "[" * 1_000_000,
    "braces": "{" * 100_000,
    "dashes": "- " * 400_000,
    "question marks": "? " * 400_000,
    "bool": "a: !!bool maybe",
    "timestamp": "a: !!timestamp foo",
    "date": "a: 2024-02-30",
    "time zone": "a: 9999-12-31T23:59:59-99:59",
    "no int": "a: !!int ''",
    "sign": "a: !!int '-'",
    "sexagesimal int": "a: !!int " + "1:" * 400_000 + "1",
    "sexagesimal float": "a: !!float " + "1:" * 400_000 + "1",
    "10^400": MINIMAL.replace("10,", "1" + "0" * 400 + ","),
    "10^399": MINIMAL.replace("10,", "1" + "0" * 399 + ","),
    "10^5000": MINIMAL.replace("10,", "1" + "0" * 5000 + ","),
    "hexadecimal": MINIMAL.replace("10,", "0x" + "f" * 5000 + ","),
    "65 bits": MINIMAL.replace("10,", "18446744073709551616,"),
    "long int": "a: " + "1" * 1_000_000,
    "long float": "a: " + "1" * 500_000 + "." + "1" * 400_000,
    "underscores": "a: " + "1_" * 500_000,
    "aliases of lists": aliases("[x]", "[{}]".format),
    "aliases of mappings": aliases("{x: 1}", lambda names: f"{{<<: [{names}]}}"),
    "aliases in a recipe": MINIMAL + aliases("[x]", "[{}]".format),
    "alias in itself": "&a [*a]",
    "alias in its own mapping": MINIMAL + "optim: &a {betas: *a}",
    "unknown alias": "a: *b",
    "one key twice": "{a: 1, a: 1}",
    "one number twice": "{1: a, 0x1: b}",
    "one key 100,000 times": "{" + "a: 1, " * 100_000 + "}",
    "60,000 keys": "{" + ", ".join(f"a{i}: 1" for i in range(60_000)) + "}",
    "20,000 unknown keys": MINIMAL + "\n".join(f"a{i}: 1" for i in range(20_000)),
    "20,000 unknown keys of a section": "train:\n" + "\n".join(f" a{i}: 1" for i in range(20_000)),
    "20,000 options": MINIMAL + "optim: {" + ", ".join(f"lrs{i}: 1" for i in range(20_000)) + "}",
    "10,000 columns": "data:\n clicks:\n  categorical: [" + ", ".join(f"a{i:05}" for i in range(10_000))
    + "]\n  table_size: {" + ", ".join(f"b{i:05}: 3" for i in range(10_000)) + "}",
    "list as key": "{[1]: 2}",
    "mapping as key": "? {a: 1}\n: 2",
    "long key": "? " + "a" * 900_000 + "\n: 1",
    "long anchor": "a: &" + "b" * 900_000 + " 1",
    "long tag": "a: !" + "b" * 900_000 + " 1",
    "long preset": MINIMAL.replace("llama-1m", "a" * 100_000),
    "NUL": "a: \0",
    "escaped NUL": MINIMAL.replace("corpus: python-stdlib", 'text: "a\\0b"'),
    "lone surrogate": MINIMAL + 'name: "\\ud800"',
    "lone surrogate in a key": MINIMAL + '"\\ud800": 1',
    "lone surrogate in a free value": MINIMAL.replace("llama-1m}", 'llama-1m, overrides: {a: "\\udfff"}}'),
    "set": "a: !!set {x, y}",
    "ordered map": "a: !!omap [x: 1]",
    "binary": "a: !!binary x",
    "python": "!!python/object/apply:os.system ['true']",
    "own tag": "a: !include b.yaml",
    "mapping as text": "a: !!str {b: c}",
    "text as mapping": "!!map a",
    "merged number": "a: {<<: 3}",
    "two documents": MINIMAL + "---\n" + MINIMAL,
    "version": "%YAML 9.9\n---\na: 1",
    "nothing": "",
    "a list": "- 1",
    "bracket in a key": MINIMAL + '"a[b": 1',
    "bracket as key": MINIMAL + '"[": 1',
    "label as a list": "data: {csv: a, clicks: {label: [1], categorical: [c]}}",
    "columns as mappings": MINIMAL.replace("corpus: python-stdlib", "csv: a, clicks: {numeric: [{k: a}, {k: b}]}"),
    "infinite steps": MINIMAL.replace("10,", ".inf,"),
    "infinite warmup": MINIMAL.replace("10,", "10, warmup: .inf,"),
    "nan as warmup": MINIMAL.replace("10,", "10, warmup: .nan,"),
}  # fmt: skip


@contextlib.contextmanager
def bounded(seconds: float, mebibytes: int) -> Iterator[None]:
    """Check how long a block takes and by how much the process grows."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    yield
    after, took = resource.getrusage(resource.RUSAGE_SELF), time.process_time() - began
    assert took < seconds
    assert after.ru_maxrss - before.ru_maxrss < mebibytes << 10


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_recipe_is_refused_in_seconds(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXTS[name], encoding="utf-8")
    with bounded(seconds=20, mebibytes=400):
        assert run(["train", str(path), "--run-dir", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"scantling: error: {path}")
    assert len(message) < 50_000
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError):
        load_sweep(path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (MINIMAL.encode("utf-16"), "not UTF-8"),
        (MINIMAL.encode("utf-16-le"), "not valid YAML"),  # NUL after each character
        (b"name: \xff\xfe", "not UTF-8"),
        (b"name: \xed\xa0\x80", "not UTF-8"),
        (b"#" * (MAX_BYTES + 1), "more than 1,048,576 bytes"),
    ],
)
def test_hostile_bytes_are_refused(raw: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=message):
        load_recipe(path)


def test_endless_file_is_refused() -> None:
    with pytest.raises(UserError, match="more than 1,048,576 bytes"):
        load_recipe("/dev/zero")


def test_byte_order_mark_and_merge_keys_are_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("\ufeff" + MINIMAL.replace("{steps: 10,", "{<<: &long {steps: 30, seed: 7}, steps: 20,"))
    train = load_recipe(path).train
    assert (train.steps, train.seed, train.batch_size) == (20, 7, 4)


@pytest.mark.parametrize("text", [text for text in TEXTS.values() if "\n" not in text and len(text) < 100_000])
def test_hostile_override_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    value = text.removeprefix("a: ")
    if value and not value.startswith(("2024", "*")):
        with pytest.raises(UserError):
            load_recipe(path, [f"train.steps={value}"])


@pytest.mark.parametrize("key", ["a." * 5000 + "a", "a" * 100_000, "train.steps." * 70 + "a", "\ud800", "name.\0"])
def test_hostile_key_of_an_override_is_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    assert run(["train", str(path), "--set", f"{key}=1", "--dry-run"]) == 2


def recursive() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(MINIMAL)
    found["model"]["overrides"] = found
    return found


def shared() -> dict[str, Any]:
    value: Any = ["x"]
    for _ in range(12):
        value = [value] * 10
    return {"model": {"overrides": {"a": value}}}


@pytest.mark.parametrize("content", [recursive(), shared(), {"train": {"steps": 10**5000}}])
def test_hostile_mapping_is_refused(content: dict[str, Any]) -> None:
    with bounded(seconds=5, mebibytes=100), pytest.raises(RecipeError):
        load_recipe(content)
    with bounded(seconds=5, mebibytes=100), pytest.raises(RecipeError):
        load_recipe(yaml.safe_load(MINIMAL), sections=content)


ODD = (
    None, True, -1, 0, 2**63, 2**64 - 1, 10**400, -(10**30), 1e308, 5e-324, float("nan"), float("inf"), "", " ",
    "x", "\0",
    "10", "1e400", "é" * 300, "a/" * 5000, "~nobody/x", "$HOME", "**", "[", "ü[", "*.txt", ".", "/", "int8",
    "int99", "tt",
    [], [[]], [None], [1, "a"], {}, {"": 1}, {"k": "a"}, {"a": {"b": []}}, {1: 2}, {None: 1}, {"a[b": 1}, {"int": 1},
    {"format": "int8", "bits": 3}, {"format": "int4", "group_size": 2**60}, {"bpe": 10**9}, [{"k": "a"}], ["a"] * 50,
)  # fmt: skip
TOKENS = (
    "[", "]", "{", "}", ":", "- ", "? ", "&a ", "*a", "!!int ", "!!float ", "!!bool ", "!!null ", "!!timestamp ",
    "!!set ",
    "<<: ", "|\n", ">\n", "'", '"', "#", "%", "@", "`", "\t", "\n", "\r", "\x85", "\u2028", "\ufeff", "\0", "\x1b",
    "---\n",
    "...\n", "~", "0x", "1_0", "1e9", ".inf", ".nan", "12:30:45", "2024-02-30", "null", "yes", "\\ud800", "\U0001f600",
)  # fmt: skip


def mutate_text(text: str, random: random.Random) -> str:
    for _ in range(random.randint(1, 3)):
        at, length = random.randrange(len(text) + 1), random.choice((0, 1, 1, 2, 5, 20))
        kind = random.randrange(4)
        if kind == 0:
            text = text[:at] + random.choice(TOKENS) + text[at + length :]
        elif kind == 1:
            text = text[:at] + text[at + length :]
        elif kind == 2:
            text = text[:at] + text[at : at + length] * 2 + text[at + length :]
        else:  # a whole value
            values = list(re.finditer(r": +([^\n#]+)", text))
            if values:
                start, end = random.choice(values).span(1)
                text = text[:start] + random.choice(TOKENS) + random.choice(["", "x", "3"]) + text[end:]
    return text


def mutate_value(content: Any, random: random.Random) -> Any:
    """Replace a value of a mapping with an odd one, or add one under another key."""
    if isinstance(content, dict) and content and random.random() < 0.9:
        key = random.choice(list(content))
        if random.random() < 0.1:
            return {**content, random.choice(["x", "", 1, "a.b", "[", "int"]): random.choice(ODD)}
        return {**content, key: mutate_value(content[key], random)}
    return random.choice(ODD)


FREE = {
    "precision": {"compute": "int8", "weights": {"format": "int8", "group_size": 32}, "activations": "int8"},
    "tensor": {"size_target": 0.5, "adapter": {"schedule": "paper", "gamma": 0.1}, "rank": {"*": [4, 4]}},
    "optim": {"name": "came", "lr": 0.1, "betas": [0.9, 0.9, 0.9]},
    "comm": {"name": "demo", "topk": 4, "chunk": 8},
    "data": {"csv": "a.csv", "clicks": {"label": "y", "categorical": ["c"], "table_size": {"c": 3}}},
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_mutated_recipe_is_read_or_refused(path: Path, tmp_path: Path) -> None:
    rng = random.Random(f"{path.name}, 0")
    target = tmp_path / "recipe.yaml"
    whole = path.read_text()
    content = yaml.safe_load(whole)
    is_sweep = "base" in content
    if isinstance(content.get("base"), str):
        whole = whole.replace(content["base"], str(path.with_name("demo-lean.yaml")))
    read = refused = 0
    with bounded(seconds=60, mebibytes=300):
        for number in range(160):
            odd = mutate_value({**content, **({} if number % 4 == 1 or is_sweep else FREE)}, rng)
            text = mutate_text(whole, rng) if number % 2 == 0 else yaml.dump(odd, allow_unicode=False, sort_keys=False)
            target.write_bytes(text.encode("utf-8", "surrogatepass"))
            try:
                if is_sweep:
                    load_sweep(target)
                else:
                    load_recipe(target)
                read += 1
            except UserError:
                refused += 1
            if isinstance(odd, dict) and not is_sweep and number % 2 == 1:
                with contextlib.suppress(UserError):
                    load_recipe(odd)
    assert read > 5
    assert refused > 20


def test_mutated_grid_is_expanded_or_refused(tmp_path: Path) -> None:
    rng = random.Random(0)
    grid = {
        "base": yaml.safe_load(MINIMAL),
        "axes": {"train.steps": [10, 20], "optim.lr": [0.1]},
        "linked": {"size": [{"data.seq_len": 64, "train.batch_size": 2}, {"data.seq_len": 32}]},
        "leave_out": [{"train.steps": 10, "data.seq_len": 32}],
    }
    path = tmp_path / "sweep.yaml"
    for _ in range(60):
        path.write_text(yaml.dump(mutate_value(grid, rng), allow_unicode=False))
        with contextlib.suppress(UserError):
            expand_sweep(*load_sweep(path))


def test_sweep_of_too_many_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    axes = {f"optim.option{axis}": list(range(10)) for axis in range(10)}
    path.write_text(yaml.dump({"base": yaml.safe_load(MINIMAL), "axes": axes}))
    with pytest.raises(UserError, match="10,000,000,000 combinations"):
        expand_sweep(*load_sweep(path))
