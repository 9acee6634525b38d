"""Predictions of torch's checkpoint from a profile, against torch's checkpoint."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.block_outcome import rerun_ms, run_block
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy
from adacc_hf.torch_glue.memory import measure_step
from adacc_hf.torch_glue.private import TorchDispatchMode

SIZES = {"vocab_size": 128, "bos_token_id": None, "eos_token_id": None}
CONFIGS = {
    "gpt2 with dropout": GPT2Config(n_layer=4, n_embd=64, n_head=4, n_positions=128, **SIZES),
    "gpt2 eager": GPT2Config(n_layer=4, n_embd=64, n_head=4, n_positions=128, **SIZES),
    "llama": LlamaConfig(
        num_hidden_layers=4, hidden_size=64, intermediate_size=176, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, **SIZES,
    ),
}  # fmt: skip


def profile_case(name, rows, tokens):
    """Return a model of CONFIGS, a batch for it, and its profile."""
    torch.manual_seed(0)
    attention = "eager" if "eager" in name else "sdpa"
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention).train()
    model.config.use_cache = False
    ids = torch.randint(0, 128, (rows, tokens))
    batch = {"input_ids": ids, "labels": ids.clone()}
    return model, batch, profile_model(model, batch, AdaccConfig(actions=("retain", "recompute")))


def put_under_checkpoint(model, name):
    for block in model.get_submodule("transformer.h" if "gpt2" in name else "model.layers"):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpointed_step_is_predicted(name, one_thread):
    model, batch, profile = profile_case(name, 8, 128)
    policy = checkpoint_policy(profile)
    put_under_checkpoint(model, name)
    step_memory = measure_step(model, batch)
    # Besides a block's input, torch's checkpoint keeps the random generator's state, which is on the CPU here, and the
    # block's positions.
    besides = 4 * (torch.get_rng_state().nbytes + 512)
    assert 0 <= step_memory.stored_bytes - policy.predicted_stored_bytes <= besides
    assert 0 <= step_memory.peak_bytes - policy.predicted_peak_bytes <= besides
    # Replay differs where masks cannot be recomputed.
    replayed = uniform_policy(profile, "recompute")
    if "gpt2" in name:
        assert replayed.predicted_stored_bytes > policy.predicted_stored_bytes


def test_forward_and_head_hold_the_inputs_of_blocks_alone(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=3)
    (kind,) = profile.kinds
    policy = uniform_policy(profile, "retain")
    plain = run_block(kind, policy.plan_of(profile.blocks[0].name))
    input_bytes = sum(value.nbytes for value in kind.activations if value.producer is None)
    assert 0 < input_bytes < plain.live_bytes
    policies = (policy, checkpoint_policy(profile))
    retained, checkpointed = (dict(simulate_policy(profile, each).timeline) for each in policies)
    more = plain.live_bytes - input_bytes
    assert retained["head and loss"] - checkpointed["head and loss"] == 3 * more


class _Products(TorchDispatchMode):
    """A mode that counts matrix products."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_second_forward_ends_with_the_last_tensor_saved(name, one_thread):
    """The second forward ends with the last saved tensor: predicted times have the products that torch repeats."""
    model, batch, profile = profile_case(name, 2, 32)
    (kind,) = profile.kinds
    is_product = [operator.name.split(".")[1] in ("mm", "addmm", "bmm") for operator in kind.operators]
    # With a millisecond for each product and none for other operators, the time is the number of products.
    unit_price_profile = replace(
        kind,
        operators=tuple(replace(op, ms=float(is_one)) for op, is_one in zip(kind.operators, is_product, strict=True)),
    )

    def products():
        with _Products() as counter:
            model(**batch).loss.backward()
        return counter.number

    plain = products()
    put_under_checkpoint(model, name)
    assert products() - plain == len(profile.blocks) * rerun_ms(unit_price_profile)
    # Dropout at the end of a block saves its mask, which needs the whole forward; Llama ends with a product.
    assert (rerun_ms(unit_price_profile) < sum(is_product)) == (name == "llama")
