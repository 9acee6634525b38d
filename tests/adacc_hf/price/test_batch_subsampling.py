"""Parts of the profiled batch, on which the model's blocks are recorded."""

from math import prod

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.price.batch_subsampling import ALIGNED, Batch, is_encoder_decoder, profiled_parts, small_parts
from adacc_hf.torch_glue.batch_shapes import TensorShape

CONFIG = AdaccConfig(min_compress_bytes=0)


@pytest.fixture
def parts_of():
    """`parts_of(model, batch)`: the parts of the batch on which a profile measures other sizes."""

    def parts(model, batch):
        return [part.tensors for part in profiled_parts(Batch(batch), is_encoder_decoder(model))]

    return parts


def sizes(parts, name="input_ids"):
    return [tuple(part[name].shape) for part in parts]


def test_parts_have_fewer_samples_and_tokens(tiny_gpt2, token_batch, parts_of):
    parts = parts_of(tiny_gpt2(), token_batch(4, 40))
    assert all(samples <= 4 and tokens < 40 for samples, tokens in sizes(parts))
    assert len({samples for samples, _ in sizes(parts)} | {4}) > 1
    assert len({tokens for _, tokens in sizes(parts)}) == len(parts) >= 2
    assert sizes(parts, "labels") == sizes(parts)


@pytest.mark.parametrize("tokens", [16, 32, 33, 40, 48, 64, 100, 1040])
@pytest.mark.parametrize("samples", [6, 8, 16, 64])
def test_few_samples_are_aligned_as_the_batch_is(samples, tokens):
    """Few samples have the alignment of the batch. Otherwise their tapes would not fit the batch on a GPU.

    The batch would then be recorded as a whole.
    """
    batch = Batch({"input_ids": torch.zeros(samples, tokens, dtype=torch.long, device="meta")})  # like a GPU's tensors
    parts, *smaller = ([part.tensors for part in each] for each in small_parts(batch))
    assert len(parts) == (2 if tokens == ALIGNED else 3)  # aligned lengths are not cut
    assert [len(others) for others in smaller] == ([5] if tokens in (33, 40, 100, 1040) else [])  # 3 lengths
    for one in (parts, *smaller):
        assert all((size[1] % ALIGNED == 0) == (tokens % ALIGNED == 0) for size in sizes(one))
        assert len(set(sizes(one))) == len(one)
        assert max(map(prod, sizes(one))) < samples * tokens
    assert all(max(map(prod, sizes(others))) < max(map(prod, sizes(parts))) for others in smaller)


def test_nothing_is_left_of_the_parts(tiny_gpt2, token_batch):
    model = tiny_gpt2()
    before = torch.get_rng_state()
    profile_model(model, token_batch(4, 40), CONFIG, all_sizes=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert not [parameter for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("side", [slice(0, 3), slice(-3, None)], ids=["left", "right"])
def test_padding_masks_stay_masks(tiny_llama, token_batch, parts_of, side):
    """Padding masks of parts have padding. Models drop a mask without padding, and with it the operators that read
    it."""
    batch = token_batch(4, 40)
    mask = torch.ones_like(batch["input_ids"])
    mask[2, side] = 0
    parts = parts_of(tiny_llama(), {**batch, "attention_mask": mask})
    assert len(parts) >= 2
    for part in parts:
        assert part["attention_mask"].shape == part["input_ids"].shape
        assert part["attention_mask"].dtype == mask.dtype
        assert not part["attention_mask"][:, 0 if side.stop else -1].all()
        assert part["attention_mask"].any(dim=1).all()


@pytest.mark.parametrize("name", ["prompt_mask", "completion_mask"])
def test_masks_of_any_name_stay_masks(name):
    """GRPO's Trainer joins the masks of prompts and completions, and passes the result to the model."""
    batch = Batch({"ids": torch.zeros(4, 40, dtype=torch.long), name: torch.ones(4, 40, dtype=torch.long)})
    batch.tensors[name][3, -5:] = 0
    part = batch.resized([TensorShape(shape.name, (2, 24)) for shape in batch.shapes])
    assert part.tensors[name].shape == (2, 24)
    assert not part.tensors[name].all()


def test_a_mask_that_masks_nothing_stays_one(tiny_llama, token_batch, parts_of):
    batch = token_batch(4, 40)
    mask = torch.ones_like(batch["input_ids"])
    assert all(part["attention_mask"].all() for part in parts_of(tiny_llama(), {**batch, "attention_mask": mask}))


def test_the_batch_is_left_as_it_is(tiny_llama, token_batch, parts_of):
    batch = token_batch(4, 40)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][2, -3:] = 0
    before = {name: tensor.clone() for name, tensor in batch.items()}
    parts_of(tiny_llama(), batch)
    assert all(torch.equal(batch[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("targets", [40, 36], ids=["equal", "different"])
def test_a_pair_of_texts_gets_two_lengths(parts_of, one_thread, targets):
    """A pair of texts gets two different lengths, even if they are equal in the batch.

    Otherwise a decoder's tape could not distinguish them.
    """
    ids = torch.randint(5, 60, (4, 40), generator=torch.Generator().manual_seed(0))
    parts = parts_of(architectures()["t5"].build(), {"input_ids": ids, "labels": ids[:, :targets].clone()})
    assert len(parts) >= 2
    assert all(part["input_ids"].shape[1] != part["labels"].shape[1] for part in parts)
    differences = {part["input_ids"].shape[1] - part["labels"].shape[1] for part in parts}
    assert len(differences) > 1  # and neither length follows from the other


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_of_a_pair_of_texts_peaks_are_told_less_exactly(one_thread, name):
    """Peaks of text pairs are less exact: samples and two lengths have more terms than the measured parts determine."""
    ids = torch.randint(5, 60, (4, 40), generator=torch.Generator().manual_seed(0))
    model = architectures()[name].build()
    profile = profile_model(model, {"input_ids": ids, "labels": ids}, CONFIG, all_sizes=True)
    assert profile.sizes.uncertainty == (0.04 if name == "t5" else 0.01)


def test_batches_of_one_sample_have_parts_of_other_lengths(tiny_gpt2, token_batch, parts_of):
    parts = parts_of(tiny_gpt2(), token_batch(1, 40))
    assert {samples for samples, _ in sizes(parts)} == {1}
    assert len({tokens for _, tokens in sizes(parts)}) == len(parts) >= 2


def test_short_texts_are_not_cut(tiny_gpt2, token_batch, parts_of):
    assert all(tokens == 5 for _, tokens in sizes(parts_of(tiny_gpt2(), token_batch(4, 5))))
    assert parts_of(tiny_gpt2(), token_batch(1, 5)) == []


def test_what_is_no_text_is_recorded_with_fewer_samples(toy_model, toy_batch, parts_of):
    part_sizes = sizes(parts_of(toy_model(lambda block, hidden: hidden + block.up(hidden).tanh()), toy_batch(5)), "x")
    assert part_sizes
    assert all(size[0] < 5 and size[1:] == (6, 8) for size in part_sizes)


def test_parts_of_packed_rows_have_several_documents_too():
    """Without a second document, a model would leave out the mask between documents."""
    positions = torch.cat([torch.arange(n) for n in (50, 20, 58)])[None]
    ids = torch.ones(1, 128, dtype=torch.long)
    boundaries = torch.tensor([0, 50, 70, 128], dtype=torch.int32)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "cu_seq_lens_q": boundaries}
    parts = [part.tensors for parts in small_parts(Batch(batch)) for part in parts]
    assert parts
    for part in parts:
        assert (part["position_ids"].diff() <= 0).any()
        assert part["position_ids"].min() == 0
        assert part["cu_seq_lens_q"][-1] == part["input_ids"].shape[1] < 128


def test_parts_of_rows_with_one_document_have_one_document():
    ids = torch.ones(1, 128, dtype=torch.long)
    for parts in small_parts(Batch({"input_ids": ids, "labels": ids, "position_ids": torch.arange(128)[None]})):
        assert all((part.tensors["position_ids"].diff() == 1).all() for part in parts)


def test_tensors_of_a_graph_are_detached():
    """A backward through the batch's tensors, also nested ones, frees no graph outside. Other tensors are unchanged."""
    ids, leaf = torch.arange(6).view(2, 3), torch.ones(2, 3, requires_grad=True)
    computed = leaf.sin()
    batch = Batch({"input_ids": ids, "leaf": leaf, "encoder_outputs": (computed, None)})
    assert batch.tensors["input_ids"] is ids
    assert batch.tensors["leaf"] is leaf
    detached = batch.tensors["encoder_outputs"][0]
    assert detached.is_leaf
    assert detached.requires_grad
    assert detached.data_ptr() == computed.data_ptr()
    detached.exp().sum().backward()
    computed.sum().backward()
    assert torch.equal(leaf.grad, leaf.cos())
