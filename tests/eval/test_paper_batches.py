"""The paper's Table 3 as predicted: which set-up is taken, and what is said of it."""

import json

from adacc_hf.artifacts.policy import Policy
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.model_presets import Gpt2Size
from adacc_hf.estimate.planning import Request, largest_batches, training_profile
from adacc_hf.eval.paper_batches import METHODS, PAPER, main
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.solve.baselines import simulate_checkpointed


def test_the_nearest_plain_batch_decides(tmp_path, capsys):
    asked = []

    def predicted(setup, methods):
        asked.append((setup, tuple(methods)))
        model, length, stage = setup
        batch = PAPER[model][0] + (0 if (length, stage) == (512, 2) else 5)
        return {"status": "measured", "batches": {method: batch + n for n, method in enumerate(methods)}}

    output = tmp_path / "table3.json"
    assert main(["--output", str(output)], predicted) == 0
    check_record(json.loads(output.read_text()))
    assert [setup for setup, methods in asked if methods == METHODS] == [(model, 512, 2) for model in PAPER]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| gpt2-345m ")]
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells[1:] == ["512", "2", "8 (8)", "9 (61)", "10 (19)", "11 (61)"]


def test_the_largest_batches_fit_and_one_more_does_not():
    config = Gpt2Size(n_layer=3, n_embd=64, n_head=4, n_positions=64, vocab_size=500).config()
    workload = Workload(config=config, device=find_device("v100"), precision=PRECISIONS["fp16-amp"], attention="eager")
    request = Request(model="small", workload=workload, batch_size=1, seq_len=64, budget_bytes=24 * 2**20)
    found = largest_batches(request, METHODS[:3])  # what the solver finds is tested with the planner
    assert 0 < found["plain"] < found["quantization"]
    assert found["plain"] < found["full recomputation"]
    for more in (0, 1):
        shape = Request(model="small", workload=workload, batch_size=found["plain"] + more, seq_len=64)
        _, profile = training_profile(shape)
        assert (Policy.uniform(profile, "retain").predicted_peak_bytes <= request.budget) == (more == 0)
        shape = Request(model="small", workload=workload, batch_size=found["full recomputation"] + more, seq_len=64)
        _, profile = training_profile(shape)
        assert (simulate_checkpointed(profile).peak_bytes <= request.budget) == (more == 0)
