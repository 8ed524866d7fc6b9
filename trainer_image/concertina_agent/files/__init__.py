"""Files in the volume of a replica: snapshots, and the highest round that the agent has seen.

A round is a period in which a fixed set of replicas trains. A snapshot is a copy of the training state in node memory.
"""
