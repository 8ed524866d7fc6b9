"""What is wrong with a run, named from what its status, metrics and logs say. Pure: it asks nobody."""
