"""The chunked output layer on Transformers' models."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.head.head import ChunkedHead

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=61, d_model=32, d_ff=64, d_kv=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ),
}
"""Models whose loss does not need logits: tied weights, a bias, Transformers' loss and a custom one."""

WHOLE = {
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16)),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(vocab_size=61, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, **BART)
    ),
}
"""Models that compute with their logits: a soft cap, a bias added to the logits."""


@pytest.fixture
def batch(token_batch):
    batch = token_batch()
    labels = batch["labels"].clone()
    labels[0, 3:5] = -100
    return {"input_ids": batch["input_ids"], "labels": labels}


def build(make):
    torch.manual_seed(0)
    model = make().train()
    model.config.use_cache = False
    return model


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_items", [None, 17], ids=["mean", "num_items"])
@pytest.mark.parametrize("name", MODELS)
def test_a_chunked_step_is_plain_training_but_for_the_order_of_sums(name, num_items, autocast, batch, run_steps):
    model = build(MODELS[name])
    if num_items is not None:
        batch["num_items_in_batch"] = num_items
    plain = run_steps(model, batch, num_steps=1, autocast=autocast)
    head = ChunkedHead(model)
    (ours,) = run_steps(model, batch, num_steps=1, autocast=autocast)
    head.remove()
    assert (head.num_losses, head.num_full_logits) == (1, 0)
    # In bfloat16 the logits themselves are rounded, by 2**-9, and sums of them differ.
    tolerance = 1e-5 if autocast is None else 2**-6
    gradients = [tensor for key, tensor in plain[0].items() if key in dict(model.named_parameters())]
    largest = max(gradient.norm() for gradient in gradients)
    for key, expected in plain[0].items():
        if key == "generator" or "(buffer)" in key:
            assert torch.equal(ours[key], expected)
        elif key == "loss":
            torch.testing.assert_close(ours[key], expected, rtol=1e-5, atol=0)
        else:
            assert (ours[key] - expected).norm() <= tolerance * largest, key


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_that_computes_with_its_logits_is_trained_plainly(name, batch, run_steps, assert_same_steps):
    model = build(WHOLE[name])
    plain = run_steps(model, batch, num_steps=1)
    head = ChunkedHead(model)
    assert_same_steps(run_steps(model, batch, num_steps=1), plain)
    assert (head.num_losses, head.num_full_logits) == (0, 1)


@pytest.mark.parametrize("case", ["eval", "no_grad", "off"])
def test_what_is_no_training_step_is_plain(case, batch, tiny_gpt2):
    model = tiny_gpt2()
    head = ChunkedHead(model)
    model.train(case != "eval")
    head.is_on = case != "off"
    with torch.set_grad_enabled(case != "no_grad"):
        output = model(**batch)
    assert type(output.logits) is torch.Tensor
    assert (head.num_losses, head.num_full_logits) == (0, 0)


def test_reading_the_logits_of_a_step_gives_the_real_ones_and_says_so_once(batch, tiny_gpt2, caplog):
    model = tiny_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    expected = model(**batch).logits
    head = ChunkedHead(model)
    for _ in range(2):
        assert torch.equal(model(**batch).logits, expected)
    assert (head.num_losses, head.num_full_logits) == (2, 2)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_a_copy_and_a_file_run_plainly(batch, tiny_gpt2):
    model = tiny_gpt2()
    head = ChunkedHead(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied(**batch).logits) is torch.Tensor
        assert copied.lm_head.forward.layer is copied.lm_head
    assert head.num_losses == 0


class MyLinear(nn.Linear):
    """An output layer that may compute anything."""


@pytest.mark.parametrize("case", ["no language model", "none", "subclass", "replaced", "sharded"])
def test_a_head_that_cannot_be_chunked_is_refused_with_the_reason(case, tiny_gpt2):
    model, reason = tiny_gpt2(), None
    if case == "no language model":
        model, reason = nn.Linear(2, 2), "Linear has no output layer"
    elif case == "none":
        model, reason = (
            BertForSequenceClassification(BertConfig(**SIZES)),
            "BertForSequenceClassification has no output",
        )
    elif case == "sharded":
        model.lm_head.weight.ds_id, reason = 0, r"only during its forward \(ZeRO 3\)"
    elif case == "subclass":
        model.lm_head, reason = MyLinear(32, 61), "the output layer is a MyLinear, not a plain nn.Linear"
    else:
        model.lm_head.forward, reason = model.lm_head.forward, "was replaced by other code"
    with pytest.raises(ChunkedHeadError, match=reason):
        ChunkedHead(model)
