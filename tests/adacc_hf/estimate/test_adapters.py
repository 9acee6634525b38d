"""LoRA's adapters in plans."""


def test_lora_trains_little(plan):
    full_plan, lora = plan(), plan("--peft", "lora")
    assert lora["static"]["gradients_bytes"] < 0.1 * full_plan["static"]["gradients_bytes"]
    assert lora["static"]["parameters_bytes"] > full_plan["static"]["parameters_bytes"]


def test_adapters_have_the_rank_and_the_layers_asked_for(plan):
    options = ["--peft", "lora"]
    one = plan(*options, "--lora-rank", "4", "--lora-targets", "c_attn")["static"]["gradients_bytes"]
    # A rank of 4 from 64 inputs to 192 outputs, in float32, in each of three blocks.
    assert one == 3 * 4 * (64 + 192) * 4
    assert plan(*options, "--lora-rank", "8", "--lora-targets", "c_attn")["static"]["gradients_bytes"] == 2 * one
