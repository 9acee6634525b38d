"""Train Hugging Face language models under a memory budget. Command line: `adacc`, `adacc run`, `adacc verify`.

Names are imported on first use. Therefore the import of this package does not initialize CUDA, and does not load
triton, highspy or lm_eval.
"""

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from adacc_hf.artifacts.files import __version__

_here = _os.path.dirname(_os.path.abspath(__file__))
_root = _os.path.dirname(_here)
if not _os.path.isdir(_os.path.join(_here, "callbacks")) and _os.path.isfile(_os.path.join(_root, "setup.cfg")):
    # In a source checkout, callbacks/, kernels/ and eval/ are next to this folder; in a wheel they are inside.
    __path__.append(_root)

if TYPE_CHECKING:
    from adacc_hf.adapt.session import AdaccSession
    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.errors import (
        AdaccError,
        CompiledBlockError,
        InfeasibleBudgetError,
        NestedHooksError,
        NoBlocksError,
        PolicyMismatchError,
        TapeMismatchError,
        UncoveredBlockError,
    )
    from adacc_hf.artifacts.policy import Action, Policy
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.callbacks.adacc import AdaccCallback
    from adacc_hf.callbacks.throughput import ThroughputCallback
    from adacc_hf.callbacks.trainer_mixin import AdaccTrainerMixin
    from adacc_hf.price.profiler import profile_model
    from adacc_hf.run.policy_handle import apply_policy, remove_policy
    from adacc_hf.solve.solver import solve_policy

_EXPORTS = {
    "AdaccCallback": "adacc_hf.callbacks.adacc",
    "AdaccTrainerMixin": "adacc_hf.callbacks.trainer_mixin",
    "ThroughputCallback": "adacc_hf.callbacks.throughput",
    "AdaccConfig": "adacc_hf.artifacts.config",
    "AdaccSession": "adacc_hf.adapt.session",
    "AdaccError": "adacc_hf.artifacts.errors",
    "CompiledBlockError": "adacc_hf.artifacts.errors",
    "InfeasibleBudgetError": "adacc_hf.artifacts.errors",
    "NestedHooksError": "adacc_hf.artifacts.errors",
    "NoBlocksError": "adacc_hf.artifacts.errors",
    "PolicyMismatchError": "adacc_hf.artifacts.errors",
    "TapeMismatchError": "adacc_hf.artifacts.errors",
    "UncoveredBlockError": "adacc_hf.artifacts.errors",
    "apply_policy": "adacc_hf.run.policy_handle",
    "Action": "adacc_hf.artifacts.policy",
    "Policy": "adacc_hf.artifacts.policy",
    "Profile": "adacc_hf.artifacts.profile",
    "remove_policy": "adacc_hf.run.policy_handle",
    "profile_model": "adacc_hf.price.profiler",
    "solve_policy": "adacc_hf.solve.solver",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'adacc_hf' has no attribute {name!r}")
    value = getattr(_import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
