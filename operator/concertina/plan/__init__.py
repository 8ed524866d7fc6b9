"""Decision functions of the operator, one policy per file. All are pure: no clock, no I/O and no logging."""
