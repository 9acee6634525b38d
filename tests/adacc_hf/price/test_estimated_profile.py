"""Small parts of a batch: few, small, and with sizes that separate the effects of samples and lengths."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.step_time import plain_blocks_ms
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.price.batch_subsampling import Batch, move_media_first, small_parts
from adacc_hf.price.estimated_profile import describe_duration, estimate_profile, predict_duration, resize_profile
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.tape import guards

LOSSLESS = AdaccConfig(actions=("retain", "recompute"), head="plain")


def texts(samples, tokens, labels):
    return {"input_ids": torch.zeros(samples, tokens).long(), "labels": torch.zeros(samples, labels).long()}


def masked(samples, length):
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return mask


def sounds(samples, length, tokens):
    labels = torch.ones(samples, tokens, dtype=torch.long)
    return {"input_values": torch.randn(samples, length), "attention_mask": masked(samples, length), "labels": labels}


def sizes_of(batch):
    return tuple(shape.size for shape in batch.shapes)


@given(samples=st.integers(1, 40), tokens=st.integers(16, 300), labels=st.integers(16, 300), is_pair=st.booleans())
def test_no_part_is_larger_than_about_half(samples, tokens, labels, is_pair):
    """No part is larger than about half of the batch: lengths are rounded up, and aligned ones are not cut below 16
    tokens."""
    batch = Batch(texts(samples, tokens, labels if is_pair else tokens))
    for parts in small_parts(batch, has_pairs=is_pair):
        assert len(set(map(sizes_of, parts))) == len(parts) <= 6
        amounts = [sum(map(prod, sizes_of(part))) for part in parts]
        assert amounts == sorted(amounts)
        if tokens >= 48 and labels >= 48:
            assert amounts[-1] <= 0.75 * sum(map(prod, sizes_of(batch)))


@given(samples=st.integers(2, 40), tokens=st.integers(17, 300), labels=st.integers(17, 300))
def test_the_lengths_of_a_pair_vary_by_themselves(samples, tokens, labels):
    parts = [sizes_of(part) for part in small_parts(Batch(texts(samples, tokens, labels)), has_pairs=True)[0]]
    lengths = [(first[1], second[1]) for first, second in parts]
    assert len({(first[0], first[1]) for first, _ in parts}) >= 4
    assert len({(second[0], second[1]) for _, second in parts}) >= 4
    ratios = {round(first / second, 2) for first, second in lengths}
    assert len(ratios) >= 3


def test_labels_that_are_no_longer_than_their_text_vary_with_it():
    parts = small_parts(Batch(texts(4, 100, 100)))[0]
    assert all(first == second for first, second in map(sizes_of, parts))


def several_texts(samples, **lengths):
    batch = {f"{name}_input_ids": torch.ones(samples, length).long() for name, length in lengths.items()}
    return batch | {f"{name}_attention_mask": masked(samples, length) for name, length in lengths.items()}


@given(samples=st.integers(2, 40), lengths=st.lists(st.integers(17, 300), min_size=2, max_size=5, unique=True))
def test_the_lengths_of_several_texts_vary_by_themselves(samples, lengths):
    batch = Batch(several_texts(samples, **{f"text{i}": length for i, length in enumerate(lengths)}))
    for parts in small_parts(batch):
        assert all(
            part.tensors[f"text{i}_input_ids"].shape == part.tensors[f"text{i}_attention_mask"].shape
            for part in parts
            for i in range(len(lengths))
        )
        cut = [[part.tensors[f"text{i}_input_ids"].shape for i in range(len(lengths))] for part in parts]
        assert all(len(set(sizes)) >= 4 for sizes in zip(*cut, strict=True))
        for first, second in zip(range(len(lengths) - 1), range(1, len(lengths)), strict=True):
            assert len({round(sizes[first][1] / sizes[second][1], 2) for sizes in cut}) >= 3


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": (4, 100), "attention_mask": (4, 100), "completion_mask": (4, 100)},
        {"input_ids": (4, 100), "mm_token_type_ids": (4, 100), "sequence_ids": (4, 90)},
        {"anchor_input_ids": (4, 100), "positive_input_ids": (4, 100)},
    ],
    ids=["mask", "main text", "equal lengths"],
)
def test_tensors_of_one_text_are_cut_alike(batch):
    for parts in small_parts(Batch({name: torch.ones(size).long() for name, size in batch.items()})):
        for part in parts:
            lengths = {name: tensor.shape[1] for name, tensor in part.tensors.items()}
            assert all(lengths[name] == lengths[min(batch)] for name in batch if batch[name] == batch[min(batch)])


def triplet_loss(model, batch):
    """Return a loss for which the model is called on three texts, as sentence-transformers does."""
    names = [name.removesuffix("_input_ids") for name in batch if name.endswith("_input_ids")]
    texts = [model(batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"])[0].mean(1) for name in names]
    return torch.nn.functional.triplet_margin_loss(*texts)


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=61, **sizes), add_pooling_layer=False).train()


def test_three_texts_of_any_lengths_are_predicted(one_thread):
    """sentence-transformers pads the texts of a triplet separately."""
    step = TrainingStep(compute_loss=triplet_loss)
    profile = estimate_profile(bert(), several_texts(16, anchor=22, positive=118, negative=116), LOSSLESS, step)
    for lengths in ({"anchor": 24, "positive": 97, "negative": 60}, {"anchor": 17, "positive": 40, "negative": 131}):
        batch = several_texts(16, **lengths)
        sizes = profile.sizes.size_class(Batch(batch).sizes)
        assert sizes is not None
        assert all(upper >= own for (_, upper), (_, own) in zip(sizes, Batch(batch).sizes, strict=True))
        predicted = resize_profile(profile, Batch(batch).sizes)
        whole = profile_model(bert(), batch, LOSSLESS, compute_loss=triplet_loss)
        stored, expected = (
            [sum(v.nbytes for v in each.kind_of(block).activations if v.saved) for block in each.blocks]
            for each in (predicted, whole)
        )
        assert stored == expected
        for action in ("retain", "recompute"):
            peak, expected = (uniform_policy(each, action).predicted_peak_bytes for each in (predicted, whole))
            assert peak == pytest.approx(expected, rel=profile.sizes.uncertainty)


@settings(max_examples=25, deadline=None)
@given(samples=st.integers(1, 6), length=st.integers(400, 100_000))
def test_sounds_are_cut_to_lengths_with_features_in_proportion(samples, length):
    """All lengths differ by multiples of a model's stride of 320, from about 2,560 values on."""
    for parts in small_parts(Batch(sounds(samples, length, 9))):
        cut = sorted({part.tensors["input_values"].shape[1] for part in parts})
        assert len(cut) >= 3
        assert cut[0] >= length // 8
        assert length < 2560 or all((length - shorter) % 320 == 0 for shorter in cut)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_few_images_have_none(samples):
    batch = Batch({"pixel_values": torch.zeros(samples, 3, 32, 32), "labels": torch.zeros(samples)})
    assert small_parts(batch) == []


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=256, use_cache=False))


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, use_cache=False, **sizes))


def vit():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=4, **sizes))


def wav2vec2():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    convolutions = {"conv_dim": (8,) * 7, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    return Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=32, layerdrop=0.0, mask_time_prob=0.0, **sizes, **convolutions))


CASES = [(gpt2, texts(samples, tokens, tokens), 0.03) for samples, tokens in ((1, 120), (2, 90), (3, 40), (5, 100))]
CASES += [
    (t5, texts(samples, *lengths), 0.01) for samples, *lengths in ((1, 80, 80), (2, 80, 40), (4, 120, 15), (4, 60, 60))
]
CASES += [(vit, {"pixel_values": torch.zeros(4, 3, 32, 32), "labels": torch.zeros(4).long()}, 0.01)]


@pytest.mark.parametrize(("build", "batch", "tolerance"), CASES)
def test_what_they_tell_is_what_the_whole_batch_takes(build, batch, tolerance, one_thread, without_onednn):
    """Peaks predicted from parts agree with the whole batch's, for plain training and full recomputation.

    Stored bytes are sums of products of sizes, and exact.
    """
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters())
    estimate = estimate_profile(model, batch, LOSSLESS, TrainingStep(optimizer=optimizer))
    whole_profile = profile_model(model, batch, LOSSLESS, optimizer)
    for action in ("retain", "recompute"):
        ours, real = uniform_policy(estimate, action), uniform_policy(whole_profile, action)
        assert ours.predicted_stored_bytes == real.predicted_stored_bytes
        assert ours.predicted_peak_bytes == pytest.approx(real.predicted_peak_bytes, rel=tolerance)
    assert estimate.sizes.size_class(estimate.measured[0][0]) is not None


@pytest.mark.parametrize(("samples", "length"), [(4, 31148), (2, 16001)])
def test_sounds_are_predicted(samples, length, one_thread, without_onednn):
    """Attention's memory grows with the square of the number of features, which is linear in the length of a sound,
    and rounded down. Bytes outside the blocks have too many terms for an exact fit: their error was up to 3,759 bytes.
    """
    model, batch = wav2vec2().train(), sounds(samples, length, 19)
    estimate, whole_profile = estimate_profile(model, batch, LOSSLESS), profile_model(model, batch, LOSSLESS)
    for action in ("retain", "recompute"):
        ours, real = uniform_policy(estimate, action), uniform_policy(whole_profile, action)
        assert ours.predicted_stored_bytes == pytest.approx(real.predicted_stored_bytes, abs=4096)
        assert ours.predicted_peak_bytes == pytest.approx(real.predicted_peak_bytes, rel=0.01)
    for shorter in (0.55, 0.8):
        shapes = tuple((name, (size[0], int(size[1] * shorter))) for name, size in estimate.measured[0][0])
        (bound,) = {dict(estimate.sizes.size_class(shapes))["input_values"][1]}
        assert (length - bound) % 320 == 0
        assert bound >= shorter * length - 1


TABLE = architectures()


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("gpt2", {"inputs_embeds": torch.zeros(4, 60, 32), "labels": torch.zeros(4, 60).long()}),
        ("gpt2", {"inputs_embeds": torch.zeros(3, 45, 32), "attention_mask": masked(3, 45), "labels": masked(3, 45)}),
        (
            "speech_to_text",
            {"input_features": torch.zeros(4, 203, 8), "attention_mask": masked(4, 203), "labels": masked(4, 24)},
        ),
    ],
    ids=["embeddings", "masked-embeddings", "speech"],
)
def test_sequences_of_vectors_are_cut_with_their_masks(name, batch, one_thread, without_onednn):
    model = gpt2().train() if name == "gpt2" else TABLE[name].build().train()
    estimate, whole_profile = estimate_profile(model, batch, LOSSLESS), profile_model(model, batch, LOSSLESS)
    for action in ("retain", "recompute"):
        ours, real = uniform_policy(estimate, action), uniform_policy(whole_profile, action)
        assert ours.predicted_stored_bytes == real.predicted_stored_bytes
        assert ours.predicted_peak_bytes == pytest.approx(real.predicted_peak_bytes, rel=0.03)  # a max of sums


def four_samples(name):
    first, second = (TABLE[name].make_batch(seed) for seed in range(2))
    return {key: torch.cat([value, second[key]]) for key, value in first.items()}


@pytest.mark.parametrize("name", ["whisper", "smolvlm", "gemma3"])
def test_features_and_images_are_told_of(name, one_thread, without_onednn):
    """Batches with features or images are predicted.

    Memory that grows with samples alone is a term next to the term of texts; images are in the text, and parts keep
    them there.
    """
    model, batch = TABLE[name].build().train(), four_samples(name)
    estimate, whole_profile = estimate_profile(model, batch, LOSSLESS), profile_model(model, batch, LOSSLESS)
    for action in ("retain", "recompute"):
        ours, real = uniform_policy(estimate, action), uniform_policy(whole_profile, action)
        assert ours.predicted_peak_bytes == pytest.approx(real.predicted_peak_bytes, rel=0.05)


def test_positions_of_images_come_first_and_are_never_cut():
    model, batch = TABLE["smolvlm"].build(), four_samples("smolvlm")
    moved, num_media = move_media_first(model, Batch(batch))
    sorted_batch = moved.tensors
    token = model.config.image_token_id
    is_media = (batch["input_ids"] == token).any(0)
    assert num_media == int(is_media.sum()) > 0
    assert (sorted_batch["input_ids"][:, :num_media] == batch["input_ids"][:, is_media]).all()
    assert torch.equal(sorted_batch["labels"][:, num_media:], batch["labels"][:, ~is_media])
    for part in (part.tensors for part in small_parts(moved, num_media)[0]):
        assert part["input_ids"].shape[1] > num_media
        assert len(part["pixel_values"]) == len(part["input_ids"])
    assert move_media_first(gpt2(), Batch(texts(2, 20, 20)))[1] == 0


def test_a_vision_tower_that_collects_hidden_states_is_traced_once(one_thread, monkeypatch):
    """A vision tower that collects hidden states is traced once.

    Transformers registers the collecting hooks once, also if runs outside of training come first. New hooks in each
    forward would fit no trace.
    """
    traced_scopes, original = [], guards.trace
    monkeypatch.setattr(guards, "trace", lambda *args, **kwargs: traced_scopes.append(1) or original(*args, **kwargs))
    model = TABLE["llava"].build().train()
    estimate_profile(model, four_samples("llava"), LOSSLESS)
    blocks = [m for m in model.modules() if type(m).__name__ in ("CLIPEncoderLayer", "LlamaDecoderLayer")]
    assert 0 < len(traced_scopes) <= len(blocks)


@pytest.mark.parametrize("profile", [estimate_profile, profile_model])
def test_what_a_profile_ran_on_is_freed_at_once(profile, one_thread):
    """Parts are freed at once by reference counts.

    Waiting for garbage collection would leave a step less memory by the size of a batch.
    """
    model, batch = gpt2(), {name: ids.clone() for name, ids in texts(4, 80, 80).items()}
    gc.collect()
    gc.disable()
    try:
        profile(model.train(), batch, LOSSLESS)
        tensor_refs = [weakref.ref(tensor) for tensor in batch.values()]
        del batch
        assert [ref() for ref in tensor_refs] == [None, None]
    finally:
        gc.enable()


def fake_part(elements):
    return Batch({"input_ids": torch.zeros(1, elements, dtype=torch.long)})


def test_the_time_of_a_profile_is_told_in_seconds_and_steps(gpt2_like_profile):
    """The first part took 2 s and its step 100 ms. The other parts have 2 and 3 times its elements."""
    first = replace(gpt2_like_profile(num_blocks=2), step_ms=100.0, head_ms=2.0, other_heads=())
    parts, whole = [fake_part(n) for n in (16, 32, 48)], fake_part(160)
    seconds, num_steps = predict_duration(parts, whole, first, first_seconds=2.0)
    assert seconds == pytest.approx(2.0 + 2.5 * 0.1 * 5)
    assert num_steps == pytest.approx(1e3 * seconds / ((plain_blocks_ms(first) + 2.0) * 10))
    slow = replace(first, step_ms=200.0)
    slow_seconds, slow_steps = predict_duration(parts, whole, slow, first_seconds=2.0)
    assert slow_steps / slow_seconds == pytest.approx(num_steps / seconds), "the measured step records its memory"
    assert describe_duration(3, 3.25, 4.3) == (
        "profiling takes about 3.2 s in all, as long as about 4 plain steps on this batch (estimated after 1 of 3 "
        "small parts of the batch)"
    )
    assert "steps" not in describe_duration(3, 1.0, 0.0)


def test_the_time_of_a_profile_is_announced_once(tiny_gpt2, token_batch, caplog, one_thread):
    estimate_profile(tiny_gpt2(), token_batch(8, 32), AdaccConfig())
    assert sum(message.startswith("Adacc: profiling takes about ") for message in caplog.messages) == 1


@pytest.mark.parametrize("is_small", [True, False], ids=["too-small", "large"])
def test_parts_that_are_predicted_to_exceed_the_budget_are_a_warning(
    tiny_gpt2, token_batch, caplog, one_thread, is_small
):
    """The smallest parts of a small batch may take more memory to profile than the budget allows."""
    budget = 65536 if is_small else 2**30
    estimate_profile(tiny_gpt2(), token_batch(2, 8), replace(LOSSLESS, memory_budget=budget))
    is_warned = [
        f"memory_budget={budget} allows, because the batch has no smaller parts" in record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING" and record.name.startswith("adacc_hf")
    ]
    assert is_warned == ([True] if is_small else [])
