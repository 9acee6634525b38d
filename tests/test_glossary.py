"""The words of docs/GLOSSARY.md, and those that they took the place of."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What can be nothing but the old name. "Floor", "waiting", "decided", "ahead" and "column" are plain words as well.
GONE = (
    "rival_ms", "rivals?", "descent", "held_bytes", "spoils?", "spoiled", "spoiling", "fragile", "situations?",
    "mistakes", "instruments?", "drawing", "remakes?", "remade", "remaking", "restless", "strange",
)  # fmt: skip
NAMES_GONE = ("floor", "Column", "Situation", "Waiting", "Instruments", "ahead", "decided", "sensitive")


def docstrings() -> list[tuple[str, str]]:
    """(place, text) of all public docstrings of the product, those of attributes among them."""
    found = []
    for folder in ("adacc_hf", "callbacks", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    if getattr(node, "name", "").startswith("_"):
                        continue
                    texts = [n.value.value for n in node.body if isinstance(n, ast.Expr) and _is_text(n.value)]
                    place = f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
                    found += [(place, text) for text in texts]
    return found


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_public_docstrings_use_the_words_of_the_glossary() -> None:
    words = re.compile(rf"\b({'|'.join(GONE)})\b", re.IGNORECASE)
    texts = docstrings()
    assert len(texts) > 500, "the product's docstrings were not found"
    assert [f"{place}: {found.group()}" for place, text in texts for found in words.finditer(text)] == []


def test_no_public_name_is_an_old_one() -> None:
    found = []
    for folder in ("adacc_hf", "callbacks", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in NAMES_GONE:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert found == []


def test_every_word_that_is_gone_stands_in_the_glossary() -> None:
    text = (ROOT / "docs" / "GLOSSARY.md").read_text(encoding="utf-8").partition("Words that stood")[2]
    words = re.findall(r"[a-z]+", text)
    assert {"rival", "descent", "spoiled", "fragile", "situation", "instruments", "remake", "restless"} <= set(words)
