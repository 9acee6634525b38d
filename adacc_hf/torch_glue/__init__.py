"""Interface to torch and Transformers: memory, state, ranks, autograd, Dynamo, private names, and their releases."""
