"""Plans on one GPU for a preset of each class, and for one or more small models of each family of language models."""

import pytest
from transformers import PretrainedConfig

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import Workload, fake_model
from adacc_hf.estimate.planning import Request, TrainingPlan, plan
from adacc_hf.estimate.presets import load_config
from adacc_hf.estimate.static_memory import PRECISIONS
from adacc_hf.eval.zoo.configs import architectures

FAMILIES = ("gpt2", "llama", "gemma3_text", "bert", "t5", "bart", "mixtral", "qwen3_moe", "mamba", "jamba")


def workload(config: PretrainedConfig, precision: str = "bf16-amp", attention: str | None = None) -> Workload:
    return Workload(config=config, device=find_device("h100"), precision=PRECISIONS[precision], attention=attention)


def plan_on_one_gpu(name: str, config: PretrainedConfig, attention: str | None = None) -> TrainingPlan:
    settings = workload(config, attention=attention)
    return plan(Request(model=name, workload=settings, batch_size=2, seq_len=16))


def assert_complete(training_plan: TrainingPlan) -> None:
    """Assert that plain training and full recomputation have a peak and a time in the right order."""
    plain, full = (training_plan.forecasts[name] for name in ("plain", "full recomputation"))
    assert full.peak_bytes <= plain.peak_bytes
    assert full.step_ms > plain.step_ms > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_small_model_of_a_family(name: str) -> None:
    assert_complete(plan_on_one_gpu(name, architectures()[name].build().config))


@pytest.mark.parametrize("name", ["gpt2-4.7b", "llama-1b", "t5-base"])
def test_a_preset(name: str) -> None:
    assert_complete(plan_on_one_gpu(name, load_config(name)))


@pytest.mark.parametrize("precision", ["bf16", "fp16-amp"])
def test_experts_in_other_precisions(precision: str) -> None:
    """Torch infers the shape of grouped products only for bfloat16; its kernels support the other dtypes too."""
    with fake_model(workload(architectures()["mixtral"].build().config, precision)) as model:
        assert model.profile(2, 16).plain_stored_bytes > 0


def test_experts_whose_shapes_depend_on_data_are_refused_in_one_line() -> None:
    config = architectures()["mixtral"].build().config
    config._experts_implementation = "eager"
    with pytest.raises(AdaccError, match=r"cannot be traced without data .*nonzero") as error:
        plan_on_one_gpu("mixtral", config)
    assert len(str(error.value)) < 250


def test_attention_that_a_model_lacks_is_refused_in_one_line() -> None:
    """Without a choice, the plan has the attention that the model has."""
    config = architectures()["bloom"].build().config
    with pytest.raises(ValueError, match="attention sdpa is not implemented for BloomConfig: choose eager"):
        plan_on_one_gpu("bloom", config, "sdpa")
    assert plan_on_one_gpu("bloom", config).attention == "eager"


def test_a_model_with_images_is_refused_in_two_lines() -> None:
    with pytest.raises(ValueError, match="choose a language model, or the language model of a model with images") as e:
        plan_on_one_gpu("vit", architectures()["vit"].build().config)
    assert len(str(e.value)) < 250
