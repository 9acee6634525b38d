"""Records without torch that the other packages exchange: settings, profiles, policies, and the memory of a step."""
