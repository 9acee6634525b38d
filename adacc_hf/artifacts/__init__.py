"""Classes that need no torch: settings, profiles, policies and errors, with their files, and the memory simulation."""
