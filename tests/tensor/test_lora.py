"""Adapters of peft on TT layers."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor.families import FAMILIES, batch, make_model
from torch import nn

import scantling as sc
from scantling.errors import UserError

peft = pytest.importorskip("peft")

LANGUAGE = [family for family in FAMILIES if family != "vit"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def tt(family: str = "llama") -> Any:
    return sc.tensorize(make_model(family), 8)


def add_lora(model: Any, targets: Any = "all-linear", **options: Any) -> Any:
    """Return a model with adapters that change it: B is nonzero."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("family", LANGUAGE)
def test_lora_trains_saves_and_merges_after_densify(family: str, tmp_path: Path) -> None:
    base = tt(family)
    before = base(**batch(model=base)).logits.detach()
    inputs = batch(model=base)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules="all-linear"))
    torch.testing.assert_close(model.eval()(**inputs).logits, before)  # a new adapter changes nothing
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    head = model.get_base_model().get_output_embeddings()
    assert not hasattr(head, "lora_A")

    optimizer = sc.CAME(sc.param_groups(model.train()), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]

    after = model.eval()(**inputs).logits.detach()
    with model.disable_adapter():
        torch.testing.assert_close(model(**inputs).logits, before)
    base.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(sc.load(tmp_path / "base"), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(**inputs).logits, after)

    with pytest.raises(UserError, match=r"cannot be merged into TT layers.*sc\.densify\(model\)"):
        model.merge_and_unload()
    merged = sc.densify(model).merge_and_unload()
    torch.testing.assert_close(merged(**inputs).logits, after, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name or "cores" in name for name, _ in merged.named_parameters())


@pytest.mark.parametrize("family", ["llama", "llama-tied", "bert"])
def test_lora_on_embeddings_and_heads(family: str) -> None:
    base = tt(family)
    inputs = batch(model=base)
    names = [name for name, module in base.named_modules() if isinstance(module, sc.TTMEmbedding)]
    model = add_lora(copy.deepcopy(base), [name.rpartition(".")[2] for name in names] + ["lm_head"])
    changed = model(**inputs).logits.detach()
    assert not torch.allclose(changed, base(**inputs).logits)
    model(**inputs).loss.backward()
    grads = [p.grad for n, p in model.named_parameters() if "lora_embedding" in n]
    assert grads
    assert all(grad is not None for grad in grads)
    merged = sc.densify(model)
    torch.testing.assert_close(merged(**inputs).logits, changed, rtol=1e-4, atol=1e-5)


def test_lora_keeps_shared_input_products() -> None:
    base = tt()
    inputs = batch(rows=64, model=base)
    for targets in (["q_proj"], ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj"]):
        model = add_lora(copy.deepcopy(base), targets)
        tuned = model(**inputs).logits.detach()
        dense = sc.densify(copy.deepcopy(model))
        torch.testing.assert_close(tuned, dense(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_lora_default_targets_adapters_and_patterns() -> None:
    model = peft.get_peft_model(tt(), peft.LoraConfig(r=2))
    assert {name.rpartition(".")[2] for name in model.base_model.targeted_module_names} == {"q_proj", "v_proj"}
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=r".*\.(k|up)_proj"))
    model.set_adapter("second")
    assert model(**batch()).logits.isfinite().all()


def test_lora_with_transformers_add_adapter() -> None:
    model = tt()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model(**batch()).loss.backward()
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.grad is not None} <= {"lora_A", "lora_B"}


def test_lora_on_custom_model() -> None:
    model = nn.Sequential(sc.TTLinear(24, 36, rank=4), nn.ReLU(), sc.TTLinear(36, 8, rank=4))
    x = torch.randn(3, 24)
    before = model(x)
    assert not torch.allclose(
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False))(x), before
    )


REFUSED: dict[str, Any] = {
    "IA3Config": lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "LoHaConfig": lambda: peft.LoHaConfig(target_modules=["q_proj"]),
    "VeraConfig": lambda: peft.VeraConfig(target_modules=["q_proj"]),
    "OFTConfig": lambda: peft.OFTConfig(target_modules=["q_proj"]),
    "AdaLoraConfig": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    "use_dora=True": lambda: peft.LoraConfig(target_modules=["q_proj"], use_dora=True),
    "init_lora_weights='pissa'": lambda: peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_adapters_that_need_dense_weight_are_refused(words: str) -> None:
    model = tt()
    before = model(**batch()).logits
    with pytest.raises(UserError, match=words) as caught:
        peft.get_peft_model(model, REFUSED[words]())
    assert "densify" in str(caught.value) or "use one of" in str(caught.value)
    assert torch.equal(model(**batch()).logits, before)


def test_lora_refuses_experts_and_all_linear_skips_them() -> None:
    with pytest.raises(UserError, match=r"mlp\.experts is a TTExperts, which does not support adapters"):
        add_lora(tt("mixtral"), ["experts"])
    model = add_lora(tt("mixtral"))
    assert not any("experts" in name for name in model.base_model.targeted_module_names)


@pytest.mark.parametrize("late", [True, False])
def test_lora_with_any_import_order(late: bool) -> None:
    """Run in a separate process, in which nothing has imported peft yet."""
    first, second = ("import scantling as sc; sc.TTLinear; sc.tensorize", "import peft")
    code = f"""
{first if late else second}
import importlib.util; importlib.util.find_spec("peft")  # as transformers does, to know whether it is there
{second if late else first}
import torch, scantling as sc
model = sc.tensorize(torch.nn.Sequential(torch.nn.Linear(32, 32)), 2)
peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"]))
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
