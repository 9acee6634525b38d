"""Interface to torch: private names, module hooks, autograd nodes, Dynamo, communication between ranks, state of
modules."""
