"""Install the emulated device in every Python process that starts with this folder on its path."""

import emulated_cuda  # noqa: F401
