"""Interface to torch. The modules of this package contain all access to private names of torch, module hooks,
autograd's nodes, Dynamo, communication between ranks, and the state of modules."""
