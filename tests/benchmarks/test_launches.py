"""Tests of the count of launches."""

from __future__ import annotations


def test_stacks_and_kernels_save_launches() -> None:
    import launches
    from encoder_models import Shape

    shape = Shape(layers=3, length=128, width=192, vocabulary=100)
    rows = {name: launches.count(shape=shape, **settings) for name, settings in launches.ROWS.items()}
    for ranks in ("TT", "TT, removed ranks"):
        alone, stacked = rows[f"{ranks}, before"], rows[ranks]
        assert stacked["launches"] < 0.7 * alone["launches"]
        assert stacked["products"] < 0.7 * alone["products"]
        assert stacked["kernels"] == 0
    assert rows["TT with kernels"]["by_name"]["contract_hidden"] == 3
    assert rows["TT with kernels"]["launches"] < rows["TT"]["launches"]
    assert "copy_" not in rows["TT"]["by_name"]
