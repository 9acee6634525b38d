"""Training memory and speeds that others measured and published, and the planner's predictions for them."""
