"""Policy solver: integer programs, frontiers and mixtures of plans, least peaks, and the search for the best policy."""
