"""Startup module of the Python processes of `adacc run`: adds AdaccCallback to every Trainer that begins to train.

`adacc run` puts this folder first on PYTHONPATH, and Python imports `sitecustomize` before it runs a program. Most
programs never train, and some run in environments without adacc_hf. Therefore this module imports only the standard
library, waits until the program itself imports the Trainer, and imports adacc_hf when training begins.
"""

import os
import sys
from contextlib import suppress
from functools import wraps
from importlib import import_module

TRAINER_MODULE = "transformers.trainer"
SETTINGS = os.environ.get("ADACC_HF_RUN_SETTINGS")
"""Settings of AdaccConfig in JSON, or None if this process is not part of `adacc run`."""
RECORDS = os.environ.get("ADACC_HF_RUN_RECORDS", "")
"""Folder in which `record` creates empty files, so that `adacc run` can see how far the processes got."""


class TrainerFinder:
    """Finder on sys.meta_path that calls `wrap_train_begin` after the import of the Trainer's module."""

    def find_spec(self, name, path=None, target=None):
        """Return the import spec of the Trainer's module, as the other finders give it. Return None for every other
        module."""
        if name != TRAINER_MODULE:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            call_after_import(spec.loader, wrap_train_begin)
        return spec


def call_after_import(loader, function):
    """Make `loader` call `function(module)` once, after the loader has executed the module. The loader keeps its class,
    because `inspect` and Transformers read the module's source through the loader."""
    exec_module = loader.exec_module

    def execute(module):
        del loader.exec_module  # the attribute of the instance, which hides the method
        exec_module(module)
        function(module)

    loader.exec_module = execute


def wrap_train_begin(trainer_module):
    """Wrap the method `on_train_begin` of the Trainer's CallbackHandler. The wrapper adds an AdaccCallback. The
    callback could be added more simply to the list of default callbacks, but ms-swift replaces this list."""
    record("trainer")
    handler_class = trainer_module.CallbackHandler
    on_train_begin = handler_class.on_train_begin

    @wraps(on_train_begin)
    def add_and_begin(handler, args, state, control, **kwargs):
        record("training")
        try:
            from adacc_hf.callbacks.launched import add_adacc_callback
        except ModuleNotFoundError as error:
            if error.name != "adacc_hf":
                raise
            raise ModuleNotFoundError(
                f"adacc run: adacc_hf is not installed for {sys.executable}, which runs this training: install it "
                f"there, or train without `adacc run`",
                name=error.name,
            ) from None
        add_adacc_callback(handler, state, SETTINGS)
        return on_train_begin(handler, args, state, control, **kwargs)

    handler_class.on_train_begin = add_and_begin


def record(event):
    """Create an empty file named `event` in the folder RECORDS, which `adacc run` reads at the end."""
    with suppress(OSError):  # the folder is gone if this process outlives `adacc run`, which then reads nothing more
        open(os.path.join(RECORDS, event), "a").close()


def run_next_sitecustomize():
    """Import the `sitecustomize`, if any, that Python would have imported without `adacc run`."""
    folder = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    own_module = sys.modules.pop("sitecustomize")
    try:
        import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own_module)


if __name__ == "sitecustomize":
    if SETTINGS is not None:
        record("python")
        sys.meta_path.insert(0, TrainerFinder())
    run_next_sitecustomize()
