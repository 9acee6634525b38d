"""Interface to torch: private names, module hooks, autograd nodes, Dynamo, exchange between ranks, state of modules."""
