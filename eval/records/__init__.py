"""What runners leave: records, their schemas, and what is drawn and told of them."""
