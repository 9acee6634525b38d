"""The parts of the replanner: what is measured while training, and when another policy is worth following."""
