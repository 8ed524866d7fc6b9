"""Files in the volume of a replica: snapshots, and the highest round that the agent has seen."""
