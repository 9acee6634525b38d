"""Plans of vision-language models with images in their batches."""

import os
from dataclasses import replace

import pytest
from transformers import LlavaConfig, PretrainedConfig

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.cli import main
from adacc_hf.estimate.adapters import Adapters
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import Workload, fake_model
from adacc_hf.estimate.images import unchecked_placeholders
from adacc_hf.estimate.largest import largest_shapes
from adacc_hf.estimate.plan_report import to_text
from adacc_hf.estimate.planning import Request, TrainingPlanner, plan
from adacc_hf.estimate.static_memory import PRECISIONS
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.price.profiler import profile_model
from adacc_hf.solve.simple_policies import uniform_policy

FAMILIES = ("llava", "vipllava", "internvl", "gemma3", "paligemma", "aya_vision", "cohere2_vision")
EXACT = AdaccConfig(actions=("retain", "recompute"))
NUM_TOKENS = 4
"""Tokens of an image of the small models."""


def workload(config: PretrainedConfig, trace: str = "cuda", **settings) -> Workload:
    arguments = {"images": 1, "precision": PRECISIONS["fp32"]} | settings
    return Workload(config=config, device=find_device("h100"), trace=trace, **arguments)


def with_real_data(name: str):
    """Return the shape of the batch of a small model, and the profile of a step on it."""
    architecture = architectures()[name]
    batch = architecture.make_batch(0)
    return tuple(batch["input_ids"].shape), profile_model(architecture.build(), batch, EXACT)


@pytest.mark.parametrize("name", ["llava", "internvl", "aya_vision"])
def test_activations_and_peaks_are_those_of_a_step_with_images(name: str, one_thread) -> None:
    shape, measured = with_real_data(name)
    config = architectures()[name].build().config
    with fake_model(workload(config, "cpu", adacc=EXACT)) as model:
        planned = model.profile(*shape)
    assert [block.name for block in planned.blocks] == [block.name for block in measured.blocks]
    # LLaVA stores one number of 8 bytes outside its blocks that the step on fake tensors does not store.
    assert 0 <= measured.plain_stored_bytes - planned.plain_stored_bytes <= 8
    with fake_model(workload(config, "cpu", adacc=EXACT, images=2)) as model:
        assert model.image_tokens == 2 * NUM_TOKENS
        twice = model.profile(*shape)
    peaks = [uniform_policy(each, "retain").predicted_peak_bytes for each in (planned, twice)]
    assert twice.plain_stored_bytes > planned.plain_stored_bytes
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_small_model_of_a_family(name: str) -> None:
    config = architectures()[name].build().config
    settings = workload(config, precision=PRECISIONS["bf16-amp"])
    training_plan = plan(Request(model=name, workload=settings, batch_size=2, seq_len=16))
    plain, full = (training_plan.forecasts[method] for method in ("plain", "full recomputation"))
    assert full.peak_bytes < plain.peak_bytes
    assert {block.kind for block in training_plan.profile.blocks} >= {0, 1}, "blocks of the tower and of the text"
    text = " ".join(to_text(training_plan).split())
    assert "2 x 16 tokens per device (4 of each sequence for images)" in text
    assert "Images have 16 x 16 pixels. The vision tower is trained like the language model" in text


def test_the_longest_sequence_has_room_for_the_images() -> None:
    """Lengths that are tried are multiples of 8, and the images have 8 tokens."""
    config = architectures()["llava"].build().config
    request = Request(model="llava", workload=workload(config, images=2), batch_size=64, seq_len=32)
    with fake_model(request.workload) as model:
        shortest = uniform_policy(TrainingPlanner(request, model).profile_at(64, 9), "retain").predicted_peak_bytes
    assert largest_shapes(replace(request, budget_bytes=shortest))[0].seq_len == 9


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gpt2", {}, "GPT2Config has no vision tower, and only images of a fixed size are planned"),
        ("qwen2_vl", {}, "Qwen2VLConfig accepts images of any size"),
        ("mistral3", {}, "Mistral3ForConditionalGeneration cannot be planned, because it needs more than their pixels"),
        (
            "llava",
            {"adapters": Adapters()},
            "--images is not planned with --peft: leave out one of the two",
        ),
    ],
)
def test_images_that_cannot_be_planned_are_refused(name: str, settings: dict, message: str) -> None:
    config = architectures()[name].build().config
    with pytest.raises(ValueError, match=message), fake_model(workload(config, **settings)):
        pass


def test_the_tokens_of_a_published_model_s_image() -> None:
    """LLaVA 1.5 has 576 tokens per image: (336 / 14) ^ 2 patches."""
    vision = {"image_size": 336, "patch_size": 14, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    with fake_model(workload(LlavaConfig(vision_config=vision, text_config=text))) as model:
        assert model.image_tokens == 576


def test_images_of_a_folder_s_model_are_planned_by_their_number(tmp_path, capsys) -> None:
    architectures()["llava"].build().config.save_pretrained(tmp_path)
    options = ["plan", "--model", str(tmp_path), "--batch-size", "2", "--seq-len", "16"]
    assert main([*options, "--images", "2"]) == 0
    assert f"({2 * NUM_TOKENS} of each sequence for images)" in " ".join(capsys.readouterr().out.split())
    assert main(options) == 2
    assert "--images N plans images" in capsys.readouterr().err
    assert main([*options, "--images", "0"]) == 2
    assert "--images=0 must be at least 1: the images in each sequence" in capsys.readouterr().err


def test_a_sequence_has_text_too() -> None:
    config = architectures()["llava"].build().config
    message = r"images' 4 tokens must be fewer than --seq-len=4, which counts the tokens of"
    with fake_model(workload(config)) as model, pytest.raises(ValueError, match=message):
        model.batch(2, NUM_TOKENS)


def test_checks_of_transformers_are_disabled_inside_the_block_only(monkeypatch) -> None:
    name = "TRANSFORMERS_DISABLE_TORCH_CHECK"
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv(name, before)
        with unchecked_placeholders():
            assert os.environ[name] == "1"
        assert os.environ.get(name) == before
