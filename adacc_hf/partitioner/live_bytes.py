"""What a backward graph has live at any time, as its operators show it: what it is given, temporaries and gradients.

Operators run in the order of the graph. What lies in memory is what products, attention and gathers read and make, what
reductions make, and gradients; all else is fused with what reads it. Inductor may run operators in another order and
fuse across a distance, so that more is live: a step's measured peak was up to 8 % above this on small models, and where
next to nothing is stored up to 16 %. What `dry_run` finds once the graph is compiled is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set

import torch
from torch import fx

from adacc_hf.partitioner.functorch import hint, is_getitem, op_types
from adacc_hf.partitioner.joint_graph import is_held, nbytes_of, root_of


def most_live_bytes(graph: fx.Graph, elsewhere: Set[str]) -> int:
    """Most bytes live while `graph` runs, without the inputs named in `elsewhere`, which somebody else holds."""
    results = {root_of(node) for node in graph.find_nodes(op="output")[0].args[0] if isinstance(node, fx.Node)}
    tensors = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    lying = [node for node in tensors if _lies_in_memory(node, results)]
    own = [node for node in lying if node.name not in elsewhere]
    dying = _last_reads(lying, set(own) - results)
    live = most = sum(nbytes_of(node) for node in own if node.op == "placeholder")
    for node in own:
        if node.op == "placeholder":
            continue
        freed = sorted((nbytes_of(read) for read in dying[node]), reverse=True)
        if op_types().is_fusible(node) and nbytes_of(node) in freed:  # it is written over what it reads last
            freed.remove(nbytes_of(node))
        else:
            live += nbytes_of(node)
        most = max(most, live)
        live -= sum(freed)
    return most


def _lies_in_memory(node: fx.Node, results: Set[fx.Node]) -> bool:
    if root_of(node) is not node:
        return False
    return node.op == "placeholder" or node in results or is_getitem(node) or is_held(node) or _is_reduction(node)


def _is_reduction(node: fx.Node) -> bool:
    reads = [read.meta["val"] for read in node.all_input_nodes if isinstance(read.meta.get("val"), torch.Tensor)]
    return any(hint(node.meta["val"].numel()) < hint(read.numel()) for read in reads)


def _last_reads(lying: list[fx.Node], mortal: Set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each value that lies in memory those of `mortal` that nothing later reads."""
    in_memory = set(lying)
    last: dict[fx.Node, fx.Node] = {node: node for node in lying}
    for node in lying:
        pending, seen = list(node.all_input_nodes), set[fx.Node]()
        while pending:
            read = root_of(pending.pop())
            if read in seen:
                continue
            seen.add(read)
            if read in in_memory:
                last[read] = node  # nodes come in their order, so the last one stays
            else:
                pending += read.all_input_nodes
    dying = defaultdict(list)
    for node, reader in last.items():
        if node in mortal:
            dying[reader].append(node)
    return dying
