"""Links and long description of the package. Everything else is in setup.cfg.

The section `repository` of setup.cfg is the only place that names the repository. Links of README.md are relative, and
lead nowhere on the page of a package index. They become absolute here, at the tag of the version. Without an address,
the long description has the text of the links without their targets, and no picture.
"""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")
PLACEHOLDER = "<URL of this repository>"
"""Text of README.md in the place of the repository's address."""
PAPER = "https://arxiv.org/abs/2508.00806"


def long_description(readme: str, url: str, version: str) -> str:
    """Return the text of README.md with links and pictures that work outside of the repository."""

    def absolute(link: re.Match[str]) -> str:
        target = link["target"]
        if target.startswith(("https://", "mailto:")):
            return link[0]
        if not url or target.startswith("#"):
            return "" if link["picture"] else link["text"]
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({url}/{kind}/v{version}/{target})"

    return LINK.sub(absolute, readme).replace(PLACEHOLDER, url or PLACEHOLDER)


def project_urls(url: str, version: str) -> dict[str, str]:
    """Return the links of the package. The paper's is the only one without a repository."""
    if not url:
        return {"Paper": PAPER}
    return {
        "Repository": url,
        "Documentation": f"{url}/blob/v{version}/docs/GUIDE.md",
        "Changelog": f"{url}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{url}/issues",
        "Paper": PAPER,
    }


def main() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    url = config["repository"]["url"].rstrip("/")
    source = (ROOT / "adacc_hf" / "artifacts" / "files.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0]
    setup(
        long_description=long_description((ROOT / "README.md").read_text(encoding="utf-8"), url, version),
        long_description_content_type="text/markdown",
        project_urls=project_urls(url, version),
    )


if __name__ == "__main__":
    main()
