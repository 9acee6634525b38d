"""Adapters of the session and the callback for other frameworks. Each module needs the framework's package."""
