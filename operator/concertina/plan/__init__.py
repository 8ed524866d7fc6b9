"""Decision functions of the operator, one policy per file. They read no clock, do no I/O and write no log."""
