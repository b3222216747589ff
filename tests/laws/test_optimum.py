"""Tests of the best size, tokens and bits against the identity, closed forms and brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from scantling.errors import UserError
from scantling.laws import ChinchillaLaw, EfficiencyLaw, Law, PostTrainingLaw, PrecisionLaw

KUMAR = PrecisionLaw.published()

GAMMA = (2.6745 + 2.2102 + 0.9578) / 3
LLAMA_3, GEMMA_2, GPT_3 = (8e9, 15e12), (9e9, 8e12), (175e9, 300e9)


def test_optimum_equal_parts_solve_the_identity() -> None:
    """3x = e^x - 1 (the paper's Eq. 7 has an extra alpha, its Eq. 28 an extra factor)."""
    x = PrecisionLaw.published(offsets=False).averaged().optimum(compute=1e21).bits / GAMMA
    assert x == pytest.approx(1.9038136944, abs=1e-10)
    assert 3 * x == pytest.approx(math.exp(x) - 1, abs=1e-9)
    assert x == pytest.approx(float(np.real(-1 / 3 - lambertw(-math.exp(-1 / 3) / 3, -1))), abs=1e-9)


@pytest.mark.parametrize("compute", [1e18, 1e21, 1e24, 1e27])
def test_optimum_published_constants_give_seven_bits(compute: float) -> None:
    best = KUMAR.optimum(compute=compute)
    assert best.bits == pytest.approx(7.002, abs=5e-4)
    assert KUMAR.averaged().optimum(compute=compute).bits == pytest.approx(7.641, abs=5e-4)
    assert best.N * best.D * best.bits * 6 / 16 == pytest.approx(compute, rel=1e-12)
    assert best.compute == pytest.approx(compute, rel=1e-12)
    assert PrecisionLaw.published(offsets=False).optimum(compute=compute).bits == pytest.approx(3.469, abs=5e-4)


@pytest.mark.parametrize(
    "law", [KUMAR, KUMAR.averaged(), PrecisionLaw.published("float")], ids=["all", "mean", "float"]
)
@pytest.mark.parametrize("speed", [None, lambda bits: (16 / bits) ** 0.6], ids=["linear", "slower"])
def test_optimum_equals_brute_force(law: PrecisionLaw, speed: object) -> None:
    """Brute force evaluates the loss over N and bits, with D from the budget, without the identity."""
    compute = 1e20
    rate = speed or (lambda bits: 16 / bits)

    def least(bits: float) -> float:
        given = {**law.parse_variables({}), **dict.fromkeys(law.modeled_parts(), bits)}
        sizes = np.exp(np.linspace(math.log(1e7), math.log(1e11), 4001))
        return float(law.evaluate(sizes, compute * rate(bits) / 6 / sizes, given).min())  # type: ignore[operator]

    best = law.optimum(compute=compute, speed=speed)  # type: ignore[arg-type]
    assert best.loss == pytest.approx(
        law.loss(best.N, best.D, **dict.fromkeys(law.modeled_parts(), best.bits)), rel=1e-12
    )
    found = minimize_scalar(least, bounds=(best.bits - 1.5, best.bits + 1.5), method="bounded", options={"xatol": 1e-5})
    assert best.bits == pytest.approx(found.x, abs=0.02)  # brute force has a grid of sizes
    assert best.loss <= found.fun + 1e-12
    assert best.loss == pytest.approx(found.fun, rel=1e-5)


def test_optimum_given_bits_follow_the_derivation() -> None:
    """N*/N_Ch = f^(-a/(a+b)) P^(-b/(a+b)) and D* the inverse, from the derivation (Eqs. 6 and 17 print others)."""
    law = PrecisionLaw(A=500, B=2000, E=1.8, alpha=0.35, beta=0.37, gamma_w=2.0, gamma_a=2.0, gamma_kv=2.0)
    bits, compute = 5.0, 1e21
    whole = ChinchillaLaw(A=500, B=2000, E=1.8, alpha=0.35, beta=0.37).optimum(compute=compute)
    found = law.optimum(compute=compute, bits=bits)
    f = (1 - math.exp(-bits / 2)) ** 3
    a, b = 0.35 / 0.72, 0.37 / 0.72
    larger, longer = found.N / whole.N, found.D / whole.D
    assert larger == pytest.approx(f**-a * (bits / 16) ** -b, rel=1e-9)
    assert longer == pytest.approx(f**a * (bits / 16) ** -a, rel=1e-9)
    assert whole.bits == 16


def test_optimum_measured_speeds_maximize_the_product() -> None:
    """With measured speeds, the bits with the largest f × speed win; at 1.62, FP4 breaks even with FP8."""
    speeds = {16: 1.0, 8: 1.17, 4: 1.6}
    products = {
        bits: KUMAR.effective_parameters(1.0, **dict.fromkeys(KUMAR.PARTS, bits)) * speed
        for bits, speed in speeds.items()
    }
    assert KUMAR.optimum(compute=1e21, speed=speeds).bits == max(products, key=lambda bits: products[bits])
    law = EfficiencyLaw.published()
    threshold = 1 / (0.65 * 0.95)
    assert threshold == pytest.approx(1.62, abs=0.005)
    for speed, scheme in ((threshold * 0.999, "bf16"), (threshold * 1.001, "quartet")):
        assert law.optimum(compute=1e20, speed={"bf16": 1.0, "quartet": speed}).scheme == scheme


@pytest.mark.parametrize(
    ("speed", "bits"),
    [
        (lambda p: 12.0 if p <= 4 else 2.0 if p <= 8 else 1.0, 4.0),
        (lambda p: {4: 4.0, 8: 2.0, 16: 1.0}.get(p, 0.1), 8.0),
    ],
)
def test_optimum_speeds_may_jump_at_integers(speed: Callable[[float], float], bits: float) -> None:
    assert KUMAR.optimum(compute=1e21, speed=speed).bits == bits


def test_optimum_no_nearby_size_is_better() -> None:
    """Here the best point of one row is on the next row, one ulp apart."""
    budget = {"compute": 4.4312526281483826e20, "inference_tokens": 11952386109.877312}
    law = ChinchillaLaw.published()
    best = law.optimum(**budget)
    others = [law.optimum(**budget, N=best.N * factor).loss for factor in (0.9, 0.97, 0.999, 1.001, 1.03, 1.1)]
    assert best.loss < min(others)


def test_optimum_given_size_needs_more_bits_for_more_tokens() -> None:
    """P* grows as beta gamma ln C for a large budget."""
    law = PrecisionLaw(A=4e3, B=1.8e4, E=2.7, alpha=0.5, beta=0.5, gamma_w=1.0, gamma_a=1.0, gamma_kv=1.0)
    bits = [law.optimum(compute=10.0**power, N=1e8).bits for power in (20, 22, 24, 26)]
    steps = np.diff(bits)
    assert (steps > 0).all()
    assert steps[-1] == pytest.approx(0.5 * math.log(100), rel=0.1)


def test_optimum_inference_makes_models_smaller() -> None:
    law = ChinchillaLaw.published()
    alone = law.optimum(compute=1e22)
    served = law.optimum(compute=1e22, inference_tokens=1e12)
    assert served.N < alone.N
    assert served.D > alone.D
    spent = 6 * served.N * served.D + 2 * served.N * 1e12
    assert spent == pytest.approx(1e22, rel=1e-9)
    sizes = np.exp(np.linspace(math.log(served.N) - 2, math.log(served.N) + 1, 20001))
    tokens = (1e22 - 2 * sizes * 1e12) / (6 * sizes)
    every = law.evaluate(sizes[tokens > 0], tokens[tokens > 0], {})
    assert served.loss == pytest.approx(every.min(), rel=1e-7)


def test_optimum_inference_may_exclude_high_bits() -> None:
    """At 16 bits, inference exceeds the budget; the search must avoid that region."""
    best = KUMAR.optimum(compute=1e20, N=1e8, inference_tokens=6e11)
    assert best.bits is not None
    assert 4 < best.bits < 13
    for given, fewer in (({"bits": 16}, "inference_tokens or bits"), ({"inference_tokens": 5e12}, "inference_tokens")):
        with pytest.raises(UserError, match=f"inference alone costs .*, or take fewer {fewer}$"):
            KUMAR.optimum(**{"compute": 1e20, "N": 1e8, "inference_tokens": 6e11, **given})
    speeds = {"speed": {2: 8.0, 8: 2.0, 6: 2.5}}  # the budget covers 2 bits only, but 2 bits diverge
    with pytest.raises(UserError, match=r"inference alone costs 1\.2e"):
        KUMAR.optimum(compute=1e20, N=1e8, inference_tokens=1.5e12, **speeds)


def test_optimum_finds_a_narrow_feasible_range() -> None:
    """The feasible range of bits is narrower than the search's step."""
    best = KUMAR.optimum(compute=1e20, N=1e8, inference_tokens=2.45e12)
    assert best.bits is not None
    assert 3.11 < best.bits < 3.27


def test_optimum_speed_after_training_counts_at_inference() -> None:
    law = PostTrainingLaw.published()
    given = {"compute": 1e22, "inference_tokens": 1e12, "post": 4}
    slow, fast = (law.optimum(**given, speed={16: 1.0, 4: speed}) for speed in (1.0, 4.0))
    assert fast.loss < slow.loss


def test_optimum_warns_of_bits_at_the_edge() -> None:
    law = PrecisionLaw(A=4e3, B=1.8e4, E=2.7, alpha=0.5, beta=0.5, gamma_w=20.0)
    assert any("edge of the searched range" in text for text in law.optimum(compute=1e20).warnings)
    (warning,) = law.optimum(compute=1e20, bits=1).warnings
    assert warning == "the law models weights; low precision of activations and kv_cache counts as free"


def test_optimum_with_post_training_quantization() -> None:
    """Fewer tokens and more parameters, and at most the critical number of tokens, also for a given N."""
    bits = 16.0
    plain, quantized = (KUMAR.optimum(compute=1e23, bits=bits, post=post) for post in (None, 3))
    assert quantized.N > plain.N
    assert KUMAR.critical_tokens(quantized.N, post=3) > quantized.D
    tight = KUMAR.optimum(compute=6 * 1e8 * 1e12, N=1e8, bits=bits, post=3)
    tokens, turn = tight.D, KUMAR.critical_tokens(1e8, post=3)
    assert tokens == pytest.approx(turn, rel=1e-9)
    assert tight.compute < 6 * 1e8 * 1e12


@pytest.mark.parametrize("post", [3, 4, 5])
@pytest.mark.parametrize("N", [1e8, 8e9])
def test_critical_tokens_equal_equation_13(N: float, post: float) -> None:
    whole = dict.fromkeys(KUMAR.PARTS, math.inf)
    law = KUMAR
    turn = law.beta * law.B * N**law.gamma_N * math.exp(post / law.gamma_post - law.n_post)
    turn = (turn / (law.gamma_D * law.C_T)) ** (1 / (law.gamma_D + law.beta))  # type: ignore[operator]
    found = law.critical_tokens(N, post=post, **whole)
    assert found == pytest.approx(turn, rel=1e-10)
    losses = law.loss(N, found * np.array([0.99, 1, 1.01]), post=post, **whole)
    assert losses.argmin() == 1


def test_critical_tokens_of_other_laws() -> None:
    law = PostTrainingLaw.published()
    found = law.critical_tokens(1e9, post=3)
    assert law.loss(1e9, found * np.array([0.9, 1, 1.1]), post=3).argmin() == 1
    assert KUMAR.critical_tokens(1e8, post=math.inf) == math.inf
    assert KUMAR.critical_tokens(1e8, weights=4, post=4) == math.inf
    assert law.critical_tokens(1e9, post=4) > found


@pytest.mark.parametrize(
    ("case", "bits", "critical"),
    [(LLAMA_3, 13.76, 1.95e11), (GEMMA_2, 12.81, 2.03e11), (GPT_3, 5.97, 5.59e11)],
    ids=["llama-3-8b", "gemma-2-9b", "gpt-3"],
)
def test_worked_cases_have_known_values(case: tuple[float, float], bits: float, critical: float) -> None:
    """The documented cases: 7 bits if N is free; if N is given, bits depend on the training length."""
    N, D = case
    free, given = KUMAR.optimum(compute=6 * N * D), KUMAR.optimum(compute=6 * N * D, N=N)
    assert free.bits == pytest.approx(7.002, abs=5e-4)
    assert given.bits == pytest.approx(bits, abs=0.005)
    every = np.linspace(4, 16, 12001)
    losses = KUMAR.loss(N, D * 16 / every, weights=every, activations=every, kv_cache=every)
    assert given.bits == pytest.approx(every[losses.argmin()], abs=0.002)
    assert KUMAR.critical_tokens(N, post=4) == pytest.approx(critical, rel=0.005)
    assert any(text.startswith("N = ") for text in given.warnings)
    assert any(text.startswith("D = ") for text in given.warnings)


@pytest.mark.parametrize(("column", "case"), list(enumerate((LLAMA_3, GEMMA_2, GPT_3), start=1)))
def test_worked_cases_match_the_documentation(column: int, case: tuple[float, float]) -> None:
    """Check all rows of the documentation to the digits shown there."""
    page = (Path(__file__).parents[2] / "docs" / "evidence" / "scaling-laws.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    table = {row[0]: row[column] for row in cells if len(row) == 4}
    (N, D), ouyang, compute = case, PostTrainingLaw.published(), 6 * case[0] * case[1]
    free = KUMAR.optimum(compute=compute)
    found: dict[str, tuple[float, ...]] = {
        "tokens a parameter": (D / N,),
        "best bits, N free": (free.bits or 0.0,),
        "its N and D": (free.N, free.D),
        "best bits, N given": (KUMAR.optimum(compute=compute, N=N).bits or 0.0,),
        "the same by averages": (KUMAR.averaged().optimum(compute=compute, N=N).bits or 0.0,),
        "D_crit at 3 bits, Kumar and Ouyang": tuple(law.critical_tokens(N, post=3) for law in (KUMAR, ouyang)),
        "D_crit at 4 bits": tuple(law.critical_tokens(N, post=4) for law in (KUMAR, ouyang)),
        "D_crit at 5 bits, Kumar": (KUMAR.critical_tokens(N, post=5),),
        "added by 4 bits after training, nats": tuple(
            law.loss(N, D, post=4) - law.loss(N, D) for law in (KUMAR, ouyang)
        ),
    }
    units = {"B": 1e9, "T": 1e12}
    for name, values in found.items():
        texts = table[name].split(", ")
        assert len(texts) == len(values), name
        for text, value in zip(texts, values, strict=True):
            number = text.rstrip("BT")
            half_a_digit = 0.5 * 10.0 ** -len(number.partition(".")[2])
            assert value / units.get(text[-1], 1.0) == pytest.approx(float(number), abs=1.001 * half_a_digit), name


def test_optimum_inside_the_range_has_no_warnings() -> None:
    best = KUMAR.optimum(compute=6 * 1e8 * 1e10, N=1e8)
    assert best.warnings == ()


@pytest.mark.parametrize(
    ("law", "given", "words"),
    [
        (KUMAR, {"compute": -1}, "compute is a positive"),
        (KUMAR, {"compute": math.inf}, "compute is a positive"),
        (KUMAR, {"compute": 1e20, "bits": "int4"}, "bits is a positive and finite number; given int4"),
        (
            KUMAR,
            {"compute": 1e20, "bits": 3},
            "no optimum at 3 bits: training diverges there by the kumar law .*; take more bits",
        ),
        (KUMAR, {"compute": 1e20, "speed": {3: 100}}, "no optimum at 3 bits"),
        (KUMAR, {"compute": 1e20, "N": 1e8, "speed": {2: 100, 3: 90}}, "no optimum at 2 bits"),
        (KUMAR, {"compute": 1e10, "inference_tokens": 1e12}, "inference alone costs"),
        (KUMAR, {"compute": 1e20, "N": 0}, "N is a positive"),
        (KUMAR, {"compute": 1e20, "inference_tokens": -1}, "inference_tokens"),
        (KUMAR, {"compute": 1e20, "N": 1e9, "inference_tokens": 1e12}, "inference alone costs"),
        (KUMAR, {"compute": 1e20, "speed": {16: 0.0}}, "above 0"),
        (KUMAR, {"compute": 1e20, "speed": {16: 1.0}, "bits": 8}, "no entry for 8"),
        (ChinchillaLaw.published(), {"compute": 1e20, "post": 4}, "leave post out"),
        (EfficiencyLaw.published(), {"compute": 1e20}, "speed={scheme"),
        (KUMAR, {"compute": 1e20, "speed": {"int8": 2.0}}, "law takes bits: speed={bits"),
        (KUMAR, {"compute": None}, "compute is a positive"),
        (KUMAR, {"compute": 1e20, "speed": {8: "x"}}, "it returned x for 8"),
        (KUMAR, {"compute": 1e20, "speed": lambda _: None}, "it returned None"),
        (EfficiencyLaw.published(), {"compute": 1e20, "speed": {8: 2.0, 16: 1.0}}, "law takes schemes"),
        (ChinchillaLaw.published(), {"compute": 1e20, "bits": 8}, "does not model low-precision training"),
        (ChinchillaLaw.published(), {"compute": 1e20, "speed": {8: 2.0, 16: 1.0}}, "leave speed out"),
        (ChinchillaLaw.published(), {"compute": 1e22, "speed": {16: 1.0}, "inference_tokens": 1e9}, "leave speed out"),
        (PostTrainingLaw.published(), {"compute": 1e22, "speed": {16: 1.0}, "post": 4}, "leave speed out"),
        (PostTrainingLaw.published(), {"compute": 1e20, "bits": 4, "post": 4}, "leave bits out"),
    ],
)
def test_optimum_refuses_options(law: Law, given: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        law.optimum(**given)  # type: ignore[arg-type]


def test_optimum_refuses_non_numbers() -> None:
    for given, words in (
        ({"inference_tokens": None}, "inference_tokens is 0 or more; given None"),
        ({"N": True}, "N is"),
    ):
        with pytest.raises(UserError, match=words):
            KUMAR.optimum(**{"compute": 1e20, **given})
    with pytest.raises(UserError, match="N counts are positive and finite numbers; given 'x'"):
        KUMAR.effective_parameters(N="x")


def test_optimum_warns_once_of_its_answer_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scantling.laws.law._LOGGED", set())
    found = KUMAR.optimum(compute=1e21, post=4, N=1e9)
    (record,) = caplog.records
    assert len(found.warnings) > 1
    assert all(warning in record.message for warning in found.warnings)


def test_critical_tokens_refuses_divergent_training() -> None:
    law = PrecisionLaw.published()
    with pytest.raises(UserError, match="training diverges there"):
        law.critical_tokens(N=1e8, post=2, activations=3)
    with pytest.raises(UserError, match="one number of bits for each part; given several as post"):
        law.critical_tokens(N=1e8, post=[3, 4])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"must broadcast; given N \(2,\), D \(3,\)"):
        law.loss([1e8, 2e8], [1e9, 2e9, 3e9])
