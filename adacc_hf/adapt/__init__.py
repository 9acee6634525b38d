"""The parts of the rectifier: what is measured while training, and when another policy is worth following."""
