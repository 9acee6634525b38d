"""Adapters of AdaccSession for other training frameworks. Each module needs the framework's package."""
