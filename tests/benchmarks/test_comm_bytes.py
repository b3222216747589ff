"""Tests of the computed bytes of exchanges with a real vocabulary."""

from __future__ import annotations


def test_embeddings_decide_the_bytes() -> None:
    import comm_bytes

    rows = comm_bytes.compute(32_000)
    found = {(row["setting"], row["embeddings"], row["replicas"]): row["times_fewer"] for row in rows}
    for setting in comm_bytes.SETTINGS:
        for replicas in comm_bytes.REPLICAS:
            full, largest = (found[setting, channel, replicas] for channel in ("dense", "sparse gradients"))
            assert full < 120
            assert largest > max(100, 3 * full)
