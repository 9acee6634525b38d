"""Records that the other packages exchange, without torch: settings, profiles, policies, and the memory of a step."""
