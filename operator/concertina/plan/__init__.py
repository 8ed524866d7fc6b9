"""Decision functions of the operator, one policy per file. They are pure: they use no clock, no I/O and no logging."""
