"""Every architecture keeps the four promises, and docs/SUPPORT.md lists what this table has.

By default a fast subset runs, one of each family. All of them (some minutes):
`ADACC_ALL_ARCHITECTURES=1 pytest tests/eval/repository/test_architectures.py`.
"""

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers.models.deberta import modeling_deberta

from adacc_hf.eval.repository.architectures import REGION, Verdict, check
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.run.call import Call

SUPPORT = Path(__file__).parents[3] / "docs" / "SUPPORT.md"
TABLE = architectures()
FAST = (
    *("gpt2", "llama", "gemma3_text", "bert", "albert", "deberta", "t5", "vit", "whisper"),
    *("qwen2_vl", "gemma3", "mixtral", "mamba"),
)

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = tuple(TABLE) if os.environ.get("ADACC_ALL_ARCHITECTURES") == "1" else FAST


@pytest.fixture
def quiet():
    """Ignore warnings of other people's models. Warnings of adacc_hf stay errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(transformers|torch)\.")
        yield


def promises(verdict: Verdict) -> dict[str, str]:
    return {name: verdict.row()[name] for name in ("exact", "compressed", "stored bytes", "mixed")}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", NAMES)
def test_keeps_all_promises(name):
    if name == "deberta" and isinstance(modeling_deberta.build_relative_position, torch.jit.ScriptFunction):
        pytest.skip("TorchScript in this release of Transformers reads data; the page is of a later one")
    verdict = check(TABLE[name])
    documented = documented_rows()[name]
    assert promises(verdict) == {key: documented[key] for key in promises(verdict)}
    assert bool(verdict.row()["notes"]) == bool(documented["notes"])


def documented_rows() -> dict[str, dict[str, str]]:
    """Return the rows of docs/SUPPORT.md by architecture."""
    rows, columns = {}, []
    for line in SUPPORT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| architecture") or not line:
            columns = cells if line else []
        elif columns and not cells[0].startswith("---"):
            rows[cells[0]] = dict(zip(columns, cells, strict=True))
    return rows


def test_the_page_lists_the_table():
    rows = documented_rows()
    assert list(rows) == list(TABLE)
    assert [row["model"] for row in rows.values()] == [architecture.model_class for architecture in TABLE.values()]


def test_at_least_44_are_green_on_the_page():
    promised = ("exact", "compressed", "stored bytes", "mixed")
    green = [name for name, row in documented_rows().items() if {row[key] for key in promised} == {"yes"}]
    assert len(green) >= 44


def test_no_promise_is_broken_on_the_page():
    """Each architecture is exact, or listed as refused or as run under torch's checkpoint."""
    for name, row in documented_rows().items():
        assert row["exact"] == "yes" or row["notes"].startswith("refused"), name


def test_every_cache_is_off_and_every_dropout_on():
    config = TABLE["t5"].build().config
    model = TABLE["t5"].build()
    assert config.use_cache is False
    assert model.decoder.config.use_cache is False
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.1}


def test_batches_differ_in_values_alone():
    first_batch, second_batch = TABLE["bert"].make_batch(0), TABLE["bert"].make_batch(1)
    assert {name: t.shape for name, t in first_batch.items()} == {name: t.shape for name, t in second_batch.items()}
    assert not torch.equal(first_batch["input_ids"], second_batch["input_ids"])


@pytest.mark.slow
@pytest.mark.nightly
class TestTheCheckCanFail:
    """Each check of a promise fails if an error is planted."""

    def test_a_wrong_replay_breaks_exactness(self, monkeypatch):
        run = Call._run

        def falsify_result(self, program, slot, cells):
            tensor = run(self, program, slot, cells)
            return tensor + 1e-3 if tensor.is_floating_point() else tensor

        monkeypatch.setattr(Call, "_run", falsify_result)
        assert check(TABLE["gpt2"]).row()["exact"] == "NO"


def test_the_page_has_the_region_of_the_tables():
    page = SUPPORT.read_text(encoding="utf-8")
    (region,) = REGION.finditer(page)
    counts = re.match(r"\d+ of (\d+) architectures keep", region[0].split("\n")[2])
    assert int(counts[1]) == len(TABLE)
    readme = " ".join((SUPPORT.parents[1] / "README.md").read_text(encoding="utf-8").split())
    num_kept = counts[0].partition(" ")[0]
    assert f"all {counts[1]} train bit-equal. {num_kept} also pass" in readme
