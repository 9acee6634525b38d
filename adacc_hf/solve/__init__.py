"""Policy solver of blocks: integer programs, frontiers of plans, mixtures, least peaks, search for the best policy."""
