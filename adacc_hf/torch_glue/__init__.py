"""Interface to torch's internals: storages, dispatch, autograd nodes, Dynamo, state of modules and generators."""
