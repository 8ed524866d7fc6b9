"""Pure decisions, with one policy in each file: no clock, no I/O, no logging."""
