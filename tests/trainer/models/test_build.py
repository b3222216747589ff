"""Tests of models from presets, configurations and folders, and of refusals."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from scantling.errors import UserError
from scantling.trainer.models.build import build_model, default_task, mixes_documents
from scantling.trainer.models.presets import PRESETS
from scantling.trainer.recipe.schema import ModelSection
from scantling.trainer.tasks import get_task

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY_LLAMA = {**TINY, "num_key_value_heads": 2}
TINY_BART = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}


def make(section: dict[str, Any], task: str = "causal-lm", *, vocab: int = 261, seq: int = 64, **keys: Any) -> Any:
    own = {"config_overrides": {}, "seed": 0, **keys}
    return build_model(ModelSection(**section), get_task(task), vocab_size=vocab, seq_len=seq, **own)


@pytest.mark.parametrize(
    ("preset", "millions", "tolerance"),
    [
        ("llama-1m", 1.0, 0.15),
        ("llama-10m", 10.0, 0.05),
        ("llama-60m", 58.1, 0.01),
        ("llama-130m", 134.1, 0.01),
        ("llama-350m", 368.2, 0.01),
        ("llama-1b", 1339.1, 0.01),
    ],
)
def test_llama_presets_have_their_size(preset: str, millions: float, tolerance: float) -> None:
    """From 60M on with the 32,000 ids of the GaLore comparison, which reports 58, 134, 368 and 1339 million."""
    vocab = 261 if millions < 20 else 32000
    model = make({"preset": preset}, vocab=vocab, device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=tolerance)


def test_encoder_presets_have_their_shape() -> None:
    bert = make({"preset": "bert-6-encoder"}, "masked-lm", device="meta").config
    assert (bert.num_hidden_layers, bert.hidden_size, bert.num_attention_heads, bert.vocab_size) == (6, 768, 12, 30522)
    roberta = make({"preset": "roberta-code"}, "masked-lm", device="meta").config
    assert (roberta.num_hidden_layers, roberta.hidden_size, roberta.vocab_size) == (12, 768, 50265)
    labels = {"num_labels": 5}
    classifier = make({"preset": "bert-6-encoder"}, "classification", device="meta", config_overrides=labels)
    assert classifier.classifier.out_features == 5


def test_t5_small_has_its_size() -> None:
    """With the 32,100 ids of its tokenizer; the paper says "about 60 million", the published weights have 60.5."""
    model = make({"preset": "t5-small"}, "seq2seq", vocab=32100, device="meta")
    assert model.config.vocab_size == 32128
    assert sum(p.numel() for p in model.parameters()) == 60_506_624
    tiny = make({"preset": "t5-small", "overrides": {"d_model": 32, "num_layers": 2}}, "seq2seq", seq=4096).config
    assert (tiny.hidden_size, tiny.num_layers, tiny.num_decoder_layers) == (32, 2, 2)


def test_every_preset_names_a_task() -> None:
    for name, preset in PRESETS.items():
        assert default_task(ModelSection(preset=name)) == preset.task


def test_same_seed_gives_same_weights_after_other_runs() -> None:
    first = make({"preset": "llama-1m", "overrides": TINY_LLAMA})
    torch.rand(5)
    before = torch.get_rng_state()
    second = make({"preset": "llama-1m", "overrides": TINY_LLAMA})
    assert torch.equal(torch.get_rng_state(), before), "building a model draws from the global generator"
    other = make({"preset": "llama-1m", "overrides": TINY_LLAMA}, seed=1)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.training
    assert first.config._attn_implementation == "sdpa"


def test_vocabulary_follows_the_tokenizer_or_is_refused() -> None:
    assert make({"preset": "llama-1m"}, vocab=261, device="meta").config.vocab_size == 320
    assert make({"preset": "llama-1m"}, vocab=320, device="meta").config.vocab_size == 320
    with pytest.raises(UserError, match="50000 ids, the model's vocabulary only 30522"):
        make({"preset": "bert-6-encoder"}, "masked-lm", vocab=50000, device="meta")
    with pytest.raises(UserError, match="261 ids, the model's vocabulary only 100"):
        make({"preset": "llama-1m", "overrides": {"vocab_size": 100}}, device="meta")


def test_length_is_checked_against_the_positions() -> None:
    assert make({"preset": "llama-1m"}, seq=4096, device="meta").config.max_position_embeddings == 4096
    make({"preset": "bert-6-encoder"}, "masked-lm", seq=512, device="meta")
    with pytest.raises(UserError, match="seq_len is 513, the model has 512"):
        make({"preset": "bert-6-encoder"}, "masked-lm", seq=513, device="meta")
    make({"preset": "roberta-code"}, "masked-lm", seq=512, device="meta")
    with pytest.raises(UserError, match="the model has 512"):
        make({"preset": "roberta-code"}, "masked-lm", seq=513, device="meta")


@pytest.mark.parametrize(
    "model_type", ["roberta", "roberta-prelayernorm", "data2vec-text", "camembert", "esm", "bert", "opt"]
)
def test_longest_accepted_sequence_works(tmp_path: Path, model_type: str) -> None:
    keys = {**TINY, "vocab_size": 300, "max_position_embeddings": 20, "ffn_dim": 32, "word_embed_proj_dim": 32}
    keys |= {"pad_token_id": 1, "mask_token_id": 4} if model_type == "esm" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **keys}))
    task = "causal-lm" if model_type == "opt" else "masked-lm"
    longest = 20 if model_type in ("bert", "opt") else 18
    model = make({"hf": str(tmp_path)}, task, seq=longest)
    assert model(torch.full((1, longest), 5)).logits.shape == (1, longest, 300)
    with pytest.raises(UserError, match=f"the model has {longest} positions"):
        make({"hf": str(tmp_path)}, task, seq=longest + 1)


@pytest.mark.parametrize("model_type", ["rembert", "roformer", "xlm"])
def test_bidirectional_model_is_refused_as_causal_lm(tmp_path: Path, model_type: str) -> None:
    """The configurations of these models do not say that they are not causal; their outputs show it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    sizes = (
        {"n_layers": 1, "emb_dim": 32, "n_heads": 2}
        if model_type == "xlm"
        else {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    )
    sizes["vocab_size"] = 64  # with RemBERT's own 250,300 ids, the tables alone take 2 GB
    section = ModelSection(hf=str(tmp_path), task="causal-lm", attention="eager", overrides=sizes)
    with pytest.raises(UserError, match="sees the tokens that it is to predict"):
        build_model(section, get_task("causal-lm"), vocab_size=64, seq_len=16, config_overrides={}, seed=0)


@pytest.mark.parametrize(("model_type", "mixes"), [("llama", False), ("gpt2", False), ("opt", True)])
def test_models_with_document_masks(tmp_path: Path, model_type: str, mixes: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    sizes = (
        {"n_layer": 1, "n_embd": 32, "n_head": 2}
        if model_type == "gpt2"
        else {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    )
    section = ModelSection(hf=str(tmp_path), task="causal-lm", overrides=sizes)
    model = build_model(section, get_task("causal-lm"), vocab_size=64, seq_len=16, config_overrides={}, seed=0)
    assert mixes_documents(model) == mixes


def test_encoder_needs_is_decoder_for_causal_lm() -> None:
    encoder = {"preset": "bert-6-encoder", "overrides": {**TINY, "is_decoder": False}}
    with pytest.raises(UserError, match="sees the tokens that it is to predict"):
        make(encoder)
    decoder = make({**encoder, "overrides": {**TINY, "is_decoder": True}}).eval()
    ids = torch.arange(5, 13)[None]
    changed = ids.clone()
    changed[0, -1] = 100
    assert torch.equal(decoder(ids).logits[0, :-1], decoder(changed).logits[0, :-1])


def test_model_without_sdpa_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpnet", **TINY}))
    with pytest.raises(UserError, match=r"model\.attention: mpnet has no sdpa; set eager"):
        make({"hf": str(tmp_path)}, "masked-lm", device="meta")
    make({"hf": str(tmp_path), "attention": "eager"}, "masked-lm", device="meta")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 64}, "did you mean 'hidden_size'"),
        ({"hidden_size": 33}, "model: "),
        ({"hidden_act": "no-such"}, "model: "),
        ({"num_hidden_layers": "two"}, "model: "),
        ({"num_attention_heads": 3}, r"hidden size \(128\) is not a multiple"),
        ({"num_key_value_heads": 3}, r"num_attention_heads = 4 must be a multiple of num_key_value_heads = 3"),
        ({"to_dict": 1}, "has no such key"),
    ],
)
def test_bad_overrides(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make({"preset": "llama-1m", "overrides": overrides}, device="meta")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a tiny GPT-2."""
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=300, n_positions=64)
    torch.manual_seed(3)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_pretrained_weights_are_read_and_can_be_left(folder: Path) -> None:
    want = transformers.GPT2LMHeadModel.from_pretrained(folder)
    read = make({"hf": str(folder)})
    assert torch.equal(read.transformer.wte.weight, want.transformer.wte.weight)
    assert read.training
    assert default_task(ModelSection(hf=str(folder))) == "causal-lm"
    fresh = make({"hf": str(folder), "pretrained": False})
    assert not torch.equal(fresh.transformer.wte.weight, want.transformer.wte.weight)
    from_file = make({"hf": str(folder / "config.json")})
    assert torch.equal(from_file.transformer.wte.weight, fresh.transformer.wte.weight)


def test_masked_lm_becomes_a_classifier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The classifier's pooler is new, because masked-LM models have none."""
    config = transformers.BertConfig(**TINY, vocab_size=300)
    trained = transformers.BertForMaskedLM(config)
    trained.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        classifier = make({"hf": str(tmp_path)}, "classification", config_overrides={"num_labels": 3})
    assert torch.equal(
        classifier.bert.embeddings.word_embeddings.weight, trained.bert.embeddings.word_embeddings.weight
    )
    assert len(caplog.records) == 1
    assert "bert.pooler.dense.bias" in caplog.text
    assert "not taken: cls.predictions.bias" in caplog.text


def test_unexpected_weights_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers.BertForMaskedLM(transformers.BertConfig(**TINY, vocab_size=300)).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        make({"hf": str(tmp_path), "overrides": {"num_hidden_layers": 1}}, "masked-lm")
    assert "not taken: bert.encoder.layer.1" in caplog.text
    assert "12 more" in caplog.text


def test_new_head_warns_and_lost_backbone_raises(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make({"hf": str(folder)}, "classification", config_overrides={"num_labels": 3, "pad_token_id": 0})
    assert "new weights" in caplog.text
    assert "score" in caplog.text
    with pytest.raises(UserError, match=r"lacks .* weights"):
        make({"hf": str(folder), "overrides": {"n_layer": 3}})
    with pytest.raises(UserError, match=r"lacks .* weights"):
        make({"hf": str(folder), "overrides": {"n_embd": 64}})


def test_t5_folder_names_its_task_and_needs_weights(tmp_path: Path) -> None:
    """T5 has no submodule named after its base model, so any missing weight belongs to the backbone."""
    small = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 300}
    trained = transformers.T5ForConditionalGeneration(transformers.T5Config(**small, decoder_start_token_id=0))
    trained.save_pretrained(tmp_path)
    assert default_task(ModelSection(hf=str(tmp_path))) == "seq2seq"
    read = make({"hf": str(tmp_path)}, "seq2seq")
    assert torch.equal(read.shared.weight, trained.shared.weight)
    with pytest.raises(UserError, match=r"lacks .* weights"):
        make({"hf": str(tmp_path), "overrides": {"num_layers": 3}}, "seq2seq")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["T5WithLMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert default_task(ModelSection(hf=str(tmp_path))) == "seq2seq"


@pytest.mark.parametrize(
    ("own", "section", "start"),
    [(2, {}, 2), (None, {}, 1), (2, {"pretrained": False}, 1), (2, {"overrides": {"decoder_start_token_id": 5}}, 5)],
)
def test_decoder_starts_with_the_trained_start_token(
    tmp_path: Path, own: int | None, section: dict[str, Any], start: int
) -> None:
    """In training and in the export: the folder's own token if its weights are loaded, else the data's."""
    sizes = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in TINY_BART.items()}
    config = transformers.BartConfig(**sizes, d_model=16, vocab_size=300)
    transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "decoder_start_token_id": own}))
    of_data = {"pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    model = make({"hf": str(tmp_path), **section}, "seq2seq", config_overrides=of_data)
    assert model.prepare_decoder_input_ids_from_labels(torch.tensor([[7, 2]])).tolist() == [[start, 7]]
    model.save_pretrained(tmp_path / "exported")
    exported = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "exported")
    assert exported.config.decoder_start_token_id == exported.generation_config.decoder_start_token_id == start
    assert exported.generate(torch.tensor([[7, 2]]), max_new_tokens=1)[0, 0] == start


@pytest.mark.parametrize("model_type", ["llama", "gemma", "opt", "mistral"])
@pytest.mark.parametrize(("end", "is_learned"), [(7, True), ([9, 7], True), (9, False)])
def test_padding_equal_to_eos_is_learned(
    tmp_path: Path, model_type: str, end: int | list[int], is_learned: bool
) -> None:
    keys = {**TINY_LLAMA, "head_dim": 16, "ffn_dim": 32, "word_embed_proj_dim": 32, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **keys}))
    of_data = {"pad_token_id": 7, "eos_token_id": end}
    model = make({"hf": str(tmp_path)}, config_overrides=of_data)
    table = model.get_input_embeddings()
    assert table.weight[7].any() == is_learned
    assert (table.padding_idx is None) == is_learned
    if is_learned:
        assert 0.5 < table.weight[7].std() / table.weight.std() < 2
    vectors = table(torch.tensor([5, 7]))
    vectors.sum().backward()
    assert table.weight.grad[7].any() == is_learned
    model.save_pretrained(tmp_path / "saved")
    again = make({"hf": str(tmp_path / "saved")}, config_overrides=of_data)
    assert again.config.pad_token_id == 7
    assert torch.equal(again.get_input_embeddings().weight, table.weight)
    assert (again.get_input_embeddings().padding_idx is None) == is_learned


def test_missing_files_in_a_folder(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*config.json"):
        make({"hf": str(tmp_path / "nothing")})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        make({"hf": str(tmp_path)})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": ["llama"]}))
    with pytest.raises(UserError, match="names no model_type"):
        make({"hf": str(tmp_path)})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(UserError, match="did you mean 'llama'"):
        make({"hf": str(tmp_path)})
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cannot load .*model\.safetensors"):
        make({"hf": str(folder)})
    (folder / "model.safetensors").rename(folder / "weights.bin")
    with pytest.raises(UserError, match="convert them to safetensors"):
        make({"hf": str(folder)})
    with pytest.raises(UserError, match="convert them to safetensors"):
        make({"hf": str(folder), "pretrained": True})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2Model"]}))
    with pytest.raises(UserError, match=r"model\.task"):
        default_task(ModelSection(hf=str(folder)))


def test_code_in_a_model_folder_is_never_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'harmed')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        make({"hf": str(folder)})
    assert "not run" in caplog.text
    assert not (folder / "harmed").exists()
