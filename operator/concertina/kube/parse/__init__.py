"""Convert objects and messages of the API server into the data types of plan(). All functions are pure."""
