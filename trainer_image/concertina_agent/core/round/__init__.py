"""What an agent knows about its round: members, workers, failures and stragglers. The package has no side effects.

A round is a period in which a fixed set of replicas trains.
"""
