"""Transitions from one round to the next.

`claims` begins a round and asks replicas to join it. `commits` chooses its members and starts them. `drains` and
`growth` end a round because its members should change.

In a drain, all ranks stop after the same step. A round is a period in which a fixed set of replicas trains.
"""
