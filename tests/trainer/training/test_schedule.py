from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scantling.trainer.training.schedule import lr_factor

NAMES = ("cosine", "linear", "wsd", "constant")


@given(
    st.integers(1, 500),
    st.sampled_from(NAMES),
    st.floats(0, 0.99) | st.integers(1, 50).map(float),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_factors_rise_in_the_warmup_only(steps: int, schedule: str, warmup: float, decay: float, ratio: float) -> None:
    values = [
        lr_factor(s, steps=steps, schedule=schedule, warmup=warmup, decay=decay, min_ratio=ratio)
        for s in range(1, steps + 1)
    ]
    assert all(0 <= v <= 1 for v in values)
    assert values[0] > 0 or ratio == 0
    start = min(steps, round(warmup * steps) if warmup < 1 else int(warmup))
    assert all(a < b for a, b in zip(values[:start], values[1:start], strict=False))
    assert all(a >= b - 1e-12 for a, b in zip(values[start:], values[start + 1 :], strict=False))
    if schedule != "constant" and steps > start:
        assert values[-1] == pytest.approx(ratio)


def test_wsd_is_stable_until_the_decay() -> None:
    values = [lr_factor(s, steps=100, schedule="wsd", warmup=10, decay=0.2, min_ratio=0) for s in range(1, 101)]
    assert set(values[10:80]) == {1.0}
    assert values[89] == pytest.approx(0.5)
