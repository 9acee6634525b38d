"""Records that need no torch, with their files, text and HTML: settings, profiles, policies, errors, memory of a
step."""
