"""Adacc in torch.compile: a partitioner for compiled graphs, its integer program, a controller, and reports.

AOTAutograd calls the partitioner for each region (compiled graph). The partitioner retains, compresses or recomputes
every value of the graph. The controller of a compiled run sets the share: the fraction of the bytes stored by plain
torch.compile that each region may store.

    torch.compile(model, backend="adacc", options={"memory_budget": 0.5})

`joint_graph` reads the values and operators of the joint forward and backward graph. `graph_cost` estimates the cost of
each operator in Inductor's code. `graph_milp` decides with the integer program of `solve.milp`. `compress_pass` inserts
the codecs into the forward and the backward graph, where Inductor fuses them with neighbouring operators.
"""

from adacc_hf.compiler.compiled_policy import CompiledPolicy, RegionPlan
from adacc_hf.compiler.partitioner import AdaccPartitioner

__all__ = ["AdaccPartitioner", "CompiledPolicy", "RegionPlan"]
