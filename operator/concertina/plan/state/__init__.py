"""Choice of the training state from which a round starts, and of the members that store copies of the state.

A round is a period in which a fixed set of replicas trains.
"""
