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
GRADIENTS = {
    "checkpointing": (0.0, "bit-equal"),
    "compile_0.5": (0.09, "off by 0.09"),
    "adacc_compiled": (1e-7, "equal but for rounding"),
}
"""Relative error of a method's gradients, and its words in the table."""


def invented_point(function, order: dict, timeout_s: float) -> dict:
    method, budget = order["method"], order["budget"]
    if method not in POINTS and budget is None:
        return {"status": "cannot_run", "reason": "needs a GPU"}
    if isinstance(budget, int):
        peak, speed = budget / 2**20 - 1, 15.0 if method == "adacc_compiled" else 9.1
    else:
        peak, speed = POINTS[method] if budget is None else OWN[budget]
    spread = {"low": speed, "median": speed, "high": speed}
    promise = PROMISES.get(method, "exact")
    return {
        "status": "measured",
        "peak_bytes": peak * 2**20,
        "tokens_per_second": spread,
        "step_ms": spread,
        "gate": {"promise": promise, "gradient_error": GRADIENTS.get(method, (0.0,))[0], "rounding": 1e-5},
    }


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str, str]:
    output = tmp_path_factory.mktemp("peers") / "peers.json"
    assert peers.main(["--budgets", "0.5", "0.25", "--output", str(output)], invented_point) == 0
    texts = (output.with_suffix(suffix).read_text() for suffix in (".md", ".svg"))
    return json.loads(output.read_text()), *texts


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_peer_has_a_row_or_a_reason(outputs) -> None:
    record, table, _ = outputs
    info = record["train_info"]
    # Adacc and its exact variant have two budgets and the peaks of two eager peers each, and the compiled variant has
    # the peaks of torch.compile.
    assert len(info["points"]) == len(PEERS) + 2 + 4 + len(COMPILED_PEERS) - 1
    for key, title in info["titles"].items():
        assert f"| {title} " in table
        if info["points"][key]["status"] == "error":
            assert f"- {title}: torch.compile, activation_memory_budget" in table
        elif info["points"][key]["status"] == "cannot_run":
            assert f"- {title}: needs a GPU" in table


def test_gradients_are_in_words(outputs) -> None:
    titles = {PEERS[name].title: words for name, (_, words) in GRADIENTS.items() if not PEERS[name].takes_budget}
    rows = {cells(line)[0]: cells(line)[-1] for line in outputs[1].splitlines() if not line.endswith("x |")}
    assert {title: rows[title] for title in titles} == titles
    compiled = f"{PEERS['adacc_compiled'].title}, at the peak of activation_memory_budget 0.5"
    assert rows[compiled] == GRADIENTS["adacc_compiled"][1]


def test_adacc_is_compared_at_the_peak_of_each_other_method(outputs) -> None:
    lines = [cells(line) for line in outputs[1].splitlines() if line.endswith("x |")]
    by_hand = {
        ("HF gradient checkpointing", "Adacc"): ["7", "40.00 MiB", "39.00 MiB", "9", "1.30x"],
        ("torch.compile, activation_memory_budget 0.5", "Adacc in torch.compile"): [
            "14", "60.00 MiB", "59.00 MiB", "15", "1.07x",
        ],
    }  # fmt: skip
    rows = {(line[0], line[3]): [*line[1:3], *line[4:]] for line in lines}
    assert by_hand.items() <= rows.items()
    eager = [(PEERS[peer].title, own) for own in ("Adacc", "Adacc, exact") for peer in ("checkpointing", "selective")]
    assert sorted(rows) == sorted([*eager, ("torch.compile, activation_memory_budget 0.5", "Adacc in torch.compile")])


def test_without_compiled_peers_the_compiled_variant_has_budgets_of_its_own() -> None:
    keys = [entry.key for entry in peers.entries_of(["plain", "adacc_compiled"], [0.5], [0.25], "cpu")]
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
