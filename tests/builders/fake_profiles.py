"""Profiles of small models on a GPU that is not there."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig

from adacc_hf import Profile, profile_model
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_device import fake_autocast
from adacc_hf.estimate.fake_measurement import FakeMeasurement


def gpt2(width: int, layers: int) -> PretrainedConfig:
    """Return the configuration of a small GPT-2."""
    return GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, n_positions=64, vocab_size=500, bos_token_id=0, eos_token_id=0
    )


def profile_on_cuda(config: PretrainedConfig) -> Profile:
    """Return the profile of a model on an H100 that is not there. Call this under `fake_tensors("cuda")`."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    model.config.use_cache = False
    ids = torch.zeros((2, 48), dtype=torch.long)
    with fake_autocast("cuda", torch.bfloat16):
        return profile_model(
            model, {"input_ids": ids, "labels": ids.clone()}, measurement=FakeMeasurement(find_device("h100"))
        )
