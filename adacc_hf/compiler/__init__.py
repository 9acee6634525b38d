"""The same decisions inside compiled graphs: a partitioner for AOTAutograd that keeps, codes or recomputes every value.

    torch.compile(model, backend="adacc", options={"memory_budget": 0.5})

`joint_graph` reads the joint forward and backward graph as one kind of block, `graph_cost` prices it as Inductor would
run it, `graph_program` decides with the integer program of `milp`, and `rewrite` puts the codecs into both graphs,
where Inductor fuses them with their neighbours.
"""

from adacc_hf.compiler.compiled_policy import CompiledPolicy, RegionPlan
from adacc_hf.compiler.partitioner import AdaccPartitioner

__all__ = ["AdaccPartitioner", "CompiledPolicy", "RegionPlan"]
