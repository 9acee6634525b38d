"""Values of `memory_budget` and `host_memory`: accepted forms, and messages that say what was meant."""

import re

import pytest

from adacc_hf.artifacts.budget_values import check_memory_budget
from adacc_hf.artifacts.config import AdaccConfig

BUDGETS = 'use "auto", a float in (0, 1] (fraction of the bytes that plain training stores), an int from 65536 (bytes)'
HOST_SIZES = "use None, a float in (0, 0.8] (fraction of the host's free memory), an int from 65536 (bytes), or a size"


@pytest.mark.parametrize("budget", ["auto", "20GiB", "1 gb", "65536", 65536, 10**12, 1.0, 1e-9])
def test_budgets_of_every_form_are_taken(budget):
    check_memory_budget(budget)
    assert AdaccConfig(memory_budget=budget).memory_budget == budget


WRONG = [0, -1, 0.0, 1.0001, -0.5, float("nan"), True, None, [1], 2**63]


@pytest.mark.parametrize("budget", [*WRONG, "0", "all", "20 GiBs", "", "1/2", "inf", "-5GiB", "1.2.3e-4"], ids=repr)
def test_other_budgets_are_refused_with_their_value_and_all_allowed_forms(budget):
    with pytest.raises(ValueError, match=re.escape(f"memory_budget={budget!r} ") + ".*" + re.escape(BUDGETS)):
        check_memory_budget(budget)


@pytest.mark.parametrize(
    ("budget", "meant"),
    [
        (1, '1.0, all that plain training stores, or "1GiB"'),
        ("1", '1.0, all that plain training stores, or "1GiB"'),
        (20, '"20GiB"'),
        ("20 B", '"20GiB"'),
        (40_000, '"40000MiB"'),
        (2.0, '"2GiB"'),
        (50.0, '0.5 or "50GiB"'),
        (2e10, "the int 20000000000"),
        ("2e10", "the int 20000000000"),
        ("20_000_000_000", "the int 20000000000"),
        ("0,5", "0.5"),
        ("50%", "the fraction 0.5"),
        ("12.5 percent", "the fraction 0.125"),
        ("20G", '"20GiB"'),
        ("1.5 mi", '"1.5MiB"'),
        ("20 gigabytes", '"20GiB"'),
        ("65536 k", '"65536KiB"'),
        ("3 GiBi", '"3GiB"'),
        ("20,5GiB", '"20.5GiB"'),
    ],
)
def test_what_a_budget_may_have_meant_is_written(budget, meant):
    with pytest.raises(ValueError, match=re.escape(f", which may have been meant as {meant}: {BUDGETS}")):
        AdaccConfig(memory_budget=budget)


@pytest.mark.parametrize("budget", ["150%", "0%", float("inf"), 2**70])
def test_nothing_is_guessed_from_other_values(budget):
    with pytest.raises(ValueError, match="memory_budget=") as error:
        check_memory_budget(budget)
    assert "meant" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "fraction"), [("0.5", 0.5), (" .25 ", 0.25), ("1.0", 1.0), ("1.", 1.0), ("5e-1", 0.5), ("1E-2", 0.01)]
)
def test_a_fraction_may_be_text(text, fraction):
    """YAML reads a value in quotes as text, and 5e-1 also without quotes."""
    assert AdaccConfig(memory_budget=text).memory_budget == fraction
    if fraction <= 0.8:
        assert AdaccConfig(host_memory=text).host_memory == fraction


@pytest.mark.parametrize(
    ("setting", "start"),
    [
        (64, 'host_memory=64 is outside [65536, 9223372036854775807] bytes, which may have been meant as "64GiB": '),
        ("64G", "host_memory='64G' is not a size, which may have been meant as \"64GiB\": "),
        ("50%", "host_memory='50%' is not a size, which may have been meant as the fraction 0.5: "),
        ("90%", "host_memory='90%' is not a size: "),
        ("0.9", "host_memory=0.9 is outside (0, 0.8]: "),
        (2.0, 'host_memory=2.0 is outside (0, 0.8], which may have been meant as "2GiB": '),
        (True, "host_memory=True has type bool: "),
        ("much", "host_memory='much' is not a size: "),
        (0.0, "host_memory=0.0 is outside (0, 0.8]: "),
        ([], "host_memory=[] has type list: "),
    ],
)
def test_other_sizes_of_host_memory_are_refused(setting, start):
    with pytest.raises(ValueError, match=re.escape(start + HOST_SIZES)):
        AdaccConfig(host_memory=setting)
