"""What no operator of a block shows: code that torch.compile has made of a part of it, and what tensors consist of."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

COMPILED = "a part of it runs as code that torch.compile made, whose operators no record shows"

WRAPPED = "it makes tensors that consist of others (float8 training), which no storage shows"
CHANGED_UNSEEN = "it changes in place, behind autograd's back (`.data`), what it saved for backward"
HIDDEN = (COMPILED, WRAPPED)
"""Reasons for which a tape's operators cannot be run one by one."""

_NODE = "CompiledFunctionBackward"
"""What autograd calls the one node of a compiled graph, whatever its backend."""


def runs_compiled_code(result: Any, given: Any) -> bool:
    """Whether compiled code took part in making `result` out of `given`, both trees of tensors."""
    ends = {leaf.grad_fn for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}
    nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    seen = {None, *ends}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        if node.name() == _NODE:
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False
