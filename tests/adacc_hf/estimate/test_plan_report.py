"""The text of a plan: the range that is expected on the device."""

from dataclasses import replace

from transformers import GPT2Config

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate import planning
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.plan_report import CONTEXT_BYTES, expected_bytes, to_text
from adacc_hf.estimate.planning import Request

CONFIG = GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=64, vocab_size=500, bos_token_id=0, eos_token_id=0)
MIB = 2**20
REFUSED = {
    "device": (["--device", "b200"], "--device=b200 is not in the table of devices: choose from h100"),
    "batch": (["--batch-size", "0"], "--batch-size=0 must be at least 1"),
    "short": (["--seq-len", "1"], "--seq-len=1 is outside its range \\(2 to 64"),
    "long": (["--seq-len", "65"], "--seq-len=65 is outside its range \\(2 to 64, the model's context\\)"),
    "budget": (["--budget", "1MiB"], "--budget=1.00 MiB is below the .* MiB that training takes .*--fsdp N"),
    "budget form": (["--budget", "much"], "--budget='much'"),
    "optimizer": (["--optimizer", "adam"], "--optimizer=adam is not known: choose from adamw"),
    "rank": (["--rank", "8"], "--rank=8 needs --optimizer compact: pass both"),
    "rank form": (["--optimizer", "compact", "--rank", "half"], "--rank=half must be a fraction of a layer's inputs"),
    "rank range": (["--optimizer", "compact", "--rank", "1.5"], "rank=1.5 must be a fraction of a layer's inputs"),
    "lora": (["--lora-rank", "0"], "--lora-rank needs --peft lora: pass both"),
    "lora rank": (["--peft", "lora", "--lora-rank", "0"], "--lora-rank=0 must be at least 1"),
    "lora targets": (["--peft", "lora", "--lora-targets", "nothing"], "--lora-targets=nothing"),
    "dtype": (["--device", "v100"], "--device=v100 cannot train in bfloat16: choose another --dtype"),
    "ddp": (["--ddp", "1"], "--ddp needs at least 2 devices, not 1"),
    "zero": (["--zero", "4", "2"], "--zero 4 2: ZeRO has no stage 4, choose 1, 2 or 3"),
    "budget without unit": (["--budget", "20"], '--budget=20 is 20 bytes, which may have been meant as "20GiB"'),
    "lora dropout": (["--peft", "lora", "--lora-dropout", "1"], "--lora-dropout=1.0 must be at least 0 and below 1"),
    "modules to save": (["--modules-to-save", "lm_head"], "--modules-to-save needs --peft lora: pass both"),
    "4 bits": (["--load-in-4bit"], "--load-in-4bit needs --peft lora: pass both"),
    "4 bits in parts": (
        ["--load-in-4bit", "--peft", "lora", "--fsdp", "2"],
        "--fsdp is not planned with weights of 4 bits: choose",
    ),
    "8 bits": (["--load-in-8bit"], "--load-in-8bit: 8-bit weights are not planned: use --load-in-4bit"),
    "images": (["--image-tokens", "64"], "--image-tokens: images are not planned: plan the language model alone"),
    "liger": (["--liger"], "--liger: Liger's kernels cannot be traced without a GPU: leave out --liger"),
    "tensor parallelism": (["--tp", "2"], "--tp: tensor parallelism is not planned: use --fsdp N or --zero 3 N"),
    "outliers": (["--outlier-share", "2"], "--outlier-share=2.0 is outside 0 to 1"),
}


def test_the_text_has_the_range_that_is_expected_on_the_device():
    """Fragments, temporary tensors and the CUDA context widen the peak to a range. A CPU has none."""
    workload = Workload(config=CONFIG, device=find_device("h100"), precision=PRECISIONS["bf16-amp"])
    training_plan = planning.plan(
        Request(model="small", workload=workload, batch_size=2, seq_len=32, find_largest=False)
    )
    low, high = expected_bytes(training_plan)
    peak_bytes = training_plan.forecasts["plain"].peak_bytes
    assert low < peak_bytes < high - CONTEXT_BYTES
    text = " ".join(to_text(training_plan).split())
    assert f"Expected on the device, plain: {format_bytes(low)} to {format_bytes(high)}. " in text
    assert "to be safe" not in text

    def on(**device):
        workload_there = replace(workload, device=replace(workload.device, **device))
        return replace(training_plan, request=replace(training_plan.request, workload=workload_there))

    assert "to be safe, pass --budget" in " ".join(to_text(on(memory_bytes=CONTEXT_BYTES + peak_bytes)).split())
    assert expected_bytes(on(trace="cpu")) is None
