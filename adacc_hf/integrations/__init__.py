"""Adapters of AdaccSession and AdaccCallback for other frameworks. Each module needs the framework's package."""
