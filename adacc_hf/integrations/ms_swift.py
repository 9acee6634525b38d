"""Registration of AdaccCallback in ms-swift, from a file passed as `--external_plugins`. Needs the package `ms-swift`.

ms-swift creates its callbacks by name and passes no settings to them. Therefore a Python file registers the callback
with its settings:

    # adacc_plugin.py
    from adacc_hf.integrations.ms_swift import register

    register(memory_budget="20GiB")

Then start training by `swift sft --external_plugins adacc_plugin.py --callbacks adacc ...`.
"""

from __future__ import annotations

from typing import Any

from swift.callbacks import callbacks_map

from adacc_hf.adapt.run_state import PolicySource
from adacc_hf.artifacts.config import AdaccConfig

# Imported with this module, before ms-swift's Trainer replaces torch's checkpoint by one that is always reentrant.
from adacc_hf.callbacks.adacc import AdaccCallback

NAME = "adacc"
"""Name of the callback in `--callbacks`."""


def register(config: AdaccConfig | None = None, *, policy: PolicySource | None = None, **overrides: Any) -> None:
    """Register an AdaccCallback with these settings under the name "adacc" in ms-swift. The arguments are the same as
    for AdaccCallback, and are checked immediately. Each Trainer gets a callback of its own."""
    checked_config = AdaccCallback(config, policy=policy, **overrides).config

    def make_callback(args: Any, trainer: Any) -> AdaccCallback:
        return AdaccCallback(checked_config, policy=policy)

    callbacks_map[NAME] = make_callback
