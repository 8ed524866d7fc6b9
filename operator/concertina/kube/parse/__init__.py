"""What objects and sentences of the API server mean to the plan. Pure."""
