"""Plans for runs that were never started: totals, searches, and refused options."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.cli import USER_ERROR, main
from adacc_hf.compact import CompactFactory
from adacc_hf.estimate import planning
from adacc_hf.estimate.command import COMPUTED_IN
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.plan_report import CONTEXT_BYTES, WIDTH, expected_bytes, to_text
from adacc_hf.estimate.planning import Request
from adacc_hf.solve.baselines import simulate_checkpointed
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import measure_step

CONFIG = GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=64, vocab_size=500, bos_token_id=0, eos_token_id=0)
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A folder with the configuration of a small GPT-2."""
    path = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(path)
    return str(path)


@pytest.fixture
def plan(folder, capsys):
    """`plan(*options)`: the record that `adacc plan --json` prints."""

    def run(*options: str, model: str = folder) -> dict:
        status = main(["plan", "--model", model, "--json", *options])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return json.loads(printed.out)

    return run


@pytest.fixture
def refusal_of(folder, capsys):
    """`refused(*options)`: the one line on stderr of a plan that is refused."""

    def run(*options: str, model: str = folder) -> str:
        assert main(["plan", "--model", model, *options]) == USER_ERROR
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("adacc plan")]
        return line

    return run


def test_a_plan_within_a_budget(plan):
    ample = plan("--batch-size", "16", "--no-largest")
    assert ample["fits"]
    assert ample["methods"]["plain"]["fits"]
    peaks = {name: method["peak_bytes"] for name, method in ample["methods"].items()}
    assert peaks["adacc"] == peaks["plain"] > peaks["full recomputation"]
    budget = (peaks["plain"] + peaks["full recomputation"]) // 2
    tight = plan("--batch-size", "16", "--budget", str(budget), "--no-largest")
    assert tight["fits"]
    assert not tight["methods"]["plain"]["fits"]
    assert peaks["full recomputation"] <= max(tight["phases"].values()) == tight["policy"]["predicted_peak_bytes"]
    assert tight["policy"]["predicted_peak_bytes"] <= budget
    assert tight["methods"]["adacc"]["step_ms"] >= tight["methods"]["plain"]["step_ms"]


def test_the_largest_batch_fits_and_one_more_does_not(plan):
    budget = ["--budget", "40MiB"]
    methods = plan("--batch-size", "2", *budget)["methods"]
    assert methods["plain"]["largest_batch"] < methods["adacc"]["largest_batch"]
    assert methods["adacc"]["longest_seq_len"] == 64
    largest_batch = methods["adacc"]["largest_batch"]
    at, beyond = (plan("--batch-size", str(largest_batch + more), *budget, "--no-largest")["fits"] for more in (0, 1))
    assert at
    assert not beyond


def test_what_fits_no_more_names_the_least_peak(plan, folder, capsys):
    options = ["--batch-size", "64", "--no-largest", "--budget"]
    record = plan(*options, "12MiB")
    assert not record["fits"]
    assert record["policy"] is None
    least = record["methods"]["adacc"]["peak_bytes"]
    assert record["bound_bytes"] <= least
    assert plan(*options, str(least))["fits"]
    assert not plan(*options, str(least - 1))["fits"]
    assert main(["plan", "--model", folder, *options, "12MiB"]) == 0
    assert "does not fit 12.00 MiB: the least possible peak is" in capsys.readouterr().out


def test_fsdp_holds_parts_in_float32_and_computes_with_16_bits(plan):
    alone, shared = plan("--no-largest"), plan("--fsdp", "4", "--no-largest")
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert shared["static"][name] == -(-alone["static"][name] // 4), name
    # Two blocks and the parts outside them, in 16 bits.
    model = AutoModelForCausalLM.from_config(CONFIG)
    blocks = 2 * sum(p.numel() for p in model.transformer.h[0].parameters())
    outside = sum(p.numel() for p in model.parameters()) - len(model.transformer.h) * blocks // 2
    assert shared["static"]["unsharded_bytes"] == 2 * (blocks + outside)
    assert shared["plain_stored_bytes"] < alone["plain_stored_bytes"], "autocast keeps no casts of weights"


def test_zero_3_keeps_16_bit_weights_and_float32_masters(plan):
    alone, shared = plan("--no-largest"), plan("--zero", "3", "4", "--no-largest")
    assert shared["static"]["parameters_bytes"] == -(-alone["static"]["parameters_bytes"] // 8)
    assert shared["static"]["optimizer_bytes"] == -(-alone["static"]["parameters_bytes"] * 3 // 4)


def test_zero_2_needs_its_buckets(plan):
    """Two buckets of DeepSpeed's default size, in 16 bits, are part of the peak."""
    unsharded, sharded = plan("--no-largest"), plan("--zero", "2", "4", "--no-largest")
    bucket_bytes = 2 * 500_000_000 * 2
    assert sharded["static"]["backward_buckets_bytes"] == bucket_bytes
    excess = sharded["methods"]["plain"]["peak_bytes"] - unsharded["methods"]["plain"]["peak_bytes"]
    assert 0.99 * bucket_bytes < excess < bucket_bytes  # the weights and gradients have 16 bits too


def test_lora_trains_little(plan):
    full_plan, lora = plan("--no-largest"), plan("--peft", "lora", "--no-largest")
    assert lora["static"]["gradients_bytes"] < 0.1 * full_plan["static"]["gradients_bytes"]
    assert lora["static"]["parameters_bytes"] > full_plan["static"]["parameters_bytes"]


def test_compact_is_planned_as_it_trains(plan, one_thread):
    """A plan with CompAct predicts the peak and the stored bytes of a real model's profile after some steps."""
    plan_record = plan(
        "--optimizer", "compact", "--rank", "0.25", "--device", "cpu", "--dtype", "fp32", "--batch-size", "2",
        "--seq-len", "48", "--no-largest",
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).train()
    model.config.use_cache = False
    optimizer = CompactFactory()(model, rank=0.25)
    ids = torch.zeros((2, 48), dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone()}
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    profile = profile_model(model, batch, AdaccConfig(actions=("retain", "recompute")), optimizer=optimizer)
    # Steps and cores of each parameter are one number, and fake tensors count no scalars. Under full recomputation the
    # peak lies in the backward of a Python function. It is traced in another order than it runs in, so replay keeps its
    # results, masks included: 7.4 % were measured.
    for peak, method, bounds in (
        (uniform_policy(profile, "retain").predicted_peak_bytes, "plain", {"abs": 2048}),
        (simulate_checkpointed(profile).peak_bytes, "full recomputation", {"rel": 0.08}),
    ):
        assert plan_record["methods"][method]["peak_bytes"] == pytest.approx(peak, **bounds)
    memory = plan_record["static"]
    assert memory["optimizer_bytes"] == 2 * memory["gradients_bytes"]


def test_a_saved_profile_takes_the_place_of_the_trace(plan, refusal_of, folder, tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIG).train()
    model.config.use_cache = False
    ids = torch.zeros((4, 64), dtype=torch.long)
    profile = profile_model(model, {"input_ids": ids, "labels": ids.clone()})
    profile.save(tmp_path / "profile.json")
    options = ["--profile", str(tmp_path / "profile.json"), "--dtype", "fp32", "--batch-size", "4"]
    record = plan(*options)
    assert record["plain_stored_bytes"] == profile.plain_stored_bytes
    assert record["methods"]["plain"]["step_ms"] <= profile.step_ms
    other = tmp_path / "other"
    GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=500).save_pretrained(other)
    line = refusal_of(*options, model=str(other))
    assert "--profile is of GPT2LMHeadModel with 3 blocks, --model has 2" in line


def test_the_text_is_narrow_and_progress_is_printed_before_it(folder, capsys):
    """The text has at most 100 columns, and names the model's limit. The first line on stderr needs no torch."""
    assert main(["plan", "--model", folder, "--batch-size", "2", "--budget", "40MiB"]) == 0
    printed = capsys.readouterr()
    long_lines = [line for line in printed.out.splitlines() if len(line) > WIDTH and folder not in line]
    assert not long_lines
    assert "64 (the model's limit)" in printed.out
    progress = [line for line in printed.err.splitlines() if line.startswith("[")]
    assert progress[0] == "[  0 s] loading torch and Transformers"
    assert progress[-1].endswith("searching for the largest batch and the longest sequence: adacc")


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


def test_the_largest_batch_with_adapters_is_found(plan, tmp_path):
    """At a batch of gigabytes, the plan with the least bytes is an integer solution only within the tolerance."""
    LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=500,
        max_position_embeddings=128,
    ).save_pretrained(tmp_path)  # fmt: skip
    methods = plan("--peft", "lora", "--seq-len", "64", "--batch-size", "2", model=str(tmp_path))["methods"]
    assert methods["plain"]["largest_batch"] < methods["adacc"]["largest_batch"]


def test_the_report_is_written(plan, tmp_path):
    plan("--no-largest", "--html", str(tmp_path / "report"))
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "full recomputation" in page
    assert "tokens per device, sdpa attention" in page
    assert "without adacc: plain training peaks at" in page
    assert "roofline" in page


def test_the_report_says_that_nothing_fits(plan, tmp_path):
    small = plan("--batch-size", "1", "--no-largest")["methods"]["adacc"]["peak_bytes"]
    plan("--batch-size", "64", "--no-largest", "--budget", str(small), "--html", str(tmp_path / "report"))
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert ": the least possible peak is" in page
    assert "The policy shown is full recomputation, because no policy fits the budget." in page


def test_the_text_names_sources_and_assumptions(folder, capsys):
    assert main(["plan", "--model", folder, "--device", "v100", "--dtype", "fp16-amp", "--no-largest"]) == 0
    text = capsys.readouterr().out
    assert "fits 28.31 GiB without adacc" in text
    for part in ("NVIDIA V100", "full recomputation", "largest batch", "peak: head and loss", "roofline", "outliers"):
        assert part in text


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


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(refusal_of, case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        raise ValueError(refusal_of(*options))


def test_precisions_compute_in_the_dtype_that_is_checked_without_torch() -> None:
    computed_in = {name: str(precision.compute).removeprefix("torch.") for name, precision in PRECISIONS.items()}
    assert computed_in == COMPUTED_IN


def test_wrong_options_are_refused_before_torch_is_imported() -> None:
    wrong = (
        ["--device", "b200"], ["--optimizer", "adam"], ["--zero", "4", "2"], ["--fsdp", "1"], ["--budget", "20"],
        ["--budget", "much"], ["--device", "v100"], ["--liger"], ["--model", "/no/such/folder"],
    )  # fmt: skip
    code = (
        "import sys; from adacc_hf.cli import main\n"
        f"for options in {wrong!r}: print(main(['plan', '--model', 'demo', *options]), 'torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == [f"{USER_ERROR} False"] * len(wrong), process.stderr


def test_an_unknown_model_is_refused(refusal_of, tmp_path: Path):
    line = refusal_of(model=str(tmp_path / "nothing"))
    assert "is not a preset (demo, " in line
    assert "could not be loaded as a hub id or folder" in line


def test_a_model_without_a_context_needs_a_length(refusal_of):
    assert "--seq-len must be set" in refusal_of(model="demo-t5")


def test_accumulated_gradients_are_there_all_the_time(plan, one_thread):
    """Accumulated gradients are live all the time: a plan for later micro-batches predicts the memory of a real one.

    The gradients of the block in backward come on top.
    """
    options = ["--device", "cpu", "--dtype", "fp32", "--batch-size", "4", "--seq-len", "64", "--no-largest"]
    plan_record = plan(*options, "--accumulate", "--optimizer", "sgd")
    model = AutoModelForCausalLM.from_config(CONFIG).train()
    model.config.use_cache = False
    ids = torch.zeros((4, 64), dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone()}
    model(**batch).loss.backward()
    step_memory = measure_step(model, batch)
    block = sum(parameter.nbytes for parameter in model.transformer.h[0].parameters())
    extra = plan_record["methods"]["plain"]["peak_bytes"] - step_memory.peak_bytes
    # 1 % for tensors that a fake step does not have: indices, scalars.
    assert -0.01 * step_memory.peak_bytes <= extra <= block + 0.01 * step_memory.peak_bytes
    alone = plan(*options, "--optimizer", "sgd")["methods"]["plain"]["peak_bytes"]
    assert alone < plan_record["methods"]["plain"]["peak_bytes"] - plan_record["static"]["gradients_bytes"] // 2


def test_adapters_have_the_rank_and_the_layers_asked_for(plan):
    options = ["--peft", "lora", "--no-largest"]
    one = plan(*options, "--lora-rank", "4", "--lora-targets", "c_attn")["static"]["gradients_bytes"]
    # A rank of 4 from 64 inputs to 192 outputs, in float32, in each of three blocks.
    assert one == 3 * 4 * (64 + 192) * 4
    assert plan(*options, "--lora-rank", "8", "--lora-targets", "c_attn")["static"]["gradients_bytes"] == 2 * one


def test_a_classifier_has_no_language_model_head(plan, tmp_path):
    config = GPT2Config(
        n_layer=3, n_embd=64, n_head=4, n_positions=64, vocab_size=500, pad_token_id=0,
        architectures=["GPT2ForSequenceClassification"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    classifier = plan("--batch-size", "32", "--no-largest", model=str(tmp_path))
    language = plan("--batch-size", "32", "--no-largest")
    # Logarithms of the probabilities of 500 tokens at every position, in float32.
    assert language["plain_stored_bytes"] - classifier["plain_stored_bytes"] >= 32 * 64 * 500 * 4
