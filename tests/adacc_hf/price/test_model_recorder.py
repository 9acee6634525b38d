"""ModelRecorder: the kinds of a model's blocks, and the tensors that blocks share."""

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.price.model_recorder import state_storages
from adacc_hf.price.shared_storage import storage_key_of

CONFIG = AdaccConfig(min_compress_bytes=0)


def test_what_a_gpt2_block_saves(gpt2_profile):
    kind = gpt2_profile.kinds[0]
    hidden = 2 * 12 * 32 * 4
    by_name = {value.name: value for value in kind.activations}
    assert by_name["argument 0"].nbytes == hidden
    assert not by_name["argument 0"].recomputable
    assert by_name["mlp.act:tanh"].nbytes == 4 * hidden
    masks = [value for value in kind.activations if value.role == "mask"]
    assert len(masks) == 3
    assert all(value.recomputable for value in kind.activations if value.producer is not None)
    states = [value for value in kind.values if value.is_generator_state]
    assert len(states) == len(masks)
    assert kind.forward_ms == pytest.approx(sum(operator.ms for operator in kind.operators))
    assert all(operator.ms > 0 for operator in kind.operators if operator.replayable)
    assert run_block(kind, recompute_plan(kind)).stored_bytes == hidden + len(states) * torch.get_rng_state().nbytes


def test_the_mask_is_shared_by_all_blocks(tiny_gpt2, token_batch):
    batch = token_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -2:] = 0
    profile = profile_model(tiny_gpt2("eager", layers=3), batch, CONFIG)
    masks = [shared for shared in profile.shared if shared.nbytes >= 2 * 12 * 12]
    assert len(masks) == 1
    used_shared_tensors = {value.shared for kind in profile.kinds for value in kind.values if value.shared is not None}
    assert profile.shared.index(masks[0]) in used_shared_tensors


def test_an_empty_parameter_is_no_state():
    """Under ZeRO 3, a parameter that is not gathered has an empty storage, which is freed when it is gathered."""
    model = torch.nn.Linear(2, 2)
    model.bias.data = torch.empty(0)
    assert state_storages(model) == {storage_key_of(model.weight)}
