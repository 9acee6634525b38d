"""Layout of a recipe's `--help`: the recipe's docstring with its line breaks, and a short usage line."""

import argparse
from typing import Any


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formatter of a recipe's `--help` that keeps the line breaks of the description and adds the defaults."""


def parser_settings(docstring: str | None) -> dict[str, Any]:
    """Return the keyword arguments of a recipe's argument parser, with the recipe's `docstring` as description. A
    recipe accepts about 150 settings. The usage line does not repeat these settings, because the list below the usage
    line contains all of them."""
    return {
        "description": docstring,
        "usage": "%(prog)s [--SETTING VALUE ...]",
        "formatter_class": HelpFormatter,
        "allow_abbrev": False,
    }
