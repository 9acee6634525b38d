"""Output layer and loss of a language model, computed in chunks, so that the full logits never exist in memory."""
