"""Tests of run tables: every accepted form, and the message of every refusal."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scantling as sc
from benchmarks.synthetic_runs import kumar_grid, simulate, small_grid
from scantling.errors import UserError
from scantling.laws import ChinchillaLaw, EfficiencyLaw, PostTrainingLaw, PrecisionLaw
from scantling.laws.runs import read_runs

KUMAR = PrecisionLaw.published()

RUNS = simulate(ChinchillaLaw.published(), small_grid(), noise=0.001)


class Frame:
    """Data frame with only the API that pandas and Polars share."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._table = columns
        self.columns = list(columns)

    def __getitem__(self, name: str) -> Iterator[Any]:
        return iter(self._table[name])

    def to_dict(self, *, as_series: bool = True) -> dict[str, Any]:
        raise NotImplementedError


def rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: float(column[k]) for name, column in columns.items()} for k in range(len(columns["N"]))]


def write_csv(path: Path, columns: dict[str, Any]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows(columns))
    return path


def test_read_runs_accepts_every_kind_of_table(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, rows(RUNS)))
    (tmp_path / "runs.jsonl").write_text(lines)
    (tmp_path / "runs.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "runs.json").write_text(json.dumps(rows(RUNS)))
    (tmp_path / "columns.json").write_text(json.dumps({name: list(column) for name, column in RUNS.items()}))
    tables = [RUNS, rows(RUNS), Frame(RUNS), write_csv(tmp_path / "runs.csv", RUNS), str(tmp_path / "runs.jsonl")]
    tables += [tmp_path / name for name in ("runs.jsonl.gz", "runs.json", "columns.json")]
    for table in tables:
        found = read_runs(table, ChinchillaLaw)
        for name, column in RUNS.items():
            assert found[name] == pytest.approx(column, rel=1e-15)


def test_read_runs_renames_selects_and_derives_columns() -> None:
    table = {"params": RUNS["N"], "flop": 6 * RUNS["N"] * RUNS["D"], "final": RUNS["loss"]}
    table["kind"] = np.array(["a", "b"] * 10)
    names = {"N": "params", "C": "flop", "loss": "final"}
    found = read_runs(table, ChinchillaLaw, names, {"kind": "b"})
    assert found.count == 10
    assert found["D"] == pytest.approx(RUNS["D"][1::2], rel=1e-12)


def test_read_runs_melts_post_columns() -> None:
    """In the format of a sweep, with one column per format; a run without a value has one row less."""
    table = {name: list(column[:3]) for name, column in RUNS.items()} | {"state": ["done", "done", "failed"]}
    table |= {"post.int3": ["5.5", "", "5.25"], "post.mxfp4_e2m1": [4.5, 4.25, ""], "post.int3.gptq": [4.75, "", ""]}
    columns = {"post": "post.*"}
    found = read_runs(table, PostTrainingLaw, columns, {"state": "done"})
    assert found["post"].tolist() == [np.inf, np.inf, 3.0, 4.0, 4.0]
    assert found["loss"].tolist() == [*RUNS["loss"][:2], 5.5, 4.5, 4.25]
    assert found["N"].tolist() == RUNS["N"][[0, 1, 0, 0, 1]].tolist()
    renamed = {"final" if name == "loss" else name: column for name, column in table.items()}
    found = read_runs(renamed, PostTrainingLaw, {"loss": "final", "post": "post.*.gptq"})
    assert found["post"].tolist() == [np.inf, np.inf, np.inf, 3.0]
    with pytest.raises(UserError, match=r"no columns after\.\*; it has N, D"):
        read_runs(table, PostTrainingLaw, {"post": "after.*"})


@pytest.mark.parametrize(
    ("cells", "value"),
    [
        ([0, 1], 1),
        ([0, 1], "1"),
        (["int4", None], ""),
        (["int4", ""], None),
        (["int4", float("nan")], ""),
        ([False, True], "true"),
        (["false", "true"], True),
        (["False", "True"], True),
    ],
)
def test_where_compares_cells_by_value(cells: list[Any], value: Any) -> None:
    assert read_runs({**RUNS, "column": cells * 10}, ChinchillaLaw, where={"column": value}).count == 10


def test_errors_number_runs_as_in_the_table() -> None:
    """The count refers to the table, even if runs are left out or one run becomes several rows."""
    losses = [*RUNS["loss"][:5], float("nan"), *RUNS["loss"][6:]]
    table = {**RUNS, "loss": losses, "kind": ["a"] * 3 + ["b"] * 17, "post.int4": RUNS["loss"], "post.int3": losses}
    with pytest.raises(UserError, match="loss of run 6 is nan"):
        read_runs(table, ChinchillaLaw, where={"kind": "b"})
    table = {**table, "loss": RUNS["loss"], "post.int4": ["inf" if i == 5 else "" for i in range(20)]}
    with pytest.raises(UserError, match="loss of run 6 is inf"):
        read_runs(table, PostTrainingLaw, {"post": "post.*"}, {"kind": "b"})
    with pytest.raises(UserError, match="column weights, run 7: 'x' is not a number"):
        read_runs(changed(weights=[""] * 6 + ["x"] * 14, kind=[0, 1] * 10), PrecisionLaw, where={"kind": 0})


def test_post_pattern_skips_the_loss_column() -> None:
    table = {"N": RUNS["N"], "D": RUNS["D"], "val_loss": RUNS["loss"], "val_int4": RUNS["loss"] + 0.1}
    found = read_runs(table, PostTrainingLaw, {"loss": "val_loss", "post": "val_*"})
    assert found["post"].tolist() == [np.inf] * 20 + [4.0] * 20


def test_columns_accepts_both_directions() -> None:
    table = {"params": RUNS["N"], "tokens": RUNS["D"], "loss": RUNS["loss"]}
    for names in ({"N": "params", "D": "tokens"}, {"params": "N", "tokens": "D"}):
        assert (read_runs(table, ChinchillaLaw, names)["D"] == RUNS["D"]).all()


def test_empty_bits_mean_unquantized() -> None:
    table = {**RUNS, "weights": ["", "none", "4", 8] * 5}
    found = read_runs(table, PrecisionLaw)
    assert list(found["weights"][:4]) == [np.inf, np.inf, 4, 8]
    assert (found["activations"] == 16).all()
    assert found.ranges()["weights"] == (4, 8)


def changed(**columns: Any) -> dict[str, Any]:
    return {**RUNS, **columns}


def with_one(name: str, value: float) -> dict[str, Any]:
    column = np.array(RUNS[name])
    column[3] = value
    return {**RUNS, name: column}


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (with_one("loss", 0.1), "check for perplexities"),
        (with_one("D", RUNS["D"][19] * 1e3), "no D lies between .*mixed units"),
    ],
)
def test_read_runs_warns_of_odd_values(runs: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    read_runs(runs, ChinchillaLaw)
    assert re.search(words, caplog.text)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (with_one("loss", np.nan), "loss of run 4 is nan.*Leave out runs that diverged"),
        (with_one("loss", -1), "loss of run 4 is -1"),
        (with_one("loss", 400), "if it is a perplexity"),
        (with_one("loss", 16), "if it is a perplexity"),
        (with_one("N", np.inf), "N of run 4 is inf"),
        (with_one("N", 60), "N ranges from 60 to .*units may be mixed"),
        (changed(N=RUNS["N"] / 1e6), "N ranges from 20 to 600.*units may be mixed"),
        (changed(D=RUNS["D"] / 1e9), "D ranges from .*units may be mixed"),
        (changed(N=RUNS["D"] * 10, D=RUNS["N"]), "different units, or are swapped"),
        (changed(N=RUNS["N"][:3]), "differ in length"),
        (changed(loss=["low"] * 20), "'low' is not a number"),
        ({"N": RUNS["N"], "D": RUNS["D"], "los": RUNS["loss"]}, "no column 'loss'.*did you mean 'los'"),
        ({name: column[:5] for name, column in RUNS.items()}, "5 runs are too few for 5 constants"),
        (changed(D=20 * RUNS["N"]), "N and D are collinear.*D / N about 20"),
        (changed(N=np.full(20, 1e8)), "all runs have N of about 1e\\+08, so alpha is not identifiable"),
        (changed(D=np.full(20, 1e9)), "all runs have D of about 1e\\+09, so beta is not identifiable"),
        ("nowhere.csv", "nowhere.csv cannot be read"),
        ([], "no column 'N'|no run"),
        (5, "mapping of columns or a list of rows by column name; given 5"),
        (None, "given None"),
        ([[1, 2]], r"given \[1, 2\]"),
    ],
)
def test_fit_refuses_unusable_runs(runs: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        sc.laws.fit(runs, "chinchilla")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"law": "chinchila"}, "did you mean 'chinchilla'"),
        ({"columns": {"n": "M"}}, "columns names 'n'"),
        ({"columns": {"N": "params"}}, "no column 'params' for N"),
        ({"columns": {"C": "kind", "D": "D"}}, "names both D and C.*give one of the two"),
        ({"where": {"quantizer": "x"}}, "no column 'quantizer'"),
        ({"where": {"kind": "z"}}, "no run with kind z"),
        ({"fixed": {"alhpa": 0.3}}, "did you mean 'alpha'"),
        ({"fixed": {"alpha": np.nan}}, "it is a finite number"),
        ({"tie": {"beta": "gamma_w"}}, "tie names beta and gamma_w"),
        ({"fixed": {"A": 1, "B": 1, "E": 1, "alpha": 1, "beta": 1}}, "nothing is left to fit"),
        ({"law": "kumar", "base": KUMAR}, "nothing is left to fit"),
        ({"law": "efficiency"}, "no column 'scheme'"),
        ({"law": "ouyang"}, "no run was quantized after training.*'post=post"),
        ({"base": "hoffmann"}, "base is a law, or 'fit'"),
        ({"base": 3}, "base is a law, a fit, or 'fit'; given 3"),
        ({"law": KUMAR}, "no law 'PrecisionLaw"),
        ({"columns": ["N"]}, "columns is a mapping of names"),
        ({"columns": {"N": ["N"]}}, "columns is a mapping of names"),
        ({"fixed": {3: 1.0}}, "fixed is a mapping of names"),
        ({"free": "power"}, "free is a list of names"),
        ({"free": None}, "free is a list of names"),
        ({"tie": {"B": "A"}}, "tie lets B, in nats × tokens.*, follow A, in nats × parameters"),
        ({"law": "kumar", "fixed": {"gamma_w": 0.0}}, "gamma_w is above 0"),
        ({"base": ChinchillaLaw}, r"such as ChinchillaLaw.published\(\); given the class"),
        (
            {"law": "kumar", "base": "fit", "where": {"seed": 0}},
            "the base, fitted to 2 full-precision runs: 2 runs are too",
        ),
        ({"delta": 0}, "delta is a positive number"),
        ({"delta": "a"}, "delta is a positive number; given 'a'"),
        ({"fixed": {"alpha": "x"}}, "fixed alpha is 'x'; it is a finite number"),
        ({"free": ["alhpa"]}, "free names 'alhpa'.*did you mean 'alpha'"),
        ({"fixed": {"A[x]": 0.5}}, r"fixed names 'A\[x\]'; the chinchilla law of these runs has A, B"),
        ({"tie": {"beta": "beta"}}, "tie lets beta follow beta"),
        ({"tie": {"beta": "alpha", "alpha": "beta"}}, "tie lets beta follow alpha, which follows beta"),
    ],
)
def test_fit_refuses_bad_options(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        sc.laws.fit(changed(kind=["a"] * 20, seed=[0, 0, *[1] * 18]), **{"law": "chinchilla", **given})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fixed": {"eff_N": 0.5}}, r"fixed names 'eff_N'; .* has A, B, .*, eff_N\[w4\], eff_D\[w4\]"),
        ({"free": ["eff_D"]}, r"free names 'eff_D'; .* eff_D\[w4\]"),
        ({"fixed": {"eff_N[w5]": 0.5}}, r"fixed names 'eff_N\[w5\]'; .*did you mean 'eff_N\[w4\]'"),
        ({"free": ["eff_D[w5]"]}, r"free names 'eff_D\[w5\]'"),
        ({"fixed": {"eff_N[w4": 0.5}}, r"fixed names 'eff_N\[w4'"),
        ({"fixed": {"A[x]": 0.5}}, r"fixed names 'A\[x\]'"),
    ],
)
def test_fit_knows_the_scheme_constants_of_the_table(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        sc.laws.fit(changed(scheme=["bf16", "w4"] * 10), "efficiency", **given)


@pytest.mark.parametrize(
    ("name", "variable"), [("C_w", "post"), ("n_post", "post"), ("gamma_D", "post"), ("n_a", "activations")]
)
def test_fit_refuses_to_free_an_inactive_constant(name: str, variable: str) -> None:
    with pytest.raises(
        UserError, match=f"free names {name}, a constant of {variable}, which has low precision in no run"
    ):
        sc.laws.fit(changed(weights=[4, 16] * 10, activations=[16, ""] * 10), "kumar", free=[name])


def test_fit_refuses_zero_bits() -> None:
    grid = simulate(KUMAR, kumar_grid())
    with pytest.raises(UserError, match=r"weights is in bits, 0\.1 to 128, or empty"):
        sc.laws.fit({**grid, "weights": grid["weights"] * 0}, "kumar")


def test_read_runs_parses_format_names() -> None:
    """In the format of a sweep over number formats; an empty cell is an unquantized run."""
    table = {name: column[:5] for name, column in RUNS.items()}
    table["precision.weights"] = ["int3", "fp8_e4m3", "bf16", "", '{"format": "int6", "granularity": "token"}']
    for columns in (None, {"weights": "precision.weights"}):
        found = read_runs(table, PrecisionLaw, columns=columns)
        assert found["weights"].tolist() == [3.0, 8.0, 16.0, np.inf, 6.0]
    table["weights"] = [{"format": "int4"}, {"format": "fp8_e4m3", "group_size": 64}, None, "int3", 16]
    assert read_runs(table, PrecisionLaw)["weights"].tolist() == [4.0, 8.0, np.inf, 3.0, 16.0]
    for cell in ("integer4", '{"bits": 4}', {"bits": 4}):
        with pytest.raises(UserError, match=rf"'{re.escape(str(cell))}' is not a number"):
            read_runs({**table, "weights": [cell] * 5}, PrecisionLaw)


def test_fit_refuses_constant_low_precision() -> None:
    """Otherwise the law would report that low precision is free, and its predictions at 16 bits would be wrong."""
    table = {**RUNS, "weights": ["int4"] * 20}
    with pytest.raises(UserError, match="all runs have weights of 4 bits: the kumar law cannot learn their cost"):
        sc.laws.fit(table, "kumar")
    fitted = sc.laws.fit(table, "kumar", fixed={"gamma_w": 2.0, "n_w": 0.0})
    assert fitted.law.loss(1e8, 1e10, weights=4) > fitted.law.loss(1e8, 1e10)


def test_fit_warns_of_ignored_precision(caplog: pytest.LogCaptureFixture) -> None:
    sc.laws.fit({**RUNS, "precision.activations": ["int4"] * 10 + [""] * 10})
    assert "the chinchilla law ignores precision.activations" in caplog.text
    caplog.clear()
    for column in ([16] * 20, ["ckpt/1.pt", "ckpt/2.pt"] * 10, ["4", "gelu"] * 10):
        sc.laws.fit({**RUNS, "weights": column})
    assert not caplog.text
    fitted = sc.laws.fit({**RUNS, "weights": [16, ""] * 10}, "kumar")
    assert fitted.names == ("A", "B", "E", "alpha", "beta")
    assert "no run has low precision: only the base of the kumar law is fitted" in caplog.text
    caplog.clear()
    sc.laws.fit(RUNS, "kumar")
    assert "no run has low precision: only the base of the kumar law is fitted" in caplog.text


def test_base_skips_runs_with_unmodeled_low_precision(caplog: pytest.LogCaptureFixture) -> None:
    """The base is fitted to the unquantized runs, and a warning says that the law treats other bits as equal."""
    words = "law ignores precision.weights"
    table = {name: np.tile(column, 2) for name, column in RUNS.items()} | {"precision.weights": ["", "int4"] * 20}
    fitted = sc.laws.fit({**table, "post": np.repeat([np.inf, 4.0], 20)}, "ouyang", base="fit", fixed={"gamma_N": 0.3})
    assert fitted.runs.count == 40
    assert fitted.base is not None
    assert fitted.base.runs.count == 10
    assert f"the ouyang {words}" in caplog.text
    caplog.clear()
    schemes = ["bf16", "w4"] * 20
    assert read_runs({**table, "scheme": schemes}, EfficiencyLaw).full_precision().count == 20
    assert not caplog.text
    assert read_runs({**table, "scheme": [*schemes[1:], "w4"]}, EfficiencyLaw).full_precision().count == 0
    read_runs({**table, "scheme": ["bf16"] * 40}, EfficiencyLaw)
    assert f"the efficiency {words}" in caplog.text


def test_read_runs_reports_a_damaged_archive(tmp_path: Path) -> None:
    whole = gzip.compress("\n".join(map(json.dumps, rows(RUNS))).encode())
    (tmp_path / "runs.jsonl.gz").write_bytes(whole[:20] + b"\xff" * 10 + whole[30:])
    with pytest.raises(UserError, match="cannot be read as a table of runs: Error"):
        read_runs(tmp_path / "runs.jsonl.gz", ChinchillaLaw)


def test_read_runs_handles_byte_order_marks_and_separators(tmp_path: Path) -> None:
    named = [{**row, "kind": "a\u2028b\u2029c\x85d"} for row in rows(RUNS)]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in named)
    (tmp_path / "runs.jsonl").write_text("\ufeff" + lines)
    (tmp_path / "runs.jsonl.gz").write_bytes(gzip.compress(("\ufeff" + lines).encode()))
    (tmp_path / "runs.json").write_text("\ufeff" + json.dumps(named, ensure_ascii=False))
    with open(tmp_path / "runs.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, named[0])
        writer.writeheader()
        writer.writerows(named)
    for name in ("runs.jsonl", "runs.jsonl.gz", "runs.json", "runs.csv"):
        assert read_runs(tmp_path / name, ChinchillaLaw, where={"kind": named[0]["kind"]}).count == len(named)


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, '{"N": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_read_runs_reports_unreadable_json(text: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"runs.{kind}"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"runs\.{kind} cannot be read as a table of runs"):
        read_runs(path, ChinchillaLaw)


def test_read_runs_reports_malformed_csv(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("N,D,loss\n1e8,1e10,3.1\n1e8,2e10,3.0,extra,more\n")
    with pytest.raises(UserError, match=r"line 3, has more cells than the header"):
        read_runs(path, ChinchillaLaw)
    path.write_text("N,D,loss,loss\n1e8,1e10,3.1,3.4\n")
    with pytest.raises(UserError, match="two columns 'loss'"):
        read_runs(path, ChinchillaLaw)
    path.write_text(f"N,D,loss,notes\n1e8,1e10,3.1,{'x' * 200_000}\n")
    before = csv.field_size_limit(1 << 17)  # the module's default, which reading documents raises for the whole process
    try:
        with pytest.raises(UserError, match="cannot be read as a table"):
            read_runs(path, ChinchillaLaw)
    finally:
        csv.field_size_limit(before)


def test_read_runs_ignores_lists_in_unused_columns() -> None:
    notes = [[1] * (i % 3) for i in range(20)]
    assert read_runs(changed(notes=notes), ChinchillaLaw).count == 20
    with pytest.raises(UserError, match="is not a number"):
        read_runs(changed(loss=notes), ChinchillaLaw)


def test_where_compares_numbers() -> None:
    for value in (16, 16.0, "16"):
        found = read_runs(changed(bits=[16.0, 4.0] * 10), ChinchillaLaw, where={"bits": value})
        assert found.count == 10


def test_empty_scheme_means_unquantized() -> None:
    for empty in ("", None, float("nan")):
        found = read_runs(changed(scheme=[empty, "int4"] * 10), EfficiencyLaw)
        assert list(found["scheme"][:2]) == ["bf16", "int4"]


def test_simulate_accepts_a_fit() -> None:
    fitted = sc.laws.fit(RUNS)
    assert (simulate(fitted, small_grid())["loss"] == simulate(fitted.law, small_grid())["loss"]).all()


def test_simulate_divergent_runs_have_infinite_loss() -> None:
    assert simulate(KUMAR, {"N": [1e8], "D": [1e10], "weights": [0.01]})["loss"] == [np.inf]


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"alpha": -0.3}, "alpha is above 0"),
        ({"A": 0}, "A is above 0"),
        ({"E": -1.0}, "E is 0 or more"),
        ({"E": 10.0}, "E is fixed at 10, but a run has a loss of"),
    ],
)
def test_fit_refuses_impossible_fixed_values(fixed: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        sc.laws.fit(RUNS, fixed=fixed)


def test_read_runs_uses_a_renamed_column_once() -> None:
    table = {**{name: column for name, column in RUNS.items() if name != "N"}, "weights": RUNS["N"]}
    found = read_runs(table, PrecisionLaw, {"N": "weights"})
    assert (found["weights"] == 16).all()


SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
"""Characters at which str.splitlines splits, but JSON Lines and CSV do not."""


@pytest.mark.parametrize("kind", ["jsonl", "csv", "jsonl.gz"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_read_runs_splits_lines_at_newlines_only(tmp_path: Path, kind: str, newline: str) -> None:
    path = tmp_path / f"runs.{kind}"
    notes = [f"a{mark}b" for mark in SEPARATORS] * 3
    table = [{**row, "note": note} for row, note in zip(rows(RUNS), notes, strict=False)]
    if kind == "csv":
        text = newline.join([",".join(table[0]), *(",".join(map(str, row.values())) for row in table)])
    else:
        text = newline.join(json.dumps(row, ensure_ascii=False) for row in table)
    raw = text.encode()
    path.write_bytes(gzip.compress(raw) if kind.endswith("gz") else raw)
    found = read_runs(path, ChinchillaLaw)
    assert found.count == len(table)
    assert found["loss"].tolist() == [float(row["loss"]) for row in table]
    assert read_runs(path, ChinchillaLaw, where={"note": "a\u2028b"}).count == notes[: len(table)].count("a\u2028b")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"N": ' + "1" * 5000 + "}", "{]", '"\ud800'])
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_read_runs_errors_name_the_file(tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / f"runs.{kind}"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(UserError, match=rf"runs\.{kind}"):
        read_runs(path, ChinchillaLaw)


@pytest.mark.parametrize("loss", [5e-324, 2e-310, 1e-300, 1e-30, 1e-9, 0.0, -0.0, -5e-324, -1.0, 1e308, 1.7e308, 20.0])
@pytest.mark.parametrize("law", ["chinchilla", "kumar", "efficiency"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_fit_refuses_impossible_losses(loss: float, law: str, everywhere: bool) -> None:
    table = {**RUNS, "scheme": ["bf16", "w4"] * 10, "weights": [4, 16] * 10}
    table["loss"] = np.full(20, loss) if everywhere else np.array([loss, *RUNS["loss"][1:]])
    with pytest.raises(UserError, match=r"is not a loss in nats per token|every loss is a positive and finite number"):
        sc.laws.fit(table, law)


@pytest.mark.parametrize("bits", [5e-324, 1e-100, 1e-3, 0.0, -1.0, -np.inf, 1e300, 1.7e308])
@pytest.mark.parametrize("name", ["weights", "activations", "kv_cache", "post"])
def test_fit_refuses_impossible_bits(bits: float, name: str) -> None:
    for column in ([bits] * 20, [bits, 4, 16, np.inf] * 5):
        with pytest.raises(UserError, match=f"{name} is in bits, 0.1 to 128"):
            sc.laws.fit({**RUNS, name: column}, "kumar")


@pytest.mark.parametrize("count", [5e-324, 1e-310, 0.0, -1.0, 1e308, 1.7e308])
@pytest.mark.parametrize("name", ["N", "D", "C"])
def test_fit_refuses_impossible_counts(count: float, name: str) -> None:
    for column in (np.full(20, count), np.array([count, *[1e9] * 19])):
        table = {key: value for key, value in RUNS.items() if key != name and (name, key) != ("C", "D")}
        with pytest.raises(UserError, match=r"positive and finite|units|number"):
            sc.laws.fit({**table, name: column}, columns={"C": "C"} if name == "C" else None)
