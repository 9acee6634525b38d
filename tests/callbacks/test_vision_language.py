"""Training of models for images and sounds: frozen towers, several sizes, and batches without images."""

from operator import itemgetter

import pytest
import torch
from run_builders import InOrder
from trainer_builders import Run

from adacc_hf import AdaccCallback
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.eval.zoo.language import IMAGE_TOKEN, PATCH_VALUES

SMALL, WIDE, LARGE = (1, 4, 4), (1, 4, 8), (1, 8, 8)
"""Sizes of images in patches: frames, rows, columns. Four patches make one token."""
TABLE = architectures()

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::FutureWarning:peft")


def two_images(seed, *sizes):
    """Return a batch for Qwen2-VL: two texts of 24 tokens with an image each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 95, (2, 24), generator=generator)
    for row, (frames, height, width) in zip(ids, sizes, strict=True):
        row[1 : 1 + frames * height * width // 4] = IMAGE_TOKEN
    num_patches = sum(frames * height * width for frames, height, width in sizes)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "pixel_values": torch.randn(num_patches, PATCH_VALUES, generator=generator),
        "image_grid_thw": torch.tensor(sizes),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
    }


def without_images(batch):
    """Return the batch as text only."""
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE_TOKEN, 7)
    kinds = {name: torch.zeros_like(ids) for name in ("mm_token_type_ids", "token_type_ids") if name in batch}
    return {"input_ids": ids, "labels": ids.clone(), **kinds}


def frozen(model):
    """Return the model with its vision tower frozen."""
    towers = [parameter for name, parameter in model.named_parameters() if "vis" in name]
    for parameter in towers:
        parameter.requires_grad_(False)
    assert towers
    return model


def adapted(model):
    """Return the model with LoRA on its language part."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    part = peft.LoraConfig(r=4, target_modules=r".*(language|text)_model.*\.(q_proj|v_proj)", lora_dropout=0.1)
    return peft.get_peft_model(model, part)


@pytest.fixture
def assert_equal_to_plain(make_trainer, lossless):
    """Return `assert_equal_to_plain(make_model, batches)`, which trains one step on each batch, with and without the
    callback, and returns the callback."""

    def compare(make_model, batches):
        def run(*callbacks):
            trainer = make_trainer(
                list(callbacks),
                model=make_model(),
                trainer_class=InOrder,
                max_steps=len(batches),
                per_device_train_batch_size=1,
                remove_unused_columns=False,
            )
            trainer.train_dataset, trainer.data_collator = batches, itemgetter(0)
            trainer.train()
            return Run(trainer, trainer.state.log_history)

        callback = AdaccCallback(**lossless)
        run(callback).assert_equals(run())
        return callback

    return compare


@pytest.mark.parametrize(
    ("name", "recipe"), [("qwen2_vl", frozen), ("qwen2_vl", adapted), ("smolvlm", adapted), ("gemma3", adapted)]
)
def test_the_usual_recipes_with_text_in_between_are_exact(assert_equal_to_plain, name, recipe):
    batches = [TABLE[name].make_batch(seed) for seed in range(7)]
    batches[3], batches[5] = without_images(batches[3]), without_images(batches[5])
    callback = assert_equal_to_plain(lambda: recipe(TABLE[name].build()), batches)
    assert not callback.policy.is_plain


def test_images_of_other_sizes_are_exact_and_get_policies_of_their_own(assert_equal_to_plain):
    """Qwen2-VL rejects resized batches, because patches, images and texts depend on each other."""
    small = [two_images(seed, SMALL, SMALL) for seed in range(3)]
    large = [two_images(seed, *sizes) for seed, sizes in enumerate([(LARGE, WIDE), (WIDE, LARGE), (LARGE, LARGE)] * 6)]
    callback = assert_equal_to_plain(TABLE["qwen2_vl"].build, small + large)
    reasons = [event.get("reason", "") for event in callback.history if event["event"] == "policy"]
    assert len(reasons) == 3
    assert all("pixel_values" in reason for reason in reasons[1:])


def test_the_policy_waits_for_a_batch_that_calls_every_block(assert_equal_to_plain):
    images = [two_images(seed, SMALL, WIDE) for seed in range(4)]
    batches = [without_images(images[0]), without_images(images[1]), *images]
    callback = assert_equal_to_plain(TABLE["qwen2_vl"].build, batches)
    assert callback.history[0]["step"] == 3
