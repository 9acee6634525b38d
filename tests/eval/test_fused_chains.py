"""The bench of chains as kernels, with functions in place of Inductor's kernels; and Inductor's own, at all sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adacc_hf.eval import fused_chains
from adacc_hf.eval.fused_chains import case_name, replay_ms, times_faster
from adacc_hf.eval.records.ledger import Ledger
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.trials import chain_kernel, exact_kernels
from adacc_hf.eval.trials.chain_bytes import Model, replay_bytes
from adacc_hf.eval.trials.chain_kernel import chain_function, compile_chain
from adacc_hf.eval.trials.chain_replay import ALL, EXACT, OPERATORS
from adacc_hf.eval.trials.exact_kernels import ExactOperators, compare
from adacc_hf.eval.trials.pointwise_chains import Chain, find_chains
from adacc_hf.eval.trials.workload import Workload
from adacc_hf.run.call import Recording
from adacc_hf.tape.replay import StorageMap, schedule
from adacc_hf.tape.tape import Tape

TANH = "tanh.default(float32)"


def as_function(chain: Chain, examples: Any) -> Any:
    return lambda tensors: chain_function(chain)(*tensors)


def with_one_wrong_bit(chain: Chain, examples: Any) -> Any:
    """A kernel that is off by the last bit in each number of the last result that follows from a float32 tanh."""

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        made = chain_function(chain)(*tensors)
        if "tanh" in chain.names and made[-1].dtype is torch.float32:
            made[-1] = (made[-1].view(torch.int32) + 1).view(torch.float32)
        return made

    return run


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(compile_chain: Any) -> None:
        monkeypatch.setattr(chain_kernel, "compile_chain", compile_chain)
        monkeypatch.setattr(exact_kernels, "compile_chain", compile_chain)
        monkeypatch.setattr(exact_kernels, "NUM_TRIED", 64)
        monkeypatch.setattr(exact_kernels, "LENGTHS", (64, 2, 33))

    return use


def run(tiny: Workload, output: Path) -> dict[str, Any]:
    assert fused_chains.main(["--rounds", "2", "--output", str(output)], {tiny: 99}, models=()) == 0
    record = json.loads(output.read_text())
    check_record(record)
    assert record["run_info"]["cases"][0]["rounds"] == 2
    return record["train_info"]["points"]


def test_record_and_table(tiny: Workload, tmp_path: Path, kernels, capsys: pytest.CaptureFixture[str]) -> None:
    kernels(as_function)
    output = tmp_path / "chains.json"
    points = run(tiny, output)
    assert list(points) == [case_name(tiny, precision) for precision in ("fp32", "bf16")]
    for figures in points.values():
        gelu = next(row for row in figures["chains"][ALL] if "tanh" in row["names"])
        assert gelu["blocks"] == tiny.layers
        assert gelu["size"] == [tiny.batch, tiny.tokens, 4 * tiny.width]
        assert gelu["bytes_before"] == 18 * gelu["bytes_after"] / 5
        assert not any(figures["operators"].values())
        assert all(row["differing"] == row["greatest"] == 0 for row in figures["chains"][ALL])
        assert figures["chains"][ALL] != figures["chains"][EXACT]  # of one time each
        assert [row["names"] for row in figures["chains"][ALL]] == [row["names"] for row in figures["chains"][EXACT]]
        assert all(row["is_equal"] for row in figures["step"].values())
        spent = replay_ms(figures)
        assert spent[f"{ALL}, faster"] <= min(spent[OPERATORS], spent[ALL])
    printed = capsys.readouterr().out
    assert all(f"\n{name}:\n" in printed for name in points)
    assert "operators are exact" in printed
    for name, ratios in times_faster(Ledger.load(output)).items():
        assert ratios[ALL] == replay_ms(points[name])[OPERATORS] / replay_ms(points[name])[ALL]


def test_one_wrong_bit_is_found(tiny: Workload, tmp_path: Path, kernels, capsys: pytest.CaptureFixture[str]) -> None:
    kernels(with_one_wrong_bit)
    figures = run(tiny, tmp_path / "chains.json")[case_name(tiny, "fp32")]
    assert [name for name, share in figures["operators"].items() if share] == [TANH]
    (gelu,) = (row for row in figures["chains"][ALL] if "tanh" in row["names"])
    assert 0 < gelu["greatest"] < 1e-6
    assert gelu["differing"] == 1 / 4  # one of four results
    assert not any("tanh" in row["names"] for row in figures["chains"][EXACT])
    assert all(row["differing"] == 0 for row in figures["chains"][EXACT])
    assert figures["step"][EXACT]["is_equal"]
    assert not figures["step"][ALL]["is_equal"]
    assert 0 < figures["step"][ALL]["gradient_error"] < 1e-6
    assert f"| {TANH} " in capsys.readouterr().out


def test_bits_are_compared_and_not_values() -> None:
    zero, nan = torch.zeros(3), torch.tensor([float("nan"), 1.0, float("inf")])
    assert compare([-zero], [zero])["differing"] == 1
    assert compare([nan], [-nan.clone()])["differing"] == pytest.approx(2 / 3)
    assert compare([nan], [nan.clone()]) == {
        "differing": 0, "greatest": 0.0, "relative_error": 0.0, "lies_alike": True
    }  # fmt: skip


def test_bytes_add_up() -> None:
    models = {"small": Model(preset="demo", batch=2, tokens=64)}
    found = replay_bytes("small", models)
    for policy, row in found.items():
        assert 0 <= row["after"] <= row["before"] <= row["pointwise"], policy
        assert row["chained"] <= row["operators"]
        assert 0 < row["faster_overhead_ms"] <= row["overhead_ms"] < row["step_ms"]
        num_blocks = 6
        for part in ("before", "after"):
            total = sum(chain["blocks"] * chain[part] for chain in row["chains"])
            assert total == pytest.approx(num_blocks * row[part])
    assert found["everything recomputed"]["after"] > 0


class Scaled(nn.Module):
    """The exact part of a GELU, on a tensor and a row of weights."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (0.5 * (x + 0.044715 * x.pow(3.0)) * weight / 3.0).softmax(-1)


def chain_of(x: torch.Tensor, weight: torch.Tensor) -> tuple[Tape, Chain]:
    block = Scaled()
    recording = Recording("block", block, (x, weight), {})
    recording.run(block)
    tape = recording.recorder.tape()
    given = frozenset(value.index for value in tape.values if value.source is not None)
    store = StorageMap(given, frozenset(), frozenset())
    order = tuple(reversed(range(len(tape.slots))))
    chains = [chain for program in schedule(tape, store, order) for chain in find_chains(program, tape)]
    return tape, max(chains, key=lambda chain: len(chain.steps))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_of_exact_operators_has_their_bits_at_every_size(dtype: torch.dtype) -> None:
    x, weight = torch.randn(8, 40).to(dtype).requires_grad_(), torch.randn(40).to(dtype).requires_grad_()
    tape, chain = chain_of(x, weight)
    assert len(chain.steps) >= 5
    exact = ExactOperators(seed=0)
    assert all(exact.has(operator, tape) for operator in chain.operators), exact.shares
    kernel = compile_chain(chain, [tensor.detach() for tensor in inputs_of(chain, x, weight)])
    for rows, columns in ((8, 40), (3, 7), (2, 2), (5, 129), (64, 33)):
        tensors = inputs_of(chain, 10 * torch.randn(rows, columns).to(dtype), torch.randn(columns).to(dtype))
        expected = chain_function(chain)(*tensors)
        assert compare(kernel(list(tensors)), expected)["differing"] == 0


def inputs_of(chain: Chain, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    return [x if len(ref.geometry[0]) == 2 else weight for ref in chain.inputs]


def test_tiny_cases_are_of_all_families() -> None:
    families = [workload.family for workload in fused_chains.CASES]
    assert sorted(families) == sorted([*fused_chains.FAMILIES] * 2)
    assert len({replace(workload, family="gpt2") for workload in fused_chains.CASES}) == 2
