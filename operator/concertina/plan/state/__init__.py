"""Choose the training state from which a round starts, and the members that hold copies of it.

A round is a period in which a fixed set of replicas trains.
"""
