"""Module paths of graph nodes, and graph tensors in JSON."""

import pytest
from torch import fx

from adacc_hf.compiler.compiled_policy import module_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self'].transformer.h.0.mlp", "transformer.h.0.mlp"),
        ("L['self']", ""),
        ("L['self'].module.h.1", "h.1"),
        ("L['self']._orig_mod.h.1", "h.1"),
        ("h.1", "h.1"),
    ],
)
@pytest.mark.parametrize("kind", ["nn_module_stack", "fwd_nn_module_stack"])
def test_module_paths_begin_at_the_model(path: str, expected: str, kind: str) -> None:
    node = fx.Graph().placeholder("x")
    assert module_path(node) == ""
    node.meta[kind] = {"outer": ("L['self']", object), "inner": (path, object)}
    assert module_path(node) == expected
