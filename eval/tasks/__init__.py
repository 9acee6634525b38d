"""Zero-shot tasks, and the scores of models on them."""
