"""What torch and Transformers lack, and every private name of theirs that is used."""
