"""AdaccPlugin in a stand-in for axolotl, with the signatures of axolotl 0.18.0.

The stand-in follows src/axolotl/integrations/base.py and config.py at commit 067b021c8b87 of 24 July 2026. axolotl
loads a plugin by its import path, merges its settings with its own by inheritance, and dumps the checked settings into
a dict that every hook receives.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

pydantic = pytest.importorskip("pydantic")

from adacc_hf import AdaccCallback  # noqa: E402

PLUGIN = "adacc_hf.integrations.axolotl.AdaccPlugin"


class BasePlugin:
    """The methods of axolotl's BasePlugin that AdaccPlugin overrides, and the one that is called with raw settings."""

    def register(self, cfg: dict) -> None: ...

    def get_input_args(self) -> str | None: ...

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []


class AxolotlInputConfig(pydantic.BaseModel):
    """Some settings of axolotl. Like the original, it ignores unknown settings."""

    base_model: str
    plugins: list[str] | None = None
    gradient_checkpointing: str | bool | None = False
    activation_offloading: str | bool | None = False
    layer_offloading: bool | None = False


class DictDefault(dict):
    """Dict whose missing keys read as None, also as attributes."""

    def __missing__(self, key: str) -> None:
        return None

    __getattr__ = dict.__getitem__


@pytest.fixture
def axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stand-in importable as axolotl, for this test alone."""
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = BasePlugin
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "adacc_hf.integrations.axolotl", raising=False)
    yield
    sys.modules.pop("adacc_hf.integrations.axolotl", None)


def imported(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def load(**settings: Any) -> tuple[Any, DictDefault]:
    """Return the plugin and the checked configuration, as axolotl makes them of a YAML file."""
    raw = {"base_model": "tiny", "plugins": [PLUGIN], **settings}
    plugin = imported(PLUGIN)()
    plugin.register(raw)
    merged = type("AxolotlInputConfig", (AxolotlInputConfig, imported(plugin.get_input_args())), {})
    return plugin, DictDefault(merged(**raw).model_dump(exclude_none=True))


def callbacks(**settings: Any) -> list[Any]:
    plugin, cfg = load(**settings)
    return plugin.add_callbacks_pre_trainer(cfg=cfg, model=None)


@pytest.mark.usefixtures("axolotl")
def test_settings_of_the_file_reach_the_callback() -> None:
    (callback,) = callbacks(adacc_memory_budget="20GiB", adacc_actions=["retain", "recompute"], adacc_outliers=False)
    assert type(callback) is AdaccCallback
    assert callback.config.changed_settings == {
        "memory_budget": "20GiB",
        "actions": ("retain", "recompute"),
        "outliers": False,
    }


@pytest.mark.usefixtures("axolotl")
@pytest.mark.parametrize("budget", ["auto", "512 MB", 0.5, 1.0, 20_000_000_000])
def test_a_budget_keeps_its_type(budget: Any) -> None:
    """A number of bytes must not become a fraction or a text."""
    (callback,) = callbacks(adacc_memory_budget=budget)
    assert callback.config.memory_budget == budget
    assert type(callback.config.memory_budget) is type(budget)


@pytest.mark.usefixtures("axolotl")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adacc_memory_bugdet": "20GiB"}, "adacc_memory_bugdet='20GiB' is not a setting .*: choose memory_budget"),
        ({"adacc_memory_budget": 2.0}, r"memory_budget=2.0 is outside \(0, 1\]"),
        ({"adacc_head": "tiny"}, "head='tiny' is unknown"),
        ({"activation_offloading": True}, "activation_offloading=True: .*: set activation_offloading: false"),
        ({"activation_offloading": "disk"}, "activation_offloading='disk'"),
        ({"layer_offloading": True}, "layer_offloading=True"),
        ({"gradient_checkpointing": "offload"}, "gradient_checkpointing='offload'"),
    ],
)
def test_errors_come_before_a_model_is_loaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        load(**settings)
