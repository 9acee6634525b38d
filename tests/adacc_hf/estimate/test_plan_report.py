"""The text of a plan: the range that is expected on the device."""

from dataclasses import replace

from transformers import GPT2Config

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate import planning
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import Workload
from adacc_hf.estimate.plan_report import CONTEXT_BYTES, expected_bytes, to_text
from adacc_hf.estimate.planning import Request
from adacc_hf.estimate.static_memory import PRECISIONS

CONFIG = GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=64, vocab_size=500, bos_token_id=0, eos_token_id=0)


def test_the_text_has_the_range_that_is_expected_on_the_device():
    """Fragments, temporary tensors and the CUDA context widen the peak to a range. A CPU has none."""
    workload = Workload(config=CONFIG, device=find_device("h100"), precision=PRECISIONS["bf16-amp"])
    training_plan = planning.plan(Request(model="small", workload=workload, batch_size=2, seq_len=32))
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
