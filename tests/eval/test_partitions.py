"""The partitioner's promises, on one small model; the runner checks many."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition

from adacc_hf.compiler import AdaccPartitioner
from adacc_hf.eval import partitions
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.trials.compiled_graphs import graph_step
from adacc_hf.eval.trials.gradients import Gradients, relative_error
from adacc_hf.eval.trials.workload import Workload


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    output: Path = tmp_path_factory.mktemp("partitions") / "partitions.json"
    assert partitions.main(["--models", "gpt2, eager, fp32", "--output", str(output)]) == 0
    return json.loads(output.read_text())


def test_one_model_keeps_every_promise(record: dict) -> None:
    check_record(record)
    (point,) = record["train_info"]["points"].values()
    assert all(0 < trial["stored_bytes"] <= trial["share"] * trial["plain_bytes"] for trial in point["lossless"])
    assert point["lossy"]["gradient_error"] > 0


def test_codecs_leave_a_trained_model_its_gradient() -> None:
    """In a fresh model all logits are close to 0, where it hardly shows what codecs do to a loss."""
    torch.manual_seed(0)
    workload = Workload(width=64, layers=2, batch=8, tokens=64)
    model, batches = workload.model("cpu", 0), workload.batches("cpu", 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        model(**next(batches)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    batch = next(batches)
    partitioner = AdaccPartitioner(memory_budget=0.5, actions=("retain", "compress"), min_compress_bytes=64)
    cut = (min_cut_rematerialization_partition, partitioner)
    plain, coded = (graph_step(model, batch, partition) for partition in cut)
    assert coded.stored_bytes <= 0.5 * plain.stored_bytes
    gradients = [Gradients(step.loss, step.gradients) for step in (plain, coded)]
    # INT4 on all activations gives 0.03 to 0.06; with the logarithms of probabilities in INT4 too it is above 1.
    assert relative_error(*gradients) < 0.15


@pytest.mark.parametrize(
    ("trial", "change"),
    [
        ("lossless", {"same_bits": False}),
        ("lossless", {"stored_bytes": 1}),
        ("lossless", {"overhead_ms": 1e6}),
        ("lossy", {"gradient_error": 1.0}),
        ("lossy", {"stored_bytes": 1}),
    ],
)
def test_a_broken_promise_is_seen(record: dict, trial: str, change: dict) -> None:
    (point,) = copy.deepcopy(list(record["train_info"]["points"].values()))
    assert partitions.is_good(point)
    (point[trial][0] if trial == "lossless" else point[trial]).update(change)
    assert not partitions.is_good(point)


def test_there_are_as_many_models_as_promised() -> None:
    names = {name.split(",")[0] for name in partitions.cases()}
    assert {"gpt2", "llama", "t5"} < names
    assert len(names) >= 13
