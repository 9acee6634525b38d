"""Policy solver: integer programs, frontiers of plans, mixtures, least peaks, and the search for the best policy."""
