"""The code of each how-to page runs unchanged, and Accelerate accepts the launcher files of the pages."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate.commands.config import load_config_from_file
from forked_runs import run_forked

PAGES = sorted((Path(__file__).parent.parent / "docs" / "howto").glob("*.md"))
NOT_RUN = "<!-- not run by the tests"
SAVED = re.compile(r"<!-- saved by the tests as (\S+) -->\n\n```python\n(.*?)```", re.DOTALL)
"""Code that a command of the page runs."""
BLOCK = re.compile(r"(<!--[^>]*-->\n\n)?```(python|bash)\n(.*?)```", re.DOTALL)
YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
PROMISED = {
    "compact": ("'train_loss'",),
    "compile": ("5.562\n5.443\n5.339\n",),
    "explain": ("GPT2Block: transformer.h.0", "retain", "recompute", "compress("),
    "loop": ("adacc/compression_rate", "0.8 4 blocks", "0.2 4 blocks"),
    "long-context": ("chunked head", "of plain training's bytes"),
    "plan": ('"fits": true',),
    "preferences": ("DPO:  2 blocks", "GRPO: 2 blocks"),
    "resume": ("policies set at steps [1]\n", "policies set at steps [1, 4]\n"),
    "verify": ("Bit-equal: the losses and 76 gradients of 5 steps, and the weights after them,",),
    "run": ("'adacc/compression_rate': '0.49", "'train_loss'"),
}
"""Parts of a page's output that do not depend on times."""
PRINTED = re.compile(r"prints?(?:, on a CPU)?(?: \(numbers [a-z ]*\))?:\n\n```text\n(.*?)```", re.DOTALL)
"""Output that a page shows in full."""
ADACC = "import sys; from adacc_hf.cli import main; sys.exit(main())"


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return (language, code) of the blocks that run, in order."""
    matches = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(language, code) for mark, language, code in matches if not mark.startswith((NOT_RUN, "<!-- saved"))]


def run(folder: Path, code: str, *arguments: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = folder / "script.py"
    script.write_text(code, encoding="utf-8")
    process = run_forked(script, *arguments, cwd=folder, PATH=path, ACCELERATE_USE_CPU="true")
    assert process.returncode == 0, process.stderr
    assert "the least possible" not in process.stderr, "a page's budget can be met"
    return process.stdout


def without_numbers(line: str) -> str:
    """Return the line without what depends on times: numbers, and whether masks are stored as bits."""
    return re.sub(r"[0-9]+(\.[0-9]+)?", "N", re.sub(r", [0-9]+ masks? as bits", "", line))


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=[pytest.mark.gate] * (page.stem == "loop")) for page in PAGES]
)
def test_its_code_runs(page: Path, tmp_path: Path) -> None:
    """Run all Python code of the page in one process, then each `adacc` command."""
    for name, text in SAVED.findall(page.read_text(encoding="utf-8")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    page_blocks = blocks(page)
    code = "\n".join(text for language, text in page_blocks if language == "python")
    commands = [line.split() for language, text in page_blocks if language == "bash" for line in text.splitlines()]
    if "from trl import" in code and find_spec("trl") is None:
        pytest.skip("the peers' extra installs trl")
    output = run(tmp_path, code)
    for name, *arguments in commands:
        assert name == "adacc", "the tests run no other command"
        output += run(tmp_path, ADACC, *arguments)
    assert all(word in output for word in PROMISED.get(page.stem, ("overhead",)))
    shown = [line for text in PRINTED.findall(page.read_text(encoding="utf-8")) for line in text.splitlines()]
    printed = {without_numbers(line) for line in output.splitlines()}
    assert [line for line in shown if without_numbers(line) not in printed] == []


def test_the_launchers_files_are_read(tmp_path: Path) -> None:
    """Accelerate rejects unknown keys."""
    texts = [text for page in PAGES for text in YAML.findall(page.read_text(encoding="utf-8"))]
    assert len(texts) == 2
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        assert load_config_from_file(str(path)).num_processes == 8


@pytest.mark.parametrize(("multiple", "sizes"), [(None, {13, 15}), (16, {16})], ids=["joined", "padded"])
def test_packed_batches_have_one_size_only_if_they_are_padded(multiple: int | None, sizes: set[int]) -> None:
    """The page on LoRA recommends `pad_to_multiple_of` = batch size x max_length, here 2 x 8."""
    language_modeling = pytest.importorskip("trl.trainer.sft_trainer", reason="the sft extra installs trl")
    collator = language_modeling.DataCollatorForLanguageModeling(
        pad_token_id=0, padding_free=True, pad_to_multiple_of=multiple
    )
    batches = [[{"input_ids": [1] * length} for length in lengths] for lengths in ((8, 7), (8, 5))]
    assert {collator(batch)["input_ids"].numel() for batch in batches} == sizes


def test_every_page_says_what_to_look_at_and_what_can_go_wrong() -> None:
    assert len(PAGES) == 15
    for page in PAGES:
        headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings[-2:] == ["What to look at", "What can go wrong"], page.name
