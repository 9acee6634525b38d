from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, GPT2Config, LlamaConfig

from adacc_hf.estimate.model_presets import build_model, checked_seq_len, context_length, load_config


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_a_fresh_model_takes_vocabulary_attention_and_seed(attn_implementation: str):
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(build_model("demo", load_config("demo"), 300, 7, attn_implementation, pretrained=False))
    same, again, other = (model.get_input_embeddings().weight for model in models)
    assert same.shape == (300, 256)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)
    assert models[0].config.eos_token_id == 7
    assert models[0].config._attn_implementation == attn_implementation


def tiny_llama(folder: Path) -> str:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    build_model("tiny", config, 64, 0, "sdpa", pretrained=False).save_pretrained(folder)
    return str(folder)


def test_a_folder_gives_fresh_or_pretrained_weights(tmp_path: Path):
    name = tiny_llama(tmp_path / "llama")
    fresh, loaded_weight, again = (
        build_model(name, load_config(name), 64, 0, "sdpa", pretrained=pretrained).lm_head.weight
        for pretrained in (False, True, True)
    )
    assert torch.equal(loaded_weight, again)
    assert not torch.equal(fresh, loaded_weight)


def test_pretrained_weights_need_room_for_the_vocabulary(tmp_path: Path):
    name = tiny_llama(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"--tokenizer has 65 tokens but --model=.* embeds only 64"):
        build_model(name, load_config(name), 65, 0, "sdpa", pretrained=True)


def test_a_preset_has_no_pretrained_weights():
    with pytest.raises(ValueError, match=r"--from_pretrained needs a hub id .* --model=demo is a preset"):
        build_model("demo", load_config("demo"), 300, 0, "sdpa", pretrained=True)


def test_sequence_length_defaults_to_the_context():
    assert context_length(BloomConfig()) is None
    assert checked_seq_len(None, GPT2Config(n_positions=48)) == 48
    assert checked_seq_len(2, GPT2Config(n_positions=48)) == 2
    assert checked_seq_len(4096, BloomConfig()) == 4096


@pytest.mark.parametrize(
    ("seq_len", "config", "message"),
    [
        (49, GPT2Config(n_positions=48), r"--seq_len=49 is outside its range \(2 to 48, the model's context\)"),
        (1, GPT2Config(n_positions=48), r"--seq_len=1 is outside its range \(2 to 48"),
        (1, BloomConfig(), r"--seq_len=1 is outside its range \(at least 2\)"),
        (None, BloomConfig(), r"--seq_len must be set"),
    ],
    ids=["over-context", "no-label", "no-label-unbounded", "unknown-context"],
)
def test_sequence_length_out_of_range(seq_len: int | None, config: GPT2Config | BloomConfig, message: str):
    with pytest.raises(ValueError, match=message):
        checked_seq_len(seq_len, config)


def test_a_configuration_with_a_wrong_value_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": "wide"}')
    with pytest.raises(ValueError, match=r"--model=.* has a configuration with an invalid value: .*n_embd"):
        load_config(str(tmp_path))
