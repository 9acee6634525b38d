"""The notebook first_hour.ipynb runs from top to bottom, and its cells show what they promise."""

import json
from pathlib import Path

import pytest
from forked_runs import run_forked

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "first_hour.ipynb"
EXPECTED = {
    "callback": "<AdaccCallback(memory_budget=0.5, exact=True): 4 blocks, ",
    "callback.report()": "data:image/png;base64,",
    "profile": "Profile of LlamaForCausalLM on cpu",
    "handle": "PolicyHandle on LlamaForCausalLM",
}
"""Last line of a cell, and a part of the text that the cell shows."""

# Runs the code cells in one namespace and writes what they show. Python's own parser finds a cell's last expression.
RUNNER = """
import ast, json, sys
namespace = {"__name__": "__main__"}
shown = []
for source in json.load(open(sys.argv[1], encoding="utf-8")):
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), namespace)
    value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    methods = [getattr(value, name, None) for name in ("_repr_html_", "_repr_markdown_")]
    shown.append(next((method() for method in methods if method is not None), repr(value)))
json.dump(shown, open(sys.argv[2], "w", encoding="utf-8"))
"""


def code_cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_in_python(folder: Path) -> tuple[list[str], str]:
    """Return the HTML or Markdown that each code cell shows, and all printed text, without Jupyter."""
    (folder / "cells.json").write_text(json.dumps(code_cells()), encoding="utf-8")
    (folder / "runner.py").write_text(RUNNER, encoding="utf-8")
    process = run_forked(folder / "runner.py", "cells.json", "shown.json", cwd=folder, ACCELERATE_USE_CPU="true")
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "shown.json").read_text(encoding="utf-8")), process.stdout + process.stderr


def test_the_notebook_runs_and_shows_what_it_promises(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown, printed = run_in_python(tmp_path)
    assert "equal to plain training: True" in printed
    assert "Adacc: " in printed, "the log at level INFO says what the callback does"
    cells = [(source.splitlines()[-1], html) for source, html in zip(code_cells(), shown, strict=True)]
    for last_line, part in EXPECTED.items():
        texts = [html.replace("&lt;", "<").replace("&#x27;", "'") for line, html in cells if line == last_line]
        assert texts, f"no cell ends with {last_line}"
        assert all(part in text for text in texts), last_line


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
