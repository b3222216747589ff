"""Tests of the claims of the precision experiment, on tables with known answers."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path

import pytest

import scantling as sc

LAW = sc.laws.PrecisionLaw.published()
FIELDS = ["precision.weights", "precision.activations", "precision.kv_cache", "train.schedule"]
FIGURES = ["N", "D", "loss", "state", "post.int3", "post.int4", "minimal_pairs", "run"]


def table(path: Path) -> Path:
    """Return noise-free runs from the published law, quantized after training by its own post-training term."""
    combos = [(16, 16, 16), *((b, 16, 16) for b in (3, 4, 6)), *((16, b, 16) for b in (4, 5, 6))]
    combos += [(16, 16, b) for b in (4, 5, 6)] + [(4, 4, 4), (4, 5, 16), (6, 6, 6)]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*FIELDS, *FIGURES])
        writer.writeheader()
        for size, tokens, bits in product((3e7, 6e7, 2e8), (1e9, 4e9, 1.6e10), combos):
            given = dict(zip(("weights", "activations", "kv_cache"), bits, strict=True))
            loss = LAW.loss(N=size, D=tokens, **given)
            names = ["" if b == 16 else f"int{b}" for b in bits]
            row = {**dict(zip(FIELDS, [*names, "cosine"], strict=True)), "N": size, "D": tokens, "loss": loss}
            row |= {"state": "done", "minimal_pairs": 1.0 - 0.1 * loss, "run": f"{path.stem}/{size}-{tokens}-{bits}"}
            if bits == (16, 16, 16):
                row |= {f"post.int{b}": LAW.loss(N=size, D=tokens, post=b) for b in (3, 4)}
            elif bits[1:] == (16, 16):
                more = {b: LAW.loss(N=size, D=tokens, post=b) - LAW.loss(N=size, D=tokens) for b in (3, 4)}
                row |= {f"post.int{b}": loss + lost + 0.01 for b, lost in more.items()}
            writer.writerow(row)
        writer.writerow({"state": "failed", "N": 1, "D": 1, "loss": ""})
    return path


def test_published_law_is_recovered(tmp_path: Path) -> None:
    import precision_claims as claims

    rows = claims.read(table(tmp_path / "runs.csv"))
    found = claims.saturation(rows)
    assert list(found["weights"]) == [3, 4, 6]
    costs = [found["weights"][bits]["mean"] for bits in (3, 4, 6)]
    assert costs[0] > costs[1] > costs[2] > 0
    assert list(found["all"]) == [4, 6]
    assert {own["cells"] for own in found["weights"].values()} == {9}
    fewer = [row for row in rows if not (row["weights"] == 6 and row["N"] < 1e8)]
    uneven = claims.saturation(fewer)["weights"]
    assert {own["cells"] for own in uneven.values()} == {3}, "means over other sizes are not beside each other"
    largest = [nats for size, _, nats in found["weights"][3]["raw"] if size == 2e8]
    assert uneven[3]["mean"] == pytest.approx(sum(largest) / 3)
    multiply = claims.parts_multiply(rows)
    errors = {name: rule["mean_error"] for name, rule in multiply["rules"].items()}
    whole = sum(multiply["measured"]) / len(multiply["measured"])
    assert multiply["runs"]["several"] == 27
    for name in ("Kumar's law, fitted to alone", "Kumar's law, fitted to all"):
        assert errors[name] < 0.1 * whole, name  # the base is fitted alone
    assert errors["their sum"] > 0.1 * whole
    too_much = [multiply["rules"][name]["bias"] for name in ("their sum", "the product, at least")]
    assert too_much[0] < too_much[1] < 0.0, "factors of several parts are more than their sum"
    means = claims.means_by_bits(multiply)
    assert list(means) == [(4, 4, 4), (4, 5, 16), (6, 6, 6)]
    of_all = [
        row["loss"] - whole["loss"] for row, whole in claims.beside_whole(rows) if len(claims.low_parts(row)) == 3
    ]
    assert means[4, 4, 4]["measured"] + means[6, 6, 6]["measured"] == pytest.approx(sum(of_all) / 9)
    constants = multiply["constants"]["Kumar's law, fitted to alone"]
    assert constants["gamma_w"] == pytest.approx(2.6745, rel=0.2)
    best = claims.best_bits(rows, samples=5)
    assert best["together"]["bits"] == pytest.approx(7.0, abs=0.3)
    assert best["in two stages"]["bits"] == pytest.approx(7.0, abs=0.3)
    assert all(own["interval"][0] <= own["interval"][1] for own in best.values())
    lost = claims.after_training(rows)
    assert lost["cosine, N=30000000, int3"]["best_tokens"] in (1e9, 4e9, 1.6e10)
    assert lost["cosine, N=30000000, int3"]["power_of_D"] == pytest.approx(0.5068, abs=1e-3)
    stays = [{**row, "schedule": "constant", "post": {"int3": row["loss"] + 0.5}} for row in rows if row["post"]]
    for row in stays:
        beside = next(r for r in rows if (r["N"], r["D"], r["weights"]) == (row["N"], row["D"], 16) and r["post"])
        row["post"] = {name: row["loss"] + 2.0 * (v - beside["loss"]) for name, v in beside["post"].items()}
    told = claims.decay([*rows, *(row for row in stays if row["weights"] == 16)])
    assert set(told) == {"constant"}
    assert told["constant"]["int3"]["times"] == pytest.approx(2.0)
    assert len(told["constant"]["int3"]["raw"]) == 9
    downstream = claims.downstream(rows)
    assert downstream["accuracy_a_nat"] == pytest.approx(-0.1)
    assert downstream["of_few_bits_at_equal_loss"] == pytest.approx(0.0, abs=1e-9)
    found = claims.robustness(rows)
    assert set(found) == {"int3", "int4"}
    assert set(found["int3"]) == {"trained at 4", "trained at 6"}
    assert set(found["int4"]) == {"trained at 6"}
    assert found["int3"]["trained at 6"]["mean"] == pytest.approx(0.01)
    uneven = claims.robustness([row for row in rows if not (row["weights"] == 4 and row["N"] > 5e7)])["int3"]
    assert [own["cells"] for own in uneven.values()] == [3, 3], "means over other sizes are not beside each other"
    assert [len(own["raw"]) for own in uneven.values()] == [3, 9]
    assert claims.noise(rows) == {}
    seeds = [{**row, "seed": seed, "loss": row["loss"] + 0.1 * seed} for row in rows for seed in (0, 1, 2)]
    spreads = claims.noise(seeds)
    assert spreads["N=30000000, D=1000000000, 16 bits"]["of_excess"] is None
    assert spreads["N=30000000, D=1000000000, 16 bits"]["of_loss"]["deviation"] == pytest.approx(0.1)
    assert spreads["N=30000000, D=1000000000, weights 4"]["of_excess"]["deviation"] == pytest.approx(0.0, abs=1e-9)
    again = claims.read(table(tmp_path / "other.csv"))
    assert claims.together(rows, again[:20]) == rows, "a run of two grids counts once"
