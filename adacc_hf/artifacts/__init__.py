"""Classes that need no torch: settings, profiles, policies and errors, with their files, their text and HTML, and the
simulation of a step's memory."""
