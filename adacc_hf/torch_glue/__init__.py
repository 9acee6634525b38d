"""Interface to torch: storages, dispatch, autograd nodes, Dynamo, ranks, state of modules and generators, shapes."""
