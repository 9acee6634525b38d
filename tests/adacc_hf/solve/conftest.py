"""Fixture of the solver's tests: a count of its programs."""

from collections.abc import Iterator
from unittest.mock import MagicMock, patch

import pytest

from adacc_hf.solve.linear_program import Solver


@pytest.fixture
def solves() -> Iterator[MagicMock]:
    """A mock whose `call_count` is the number of linear and integer programs that the test has solved."""
    with patch.object(Solver, "minimize", autospec=True, side_effect=Solver.minimize) as minimize:
        yield minimize
