"""The comparison with peers, from invented points."""

import json
from pathlib import Path

import pytest

from adacc_hf.compiler.compiled_policy import CompiledPolicy, RegionPlan
from adacc_hf.eval import peers
from adacc_hf.eval.trials import peer_methods
from adacc_hf.eval.trials.peer_methods import COMPILED_PEERS, PEERS

POINTS = {"plain": (100, 10.0), "checkpointing": (40, 7.0), "selective": (70, 7.5), "compile_0.5": (60, 14.0)}
PROMISES = {"compile_0.5": "own_randomness", "adacc_compiled": "own_lossy"}
OWN = {0.5: (60, 9.6), 0.25: (40, 9.0)}


def invented_point(function, order: dict, timeout_s: float) -> dict:
    method, budget = order["method"], order["budget"]
    if method not in POINTS and budget is None:
        return {"status": "cannot_run", "reason": "needs a GPU"}
    if method == "adacc_compiled":
        peak, speed = budget / 2**20 - 1, 15.0
    else:
        peak, speed = POINTS[method] if budget is None else OWN[budget]
    spread = {"low": speed, "median": speed, "high": speed}
    promise = PROMISES.get(method, "exact")
    return {
        "status": "measured",
        "peak_bytes": peak * 2**20,
        "tokens_per_second": spread,
        "step_ms": spread,
        "gate": {"promise": promise},
        "decided": {"share": 0.6},
    }


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str, str]:
    output = tmp_path_factory.mktemp("peers") / "peers.json"
    assert peers.main(["--budgets", "0.5", "0.25", "--output", str(output)], invented_point) == 0
    texts = (output.with_suffix(suffix).read_text() for suffix in (".md", ".svg"))
    return json.loads(output.read_text()), *texts


def test_every_peer_has_a_row_or_a_reason(outputs) -> None:
    record, table, _ = outputs
    info = record["train_info"]
    # Adacc and its exact variant have two budgets each, and the compiled variant one per peak of torch.compile.
    assert len(info["points"]) == len(PEERS) + 2 + len(COMPILED_PEERS) - 1
    for key, title in info["titles"].items():
        assert f"| {title} " in table
        if info["points"][key]["status"] == "error":
            assert f"- {title}: torch.compile, activation_memory_budget" in table
        elif info["points"][key]["status"] == "cannot_run":
            assert f"- {title}: needs a GPU" in table


def test_speed_at_equal_peak_and_peak_at_equal_speed(outputs) -> None:
    rows = {row["peer"]: row for row in outputs[0]["train_info"]["adacc_against"]}
    assert rows.keys() == POINTS.keys()
    assert rows["checkpointing"]["speed_ratio"] == pytest.approx(9.0 / 7.0)
    assert rows["checkpointing"]["peak_ratio"] == pytest.approx(1.0)  # Adacc is already faster at its least peak
    assert rows["selective"]["speed_ratio"] == pytest.approx((9.6 + (10.0 - 9.6) / 4) / 7.5)
    assert rows["compile_0.5"] == {
        "peer": "compile_0.5",
        "compiled": True,
        "speed_ratio": pytest.approx(9.6 / 14.0),
        "peak_ratio": None,  # no point of Adacc is as fast
    }


def test_the_fastest_that_needs_no_more_stands_beside_each_of_adaccs_points(outputs) -> None:
    record, table, _ = outputs
    rows = {row["adacc"]: row for row in record["train_info"]["within_adaccs_peaks"]}
    eager = [f"{name}_{budget}" for name in ("adacc", "adacc_exact") for budget in (0.5, 0.25)]
    assert list(rows) == [*eager, "adacc_compiled_within_compile_0.5"]
    assert rows["adacc_0.25"]["eager"] == {"peer": "checkpointing", "speed_ratio": pytest.approx(9.0 / 7.0)}
    assert rows["adacc_0.25"]["compiled"] is None
    assert rows["adacc_0.5"]["compiled"] == {"peer": "compile_0.5", "speed_ratio": pytest.approx(9.6 / 14.0)}
    slower = "Adacc at 50%, Adacc, exact at 50%"
    assert (
        f"Slower than the fastest compiled peer (fused operators, which Adacc has in torch.compile only): {slower}."
        in table
    )
    assert "Slower than the fastest eager peer" not in table


def test_compiled_points_are_matched_by_their_peak(outputs) -> None:
    _, table, _ = outputs
    (row,) = [line for line in table.splitlines() if "60.00 MiB" in line and "59.00 MiB" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    title = "torch.compile, activation_memory_budget 0.5"
    assert cells == [title, "14", "60.00 MiB", "59.00 MiB", "0.60", "15", "1.07x"]


def test_without_compiled_peers_the_compiled_variant_has_budgets_of_its_own() -> None:
    keys = [entry.key for entry in peers.entries_of(["plain", "adacc_compiled"], [0.5], [0.25])]
    assert keys == ["plain", "adacc_compiled_0.25"]


class Share:
    """Substitute for a model whose compiled step has a peak of 20 plus its share of 100 bytes."""

    def __init__(self) -> None:
        self.partitioner, self.policy, self.tried_shares = self, CompiledPolicy(share=1.0), []

    def start_over(self, share: float) -> None:
        self.tried_shares.append(share)
        plan = RegionPlan(digest="", plain_bytes=100, stored_bytes=int(100 * share))
        self.policy = CompiledPolicy(share=share, regions=(plan,))

    def compile_again(self) -> None: ...


@pytest.mark.parametrize(("budget", "share"), [(120, 1.0), (70, 0.5), (200, 1.0)])
def test_the_share_is_the_largest_that_keeps_to_a_peak(monkeypatch, budget, share):
    model = Share()
    monkeypatch.setattr(peer_methods, "measure_steady_step", lambda *_: (0, 20 + model.policy.stored_bytes))
    largest_share = peer_methods._share_within(None, None, model, budget)
    assert largest_share == model.tried_shares[-1] <= share
    assert largest_share > share - 0.05


@pytest.mark.parametrize("option", ["--budgets", "--variant-budgets"])
@pytest.mark.parametrize("budget", ["0", "1.5"])
def test_budgets_are_fractions(tmp_path: Path, option: str, budget: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=.* must be fractions"):
        peers.main([option, budget, "--output", str(tmp_path / "p.json")], invented_point)
