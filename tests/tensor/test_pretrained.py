"""Tests of TT models in transformers folders: saved, loaded, and assert_refused by code that does not know them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, batch, logits, make_model
from safetensors.torch import load_file
from torch import nn

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.replace import find_tt_layers

RANK = 4


def make_tt_model(family: str) -> Any:
    """Return a TT model after 20 training steps."""
    model = sc.tensorize(make_model(family), RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        model(**batch(model=model)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_pretrained_round_trip_is_bitwise(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_tt_model(family)
    wanted = logits(model)
    model.save_pretrained(tmp_path / "one")
    loaded = sc.load(tmp_path / "one")
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), wanted)
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in model.named_parameters()]
    loaded.save_pretrained(tmp_path / "two")
    assert torch.equal(logits(sc.load(tmp_path / "two")), wanted)
    assert "LOAD REPORT" not in caplog.text, "transformers reports keys that are missing or too many"
    copy.deepcopy(loaded).half().float()
    sc.densify(loaded)
    assert not hasattr(loaded, "hf_quantizer")
    loaded.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    dense = type(loaded).from_pretrained(tmp_path / "dense")
    assert torch.equal(logits(dense), logits(loaded))


def start_process(code: str) -> subprocess.Popen[str]:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + code
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_pretrained_in_new_process_and_without_scantling(tmp_path: Path) -> None:
    """A state dict loads into a freshly make_tt_model model, and a folder into any Auto class, with the same bits.

    If TT classes are not registered, transformers must raise instead of starting with new weights.
    """
    for family in FAMILIES:
        model = make_tt_model(family)
        torch.save({"state": model.state_dict(), "logits": logits(model)}, tmp_path / f"{family}.pt")
        model.save_pretrained(tmp_path / family)
    knowing = start_process(f"""
import torch
from families import FAMILIES, logits, make_model
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM
from transformers import AutoModelForSeq2SeqLM
import scantling as sc
from scantling import hf
for family in FAMILIES:
    saved = torch.load(f"{tmp_path}/{{family}}.pt", weights_only=True)
    model = sc.tensorize(make_model(family, seed=7), {RANK})
    assert not torch.equal(logits(model), saved["logits"]), family
    model.load_state_dict(saved["state"])
    assert torch.equal(logits(model), saved["logits"]), family
    auto = {{"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM, "roberta": AutoModelForMaskedLM}}
    auto["vit"] = AutoModelForImageClassification
    loaded = auto.get(family, AutoModelForCausalLM).from_pretrained(f"{tmp_path}/{{family}}")
    assert torch.equal(logits(loaded), saved["logits"]), family
print("equal", len(FAMILIES))
""")
    ignorant = start_process(f"""
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
classes = {{"t5": (AutoModelForSeq2SeqLM, AutoModel), "mixtral": (AutoModelForCausalLM,)}}
for name, autos in {{**classes, "llama-tied": (AutoModelForCausalLM, AutoModel)}}.items():
    for auto in autos:
        try:
            auto.from_pretrained(f"{tmp_path}/{{name}}")
        except RuntimeError as error:
            print("assert_refused", "size" in str(error))
        else:
            print(name, auto.__name__, "took it")
assert "scantling" not in sys.modules
""")
    out, errors = knowing.communicate()
    assert out.strip() == f"equal {len(FAMILIES)}", errors
    out, errors = ignorant.communicate()
    assert out.splitlines() == ["assert_refused True"] * 5, errors
    assert "got scantling" in errors, "nothing says what is missing"


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "gpt-oss"])
def test_experts_checkpoint_is_refused_without_scantling(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.quantizers import auto

    model = sc.tensorize(make_model(family), {"*experts": RANK})
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(sc.load(tmp_path)), logits(model))
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "scantling")
    with pytest.raises(RuntimeError):
        type(model).from_pretrained(tmp_path)


def test_pretrained_base_model_and_heads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_tt_model("bert")
    model.save_pretrained(tmp_path / "lm")
    base = transformers.AutoModel.from_pretrained(tmp_path / "lm", add_pooling_layer=False)
    ids = batch()["input_ids"]
    with torch.no_grad():
        wanted = model.bert(ids).last_hidden_state
        assert torch.equal(base(ids).last_hidden_state, wanted)
        classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3)
        assert torch.equal(classifier.bert(ids).last_hidden_state, wanted)
        assert type(classifier.classifier) is nn.Linear
        assert "embeddings" not in caplog.text, "the guard is reported"

        model.bert.save_pretrained(tmp_path / "base")
        alone = transformers.AutoModel.from_pretrained(tmp_path / "base", add_pooling_layer=False)
        assert torch.equal(alone(ids).last_hidden_state, wanted)
        on_top = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "base")
        assert torch.equal(on_top.bert(ids).last_hidden_state, wanted)
        assert on_top.cls.predictions.decoder.table is on_top.bert.embeddings.word_embeddings
        assert not on_top.cls.predictions.decoder.bias.any()


def test_pretrained_saves_changed_ranks(tmp_path: Path) -> None:
    """The folder holds the current ranks, even if a neighbor could hold only fewer, or a bond has rank 0."""
    model = make_tt_model("llama-tied")
    model.save_pretrained(tmp_path)
    layer, dead = model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.down_proj
    table = model.model.embed_tokens
    with torch.no_grad():
        layer.cores = nn.ParameterList([layer.cores[0], layer.cores[1][..., :1], layer.cores[2][:1], *layer.cores[3:]])
        table.cores = nn.ParameterList([table.cores[0][..., 1:], table.cores[1][1:], *table.cores[2:]])
        dead.cores = nn.ParameterList([*dead.cores[:2], dead.cores[2][..., :0], dead.cores[3][:0], *dead.cores[4:]])
    assert (layer.in_modes, layer.ranks[2:4]) == ((4, 4, 2), (1, 4)), "the mode of 2 could carry 2"
    model.save_pretrained(tmp_path)
    loaded = sc.load(tmp_path)
    assert loaded.model.layers[0].mlp.up_proj.ranks == layer.ranks
    assert loaded.model.layers[0].mlp.down_proj.ranks == dead.ranks
    assert loaded.model.embed_tokens.ranks == table.ranks
    assert torch.equal(logits(loaded), logits(model))
    assert all(core.requires_grad == bool(core.numel()) for core in loaded.model.layers[0].mlp.down_proj.cores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pretrained_saves_rank_gates(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model("mixtral").to(dtype)
    sc.tensorize(model, RANK)
    adapter = sc.RankAdapter(model, size_target=0.7)
    with torch.no_grad():
        for layer in adapter.layers.values():
            for gate in layer.rank_gates:
                gate.uniform_(-0.3, 1.0)
                gate[0] = 1.0
    adapter.truncate()
    with torch.no_grad():
        next(iter(adapter.layers.values())).rank_gates[0][0] = 0.123456
    model.save_pretrained(tmp_path)
    loaded = sc.load(tmp_path)
    assert {name: parameter.dtype for name, parameter in loaded.named_parameters()} == {
        name: parameter.dtype for name, parameter in model.named_parameters()
    }
    assert torch.equal(logits(loaded), logits(model))
    sc.densify(loaded)
    scale = logits(model).abs().max()
    assert (logits(loaded) - logits(model)).abs().max() <= (1e-5 if dtype == torch.float32 else 3e-2) * scale


def test_pretrained_folder_contents(tmp_path: Path) -> None:
    model = make_tt_model("llama-tied")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "scantling"
    assert config["layers"]["model.embed_tokens"]["heads"] == ["lm_head"]
    assert config["layers"]["model.layers.0.mlp.up_proj"]["ranks"] == list(model.model.layers[0].mlp.up_proj.ranks)
    state = load_file(tmp_path / "model.safetensors")
    assert state[config["guard"]].shape == (1,)
    assert state.keys() - {config["guard"]} == model.state_dict().keys()
    model.load_state_dict(state)
    stranger = copy.deepcopy(make_model("llama-tied"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        stranger.load_state_dict(state, strict=False)


def test_pretrained_dtype_and_shards(tmp_path: Path) -> None:
    model = make_tt_model("llama")
    for param in model.parameters():  # not buffers, because the rotary ones are recomputed in fp32
        param.data = param.data.to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = sc.load(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(model))
    assert sc.load(tmp_path, dtype=torch.float32).lm_head.cores[0].dtype == torch.float32


def test_load_dense_models(tmp_path: Path) -> None:
    model = make_model("bert")
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(sc.load(tmp_path)), logits(model))


def test_load_refuses_invalid_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no config\.json; give a folder that save_pretrained"):
        sc.load(tmp_path / "nothing")
    model = make_tt_model("llama-tied")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())

    def assert_refused(changed: dict[str, Any], message: str) -> None:
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=message):
            sc.load(tmp_path)

    assert_refused({**config, "architectures": ["LlamaForNothing"]}, "no model class 'LlamaForNothing'")
    weights = (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    assert_refused(config, f"cannot load {tmp_path}: .*model.safetensors")
    weights.rename(tmp_path / "model.safetensors")
    quantization = config["quantization_config"]
    assert_refused(
        {**config, "quantization_config": {**quantization, "format": 99}}, "given format 99 of a newer scantling"
    )
    layers = copy.deepcopy(quantization["layers"])
    layers["model.norm"] = layers.pop("model.layers.0.mlp.up_proj")
    assert_refused(
        {**config, "quantization_config": {**quantization, "layers": layers}}, "model.norm is a LlamaRMSNorm"
    )
    layers = copy.deepcopy(quantization["layers"])
    layers["model.layers.0.mlp.up_proj"]["in_modes"] = [2, 2]
    assert_refused(
        {**config, "quantization_config": {**quantization, "layers": layers}}, r"up_proj: given in_modes=\(2, 2\)"
    )
    path.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        sc.load(tmp_path)

    from safetensors.torch import save_file

    path.write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.cores.2"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no values for model\.layers\.0\.mlp\.up_proj\.cores\.2"):
        sc.load(tmp_path)

    make_tt_model("bert").save_pretrained(tmp_path / "bert")
    weights = load_file(tmp_path / "bert" / "model.safetensors")
    del weights["bert.encoder.layer.0.output.dense.bias"]
    save_file(weights, tmp_path / "bert" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no values for bert\.encoder\.layer\.0\.output\.dense\.bias"):
        sc.load(tmp_path / "bert")


def test_load_refuses_offloaded_layers(tmp_path: Path) -> None:
    from accelerate import cpu_offload

    model = sc.tensorize(make_model("llama"), {"*layers*": RANK})
    model.save_pretrained(tmp_path)
    places = {"model.layers": "disk", "model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    with pytest.raises(UserError, match=r"model\.layers\.0\..* is a TT layer, which device_map cannot offload to disk"):
        sc.load(tmp_path, device_map={**places, "lm_head": "cpu"})
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(UserError, match="the cores of this layer are on meta, its input is on cpu"):
        logits(model)


def test_load_refuses_untied_head_of_converted_base(tmp_path: Path) -> None:
    model = make_model("llama-tied")
    sc.tensorize(model.model, RANK)
    model.model.save_pretrained(tmp_path / "base")  # shares its configuration with the whole model
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(
        UserError, match=r"that the LlamaForCausalLM of config.json does not have, such as lm_head\.weight"
    ):
        sc.load(tmp_path / "whole")
    assert type(sc.load(tmp_path / "base")) is type(model.model)


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[0] for key, value in batch(1, seed=index).items()}


def trainer(model: Any, folder: Path, steps: int) -> transformers.Trainer:
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return transformers.Trainer(
        model=model, args=settings, train_dataset=Sequences(), optimizer_cls_and_kwargs=sc.hf.came(lr=1e-2)
    )


def test_pretrained_in_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Trainer checkpoints are normal folders, a model loaded from one can be trained, and a run resumes."""
    straight = trainer(make_tt_model("llama-tied"), tmp_path / "straight", 4)
    straight.train()
    middle = sc.load(tmp_path / "straight" / "checkpoint-2")
    end = sc.load(tmp_path / "straight" / "checkpoint-4")
    assert torch.equal(logits(end), logits(straight.model.eval()))
    assert not torch.equal(logits(middle), logits(end))

    resumed = trainer(middle, tmp_path / "resumed", 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert torch.equal(logits(resumed.model.eval()), logits(end))
    assert "unexpected keys" not in caplog.text
    assert all(layer.training is False for layer in find_tt_layers(resumed.model))
