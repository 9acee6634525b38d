"""The output layer and its loss: whole logits, or chunks of them that never exist together."""
