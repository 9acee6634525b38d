"""AdaccPlugin: adapter of AdaccCallback for axolotl. Needs the package `axolotl`.

In axolotl's YAML file, each field of AdaccConfig is a setting with the prefix "adacc_":

    plugins:
      - adacc_hf.integrations.axolotl.AdaccPlugin
    adacc_memory_budget: 20GiB
    adacc_exact: true
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, create_model, model_validator
from transformers import TrainerCallback

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.callbacks.adacc import AdaccCallback

PREFIX = "adacc_"
OFFLOADING = ("activation_offloading", "layer_offloading")
"""Settings of axolotl that a policy cannot be combined with."""


class CheckedSettings(BaseModel):
    """Pydantic base class of `AdaccArgs` that checks axolotl's configuration before the model is loaded."""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, settings: Any) -> Any:
        config_of(settings)
        refuse_offloading(settings)
        return settings


_SETTINGS: dict[str, Any] = {
    f"{PREFIX}{name}": (hint | None, None) for name, hint in get_type_hints(AdaccConfig).items()
}
AdaccArgs = create_model("AdaccArgs", __base__=CheckedSettings, __module__=__name__, **_SETTINGS)
"""Pydantic model of the plugin's settings. axolotl merges this Pydantic model with the Pydantic model of axolotl's own
settings."""


class AdaccPlugin(BasePlugin):
    """Plugin of axolotl that trains within a memory budget."""

    def get_input_args(self) -> str:
        """Return the import path of `AdaccArgs`, the Pydantic model of the plugin's settings."""
        return f"{__name__}.AdaccArgs"

    def add_callbacks_pre_trainer(self, cfg: Mapping[str, Any], model: Any) -> list[TrainerCallback]:
        """Return an AdaccCallback with the settings of the YAML file."""
        return [AdaccCallback(config_of(cfg))]


def config_of(settings: Mapping[str, Any]) -> AdaccConfig:
    """Return the AdaccConfig made from the settings that begin with "adacc_". A setting with the value None keeps its
    default. Raises ValueError for an unknown setting, and for a value out of its range."""
    own_settings = {
        name.removeprefix(PREFIX): value
        for name, value in settings.items()
        if name.startswith(PREFIX) and value is not None
    }
    try:
        return AdaccConfig().with_overrides(**own_settings)
    except TypeError as error:
        raise ValueError(f"{PREFIX}{error}, with {PREFIX!r} in front") from error


def refuse_offloading(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if axolotl's offloading is on: it moves tensors that the policy stores or moves."""
    offloading = {name: settings.get(name) for name in OFFLOADING}
    if settings.get("gradient_checkpointing") in ("offload", "offload_disk"):  # older forms of the first setting
        offloading["gradient_checkpointing"] = settings["gradient_checkpointing"]
    for name, value in offloading.items():
        if value:
            raise ValueError(
                f"{name}={value!r}: AdaccPlugin decides for each activation whether it stays on the device, which "
                f"cannot be combined with offloading: set {name}: false, and adacc_host_memory: 64GiB or another limit "
                f"to use host memory, or remove AdaccPlugin from plugins"
            )
