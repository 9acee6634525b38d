"""Records without torch, and their files: settings, profiles, policies, exceptions, memory of a step; text and HTML."""
