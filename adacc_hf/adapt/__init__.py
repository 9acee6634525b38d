"""Controller of a run: sessions, measurements while training, and the choice and replacement of policies."""
