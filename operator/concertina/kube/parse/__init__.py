"""Translation of the API server's objects and messages for the plan. Pure."""
