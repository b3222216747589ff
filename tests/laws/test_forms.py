"""Tests of each law against its written-out formula, its published constants, and the slopes of its losses."""

from __future__ import annotations

import logging
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scantling as sc
from scantling.errors import UserError
from scantling.laws import ChinchillaLaw, EfficiencyLaw, Law, PostTrainingLaw, PrecisionLaw

KUMAR = PrecisionLaw.published()
EVERY: list[tuple[Law, dict[str, object]]] = [
    (ChinchillaLaw.published(), {}),
    (ChinchillaLaw.published("quartet"), {}),
    (KUMAR, {"weights": 4, "activations": 5, "kv_cache": 6, "post": 3}),
    (PrecisionLaw.published("float"), {"weights": 4}),
    (EfficiencyLaw.published(), {"scheme": "quartet"}),
    (PostTrainingLaw.published(), {"post": 3}),
]
IDS = [f"{law.name}-{k}" for k, (law, _) in enumerate(EVERY)]


def kumar_by_hand(N: float, D: float, w: float, a: float, kv: float, post: float | None) -> float:
    """Evaluate table 2 of the paper, written out."""
    f = (1 - math.exp(-w / 2.6745 + 0.3037)) * (1 - math.exp(-a / 2.2102 + 1.4072))
    f *= 1 - math.exp(-kv / 0.9578 + 2.4185)
    size = N * f
    loss = 4.299e3 * size**-0.4965 + 1.806e4 * D**-0.4965 + 2.7648
    if post is not None:
        robust = math.prod(1 - math.exp(-(bits - post)) for bits in (w, a, kv))
        loss += 0.0598 * D**0.5068 / size**0.3439 * math.exp(-post / 0.5907 + 1.1277) * robust
    return loss


@pytest.mark.parametrize("bits", [(16, 16, 16, None), (4, 16, 16, None), (6, 5, 7, 4), (16, 16, 16, 3)])
def test_kumar_equals_the_formula(bits: tuple[float, float, float, float | None]) -> None:
    w, a, kv, post = bits
    found = KUMAR.loss(N=1e8, D=1e10, weights=w, activations=a, kv_cache=kv, post=post)
    assert found == pytest.approx(kumar_by_hand(1e8, 1e10, *bits), rel=1e-12)


def test_kumar_infinite_bits_cost_nothing_and_16_do() -> None:
    whole = 4.299e3 * 1e8**-0.4965 + 1.806e4 * 1e10**-0.4965 + 2.7648
    unquantized = {"weights": math.inf, "activations": math.inf, "kv_cache": None}
    assert KUMAR.loss(1e8, 1e10, **unquantized) == pytest.approx(whole, rel=1e-14)
    assert KUMAR.loss(1e8, 1e10) > whole
    assert KUMAR.effective_parameters(1e8, **unquantized) == 1e8
    kept = (1 - math.exp(-16 / 2.6745 + 0.3037)) * (1 - math.exp(-16 / 2.2102 + 1.4072))
    kept *= 1 - math.exp(-16 / 0.9578 + 2.4185)
    assert KUMAR.effective_parameters(1e8) == pytest.approx(1e8 * kept, rel=1e-12)


def test_kumar_low_precision_diverges_as_in_the_paper() -> None:
    """Activations at 3 bits diverge; all parts at 4 bits leave less than a quarter of the effective parameters."""
    assert KUMAR.effective_parameters(1e8, activations=3) == 0
    assert KUMAR.loss(1e8, 1e10, activations=3) == math.inf
    # two negative factors must not give a positive product
    assert KUMAR.loss(1e8, 1e10, activations=2, kv_cache=2) == math.inf
    assert KUMAR.effective_parameters(1.0, weights=4, activations=4, kv_cache=4) == pytest.approx(1 / 5.2, rel=0.01)


def test_kumar_post_at_training_bits_costs_nothing() -> None:
    bits = {"weights": 4.0, "activations": 4.0, "kv_cache": 4.0}
    assert KUMAR.loss(1e8, 1e10, **bits, post=4) == KUMAR.loss(1e8, 1e10, **bits)
    few, some, many = (KUMAR.loss(1e8, 1e10, weights=w, post=4) - KUMAR.loss(1e8, 1e10, weights=w) for w in (5, 6, 16))
    assert 0 < few < some < many


def test_loss_of_arrays_equals_losses_of_elements() -> None:
    N, bits, post = np.array([1e8, 2e8, 5e7]), np.array([4.0, 16.0, math.inf]), np.array([3.0, math.inf, 5.0])
    found = KUMAR.loss(N, 1e10, weights=bits, post=post)
    each = [KUMAR.loss(n, 1e10, weights=w, post=p) for n, w, p in zip(N, bits, post, strict=True)]
    assert found == pytest.approx(each, rel=1e-14)


def test_efficiency_equals_quartets_table_3() -> None:
    """arXiv 2505.14669v4, 30M parameters at 25 to 400 tokens per parameter."""
    N, ratios = 30.48e6, np.array([25, 50, 100, 200, 400])
    found = EfficiencyLaw.published().loss(N, N * ratios, scheme="quartet")
    assert found == pytest.approx([3.49, 3.38, 3.29, 3.24, 3.20], rel=0.005)


def test_ouyang_equals_the_formula() -> None:
    base = ((4.74e19 / 1e9) ** (0.045 / 0.399) + 7.63e10 / 1e11) ** 0.399
    law = PostTrainingLaw.published()
    assert law.loss(1e9, 1e11) == pytest.approx(base, rel=1e-12)
    added = 0.017 * 1e11**0.5251 / (1e9**0.2261 * 3**5.4967)
    assert law.loss(1e9, 1e11, post=3) == pytest.approx(base + added, rel=1e-12)


def test_efficiency_frantar_needs_a_base() -> None:
    with pytest.raises(UserError, match="give base="):
        EfficiencyLaw.published("frantar")
    law = EfficiencyLaw.published("frantar", base=ChinchillaLaw.published())
    assert law.effective_parameters(1e9, scheme="w4a4") == pytest.approx(0.747e9)


@pytest.mark.parametrize(("law", "variables"), EVERY, ids=IDS)
def test_gradient_equals_finite_differences(law: Law, variables: dict[str, object]) -> None:
    N, D = 2e8, 9e9
    slopes = law.gradient(N, D, **variables)
    whole = law.parse_variables(variables)

    def loss(name: str, factor: float) -> float:
        if name in ("N", "D"):
            return float(
                law.evaluate(*(each * factor if n == name else each for n, each in (("N", N), ("D", D))), whole)
            )
        if name in whole:
            return float(law.evaluate(N, D, {**whole, name: whole[name] * factor}))
        return float(law.with_constants({name: law.constants()[name] * factor}).evaluate(N, D, whole))

    values = {"N": N, "D": D, **law.constants(), **{k: v for k, v in whole.items() if k in slopes}}
    assert set(values) == set(slopes)
    for name, slope in slopes.items():
        step = 1e-5
        rise = (loss(name, 1 + step) - loss(name, 1 - step)) / (2 * step)
        assert slope * values[name] == pytest.approx(rise, rel=1e-6, abs=1e-9), name


def test_gradient_is_nan_if_training_diverges() -> None:
    law = PrecisionLaw.published()
    slopes = law.gradient([1e8, 1e8], 1e10, weights=[3.0, 16.0], activations=[3.0, 16.0])
    assert all(np.isnan(each[0]) and np.isfinite(each[1]) for each in slopes.values())


@pytest.mark.parametrize(("law", "variables"), EVERY, ids=IDS)
def test_in_units_keeps_the_loss(law: Law, variables: dict[str, object]) -> None:
    whole = law.parse_variables(variables)
    scaled = law.in_units(1e8, 1e10)
    assert float(scaled.evaluate(2.0, 3.0, whole)) == pytest.approx(float(law.evaluate(2e8, 3e10, whole)), rel=1e-12)
    back = scaled.in_units(1e-8, 1e-10).constants()
    assert back == pytest.approx(law.constants(), rel=1e-12)
    assert {name.partition("[")[0] for name in law.constants()} <= set(law.UNITS)


@given(st.floats(3, 30), st.floats(4, 30), st.floats(4, 30), st.floats(1e7, 1e11), st.floats(1e9, 1e13))
def test_loss_never_rises_with_bits_parameters_or_tokens(w: float, a: float, kv: float, N: float, D: float) -> None:
    """Without quantization after training, more bits, parameters or tokens never increase the loss."""
    bits = {"weights": w, "activations": a, "kv_cache": kv}
    loss = KUMAR.loss(N, D, **bits)
    for name in bits:
        assert KUMAR.loss(N, D, **{**bits, name: bits[name] + 1}) <= loss
    assert KUMAR.loss(2 * N, D, **bits) < loss
    assert KUMAR.loss(N, 2 * D, **bits) < loss


def test_variables_accept_format_names() -> None:
    formats = {"weights": "int4", "activations": "mxfp6_e3m2", "kv_cache": ["bf16", None]}
    bits = {"weights": 4, "activations": 6, "kv_cache": [16, math.inf]}
    assert KUMAR.loss(1e8, 1e10, weights={"format": "int4"}) == KUMAR.loss(1e8, 1e10, weights=4)
    assert (KUMAR.loss(1e8, 1e10, **formats) == KUMAR.loss(1e8, 1e10, **bits)).all()
    assert KUMAR.effective_parameters(1e8, weights="int4") == KUMAR.effective_parameters(1e8, weights=4)
    assert KUMAR.critical_tokens(1e8, weights="int6", post="int3") == KUMAR.critical_tokens(1e8, weights=6, post=3)
    assert KUMAR.outside(weights="int2") == KUMAR.outside(weights=2) != []
    assert EfficiencyLaw.published().outside(scheme="rtn") == []


def test_loss_warns_outside_the_fitted_range(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scantling.laws.law._LOGGED", set())  # another test may have logged it for its random sizes
    with caplog.at_level(logging.WARNING):
        KUMAR.loss(N=8.03e9, D=1.5e10)
    assert "N = 8.03e+09 is above the fitted range, 3e+07 to 2.2e+08" in caplog.text
    assert KUMAR.outside(N=1e8, D=1e10, weights=math.inf) == []
    assert len(KUMAR.outside(N=[1e6, 1e12])) == 2


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: PrecisionLaw.published("integr"), "did you mean 'integer'"),
        (lambda: KUMAR.loss(-1, 1e9), "N counts are positive"),
        (lambda: KUMAR.loss(1e8, math.nan), "D counts are positive"),
        (lambda: KUMAR.loss(1e8, 1e9, weights=0), "weights is in bits, above 0"),
        (lambda: KUMAR.loss(1e8, 1e9, weights="integer4"), "or a format such as int4 .*; given integer4"),
        (lambda: KUMAR.loss(1e8, 1e9, weights={"bits": 4}), "or a format such as int4"),
        (lambda: KUMAR.effective_parameters(-1), "N counts are positive"),
        (lambda: EfficiencyLaw.published().effective_parameters(-1), "N counts are positive"),
        (lambda: EfficiencyLaw.published().loss(1e8, 1e9, scheme=4), "no scheme '4'"),
        (lambda: PrecisionLaw.published("float").loss(1e8, 1e9, activations=4), "does not model activations"),
        (lambda: PrecisionLaw.published("float").loss(1e8, 1e9, post=4), "leave post out"),
        (lambda: EfficiencyLaw.published().loss(1e8, 1e9, scheme="quartett"), "did you mean 'quartet'"),
        (lambda: KUMAR.gradient(1e8, 1e9, bits=4), "has no variable 'bits'"),
        (lambda: KUMAR.critical_tokens(0, post=4), "N is one number, positive"),
        (lambda: KUMAR.critical_tokens([1e8, 1e9], post=4), "N is one number"),  # type: ignore[arg-type]
        (lambda: KUMAR.optimum(compute=1e21, speed={}), "speed is a function of bits, or a mapping"),
        (lambda: KUMAR.optimum(compute=1e21, speed=2.0), "given 2.0"),  # type: ignore[arg-type]
    ],
)
def test_law_refuses_bad_input(ask: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ask()  # type: ignore[operator]


def test_kumar_float_set_models_weights_only() -> None:
    law = PrecisionLaw.published("float")
    assert law.modeled_parts() == ("weights",)
    expected = 1e8 * (1 - math.exp(-6 / 2.8111 + 0.1240))
    assert law.effective_parameters(1e8, weights=6) == pytest.approx(expected, rel=1e-12)


def test_laws_import_no_torch() -> None:
    code = (
        "import sys, scantling as sc; heavy = lambda: [m for m in ('torch', 'scipy', 'numpy') if m in sys.modules]; "
        "sc.laws; before = heavy(); sc.laws.PrecisionLaw.published().optimum(compute=1e21); print(before, heavy())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ['scipy', 'numpy']"


def test_public_names() -> None:
    for name in sc.laws.__all__:
        assert getattr(sc.laws, name).__name__ == name
        assert name in dir(sc.laws)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sc.laws.nothing
    assert sc.laws.names() == ["chinchilla", "efficiency", "kumar", "ouyang"]


def test_predictions_need_no_scipy() -> None:
    """Without SciPy, fits and optima name the extra to install."""
    code = """
import sys
sys.modules["scipy"] = None
import scantling as sc
law = sc.laws.PrecisionLaw.published()
print(law.loss(1e8, 1e10, weights=4, post=3) > 0, law.optimum(compute=1e21, speed={8: 2.0, 16: 1.0}).bits)
runs = {"N": [1e8, 2e8, 4e8] * 3, "D": [1e9] * 3 + [4e9] * 3 + [9e9] * 3}
runs["loss"] = sc.laws.ChinchillaLaw.published().loss(**{name: runs[name] for name in "ND"}).tolist()
for ask in (lambda: law.optimum(compute=1e21), lambda: sc.laws.fit(runs)):
    try:
        ask()
    except sc.errors.UserError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    hint = 'fits and optima need SciPy; install it with: pip install "scantling[laws]"'
    assert done.stdout.splitlines() == ["True 8.0", hint, hint]
