"""Settings outside their range are refused with their name and range."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.policy import Action


def test_the_defaults_are_valid_and_frozen():
    config = AdaccConfig()
    assert config.parsed_actions == frozenset(Action)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tracking = 32


def test_a_setting_without_its_name_is_refused():
    with pytest.raises(TypeError, match=r"AdaccConfig\(0\.5\): settings .* write AdaccConfig\(memory_budget=0\.5\)"):
        AdaccConfig(0.5)
    with pytest.raises(TypeError, match=r"given by name: write AdaccConfig\(\*\*settings\) for a dict of settings"):
        AdaccConfig({"memory_budget": 0.5})
    with pytest.raises(TypeError, match=r"budget=0\.5 is not a setting of AdaccConfig: choose memory_budget"):
        AdaccConfig(budget=0.5)
    assert "memory_budget" in inspect.signature(AdaccConfig).parameters, "help() shows the settings"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("memory_margin", 0.95, r"memory_margin=0\.95 is outside \[0, 0\.9\]"),
        ("memory_margin", True, "memory_margin=True"),
        ("actions", ("retain", "forget"), "contains 'forget': choose from 'retain', 'compress', 'recompute'"),
        (
            "actions",
            ("retain", "recomputation"),
            "contains 'recomputation', which may have been meant as 'recompute': choose from 'retain'",
        ),
        ("actions", ("recompute",), r"must contain 'retain', .*: write \('retain', 'recompute'\)"),
        ("actions", "retain", r"actions='retain' must be a tuple of names: write \('retain',\)"),
        ("actions", "recompute", r"actions='recompute' must be a tuple of names: write \('retain', 'recompute'\)"),
        ("actions", "retain,compress", r"write \('retain', 'compress'\), with names from 'retain', 'compress', 'rec"),
        ("actions", "lossless", r"write \('retain', 'recompute'\), with names from"),
        ("actions", (), r"write \('retain', 'recompute'\)"),
        ("actions", ("Retain",), "contains 'Retain', which may have been meant as 'retain': choose from"),
        ("codecs", "int8", r"codecs='int8' must be a tuple of names: write \('int8',\)"),
        ("codecs", "int9", r"codecs=\['int9'\] are unknown: choose from .*int8"),
        ("actions", None, "actions=None has type NoneType: it must be a tuple of names"),
        ("block_classes", 5, r"block_classes=5 has type int: it must be a tuple .*, such as \('GPT2Block',\)"),
        (
            "block_classes",
            (AdaccConfig,),
            "block_classes=.*AdaccConfig.*: it must be a tuple of names, each of them a string",
        ),
        ("codecs", ("zip",), r"codecs=\['zip'\] are unknown: choose from .*int8"),
        ("outliers", "no", "outliers='no' must be True or False"),
        ("min_compress_bytes", -1, "min_compress_bytes=-1 is not an int"),
        ("profile_steps", 0, r"profile_steps=0 is not an int in \[1, 1000\]"),
        ("profile_steps", 64.0, r"profile_steps=64\.0 is not an int"),
        ("tracking", "often", "tracking='often' must be"),
        ("tracking", 0, "tracking=0 must be"),
        ("tracking", True, "tracking=True must be"),
        ("max_error", -0.1, r"max_error=-0\.1 is outside"),
        ("on_over_budget", "stop", """on_over_budget='stop' is unknown: choose from "warn" and "error\""""),
        ("on_uncovered", "stop", """on_uncovered='stop' is unknown: choose from "warn" and "error\""""),
        ("on_uncovered", True, "on_uncovered=True is unknown"),
        ("head", "big", 'head=.big. is unknown: choose from "auto", "plain" and "chunked"'),
    ],
)
def test_a_wrong_setting_is_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        AdaccConfig(**{name: value})


def test_auto_is_the_available_memory_without_the_margin():
    profile = SimpleNamespace(available_bytes=1000)
    budget = Budget.resolve("auto", profile, AdaccConfig(memory_margin=0.25))
    assert (budget.nbytes, budget.limits_peak) == (750, True)


def test_lists_become_tuples_so_that_a_config_can_be_hashed():
    config = AdaccConfig(actions=["retain", "recompute"], block_classes=["GPT2Block"])
    assert config.actions == ("retain", "recompute")
    assert hash(config) == hash(config.with_overrides())


def test_exact_leaves_out_all_that_changes_gradients():
    config = AdaccConfig(memory_budget=0.5, exact=True)
    assert config.actions == ("retain", "recompute")
    assert (config.heads, config.allows_tiles, repr(config)) == (
        ("plain",),
        False,
        "AdaccConfig(memory_budget=0.5, exact=True)",
    )
    assert AdaccConfig(exact=True, actions=("retain",), codecs=("bitmask",)).actions == ("retain",)
    assert config.with_overrides(exact=False) == AdaccConfig(memory_budget=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"actions": ("retain", "compress")},
            r"exact=True allows 'retain' and 'recompute' only, and actions=.*compress",
        ),
        (
            {"codecs": ("bitmask", "int8")},
            r"exact=True allows lossless codecs .* and codecs=\('bitmask', 'int8'\) is not",
        ),
        (
            {"head": "chunked"},
            "exact=True allows 'auto' and 'plain' only, and head='chunked' is not bit-equal to plain",
        ),
    ],
)
def test_a_setting_that_contradicts_exact_is_named(settings, message):
    with pytest.raises(ValueError, match=f"{message}.*: leave out .*, or exact"):
        AdaccConfig(exact=True, **settings)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("memory_buget", "memory_budget"),
        ("guard", 'tracking="off"'),
        ("budget", "memory_budget"),
        ("zzz", "memory_budget, m"),
        ("Memory_Budget", "memory_budget$"),
        ("lossless", "exact=True"),
        ("length_buckets", "memory_budget, m"),
        ("offload", 'host_memory="64GiB"'),
    ],
)
def test_a_setting_that_does_not_exist_is_named_with_the_nearest(name, suggestion):
    with pytest.raises(TypeError, match=f"{name}=3 is not a setting of AdaccConfig: choose {suggestion}"):
        AdaccConfig().with_overrides(**{name: 3})
