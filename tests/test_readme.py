"""The first example runs unchanged and prints what the page shows, the README's facts are the package's, and all links
have targets."""

import configparser
import re
from pathlib import Path

import pytest
from forked_runs import run_forked

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+(\.[0-9]+)?", "N", " ".join(text.split()))


@pytest.mark.gate
def test_the_first_example_prints_what_its_page_shows_and_no_warning(tmp_path):
    page = (ROOT / "docs" / "INSTALL.md").read_text(encoding="utf-8")
    ((code, output),) = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", page, re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    process = run_forked(tmp_path / "example.py", cwd=tmp_path, HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")
    assert process.returncode == 0, process.stderr
    lines = re.split(r"\n(?! )", output.strip())  # a long line goes on with spaces
    assert len(lines) == 3
    printed = without_numbers(process.stderr + process.stdout)
    assert [line for line in lines if without_numbers(line) not in printed] == []
    assert "4 blocks" in process.stdout
    assert [word for word in ("Warning", "[transformers]", "WARNING") if word in process.stderr] == []


def test_its_requirements_are_those_of_the_package():
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg", encoding="utf-8")
    minimum = dict(re.findall(r"^(\w+)>=([0-9.]+)$", options["options"]["install_requires"], re.MULTILINE))
    python = options["options"]["python_requires"].removeprefix(">=")
    assert (
        f"Python {python}, torch {minimum['torch']}, Transformers {minimum['transformers']} and Accelerate "
        f"{minimum['accelerate']}, or newer"
    ) in " ".join(README.split())


def test_it_says_that_nothing_was_measured_on_a_gpu_while_limits_say_so():
    limits = (ROOT / "docs" / "LIMITS.md").read_text(encoding="utf-8")
    assert ("Not yet measured on a GPU" in README) == ("## Not yet measured on a GPU" in limits)


def test_it_is_short_and_begins_with_code():
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1300
    assert len(re.split(r"^    |^```", README, maxsplit=1, flags=re.MULTILINE)[0].split()) < 120


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        if path.startswith("http"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
        names = [re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in headings]
        assert not heading or heading in names, link
