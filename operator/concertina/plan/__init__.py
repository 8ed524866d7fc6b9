"""Pure decisions, a policy a file: no clock, no I/O, no logging."""
