"""Everything that measures: speed, memory, the error of gradients, the solver. Each module runs with `python -m`."""
