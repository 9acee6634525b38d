"""Records without torch: settings, profiles, policies, memory of a step, and their text and HTML in notebooks."""
