"""Records without torch: settings, profiles, policies, errors, memory of a step; their text and HTML in notebooks."""
