"""Facts that an agent knows about its round: members, workers, failures and stragglers.

A round is a period in which a fixed set of replicas trains.

The package has no side effects.
"""
