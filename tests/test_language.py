"""Wording of docstrings, comments and names: plain technical English, counted."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("adacc_hf", "callbacks", "kernels", "recipes", "eval")

OPENING = re.compile(
    r"(What|Whether|How|Who|Whom|Whose|Where|That|Those|These|Such|As|Of|None|Nothing|It|They|If it|In their)\b(?!-)"
)
"""First words of a docstring that name neither an action nor a thing."""
RIDDLE = re.compile(
    r"\b(what (comes|came|becomes|became|it is|they are)|one such|none such|no such|such a one|the same of"
    r"|otherwise than"
    r"|are such|is such|hang together|is told|are told|told of|goes by|let go of|beside it|leave away|have to none"
    r"|has none|have none|there are none|nobody|somebody|anybody)\b",
    re.IGNORECASE,
)
"""Phrases whose noun a reader has to guess."""
PARTICIPLES = frozenset(
    (
        *("found", "given", "known", "made", "kept", "left", "seen", "wanted", "held", "told", "done", "taken", "said"),
        *("meant", "ran", "moved", "chosen", "asked", "noted"),
    )
)
"""Names that are a bare participle."""
OLD_WORDS = re.compile(
    r"\b(rival_ms|rivals?|descent|held_bytes|spoils?|spoiled|spoiling|fragile|situations?|mistakes|instruments?|drawing"
    r"|remakes?|remade|remaking|restless|strange)\b",
    re.IGNORECASE,
)
"""Words that the terms of docs/GLOSSARY.md have replaced."""


class Text(NamedTuple):
    place: str
    text: str


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def docstrings_and_variables(path: Path) -> tuple[list[Text], list[Text]]:
    """Return every docstring of a file, those of attributes too, and its variables and parameters."""
    docstrings, variables = [], []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                place = f"{path.relative_to(ROOT)}:{statement.lineno}"
                docstrings.append(Text(place, " ".join(value.value.split())))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            variables.append(Text(f"{path.relative_to(ROOT)}:{node.lineno}", node.id))
        elif isinstance(node, ast.arg):
            variables.append(Text(f"{path.relative_to(ROOT)}:{node.lineno}", node.arg))
    return docstrings, variables


def docstrings(path: Path) -> list[Text]:
    return docstrings_and_variables(path)[0]


def comments(path: Path) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield Text(f"{path.relative_to(ROOT)}:{token.start[0]}", token.string)


def listed(texts: list[Text]) -> str:
    return "\n" + "\n".join(f"{place}: {text[:100]}" for place, text in texts)


def test_docstrings_open_with_a_verb_or_a_noun():
    texts = [text for path in python_files(*PRODUCT) for text in docstrings(path)]
    bad = [text for text in texts if OPENING.match(text.text)]
    assert len(bad) <= 0.01 * len(texts), listed(bad)


def test_no_phrase_stands_for_a_noun():
    texts = [text for path in python_files(*PRODUCT) for text in (*docstrings(path), *comments(path))]
    bad = [text for text in texts if RIDDLE.search(text.text)]
    assert len(bad) <= 0.005 * len(texts), listed(bad)


def test_variables_are_nouns():
    bad = [
        text
        for path in python_files(*PRODUCT)
        for text in docstrings_and_variables(path)[1]
        if text.text in PARTICIPLES
    ]
    assert len(bad) <= 20, listed(bad)


def test_docstrings_use_the_words_of_the_glossary():
    texts = [text for path in python_files(*PRODUCT) for text in docstrings(path)]
    bad = [text for text in texts if OLD_WORDS.search(text.text)]
    assert not bad, listed(bad)
