"""Output layer and loss of a language model, computed in chunks. The full logits never exist in memory."""
