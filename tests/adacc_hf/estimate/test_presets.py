"""Presets and configurations: parameters, models that are not known, lengths of sequences."""

from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, GPT2Config

from adacc_hf.estimate.presets import PRESETS, check_model, checked_seq_len, context_length, fresh_model, load_config


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("demo", 4_935_680),
        ("gpt2-117m", 124_439_808),  # GPT-2 small and medium, as published
        ("gpt2-345m", 354_823_168),
        ("gpt2-4.7b", 4_688_987_136),
        ("llama-1b", 1_235_814_400),  # Llama 3.2 1B and T5 Base, as published
        ("t5-base", 222_903_552),
    ],
)
def test_presets_have_their_parameter_counts(name: str, num_parameters: int):
    with torch.device("meta"):
        model = fresh_model(load_config(name), "sdpa")
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


@pytest.mark.parametrize("name", [name for name in PRESETS if "gpt2" in name or name == "demo"])
def test_gpt_presets_train_with_dropout(name: str):
    config = load_config(name)
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1


def test_a_preset_and_a_folder_are_known(tmp_path: Path):
    GPT2Config().save_pretrained(tmp_path)
    check_model("llama3-8b")
    check_model(str(tmp_path))


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_a_fresh_model_takes_attention_and_seed(attn_implementation: str):
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(fresh_model(load_config("demo"), attn_implementation))
    same, again, other = (model.get_input_embeddings().weight for model in models)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)
    assert models[0].config._attn_implementation == attn_implementation


def test_sequence_length_defaults_to_the_context():
    assert context_length(BloomConfig()) is None
    assert checked_seq_len(None, GPT2Config(n_positions=48)) == 48
    assert checked_seq_len(2, GPT2Config(n_positions=48)) == 2
    assert checked_seq_len(4096, BloomConfig()) == 4096


def test_a_configuration_with_a_wrong_value_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": "wide"}')
    with pytest.raises(ValueError, match=r"--model=.* has a configuration with an invalid value: .*n_embd"):
        load_config(str(tmp_path))
