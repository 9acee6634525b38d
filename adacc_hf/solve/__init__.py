"""The parts of the policy maker: programs, frontiers, mixtures, peaks, and the search over them."""
