"""`concertina drill`: hurt a running job in one known way, watch it recover, heal what was hurt, and give a verdict.

`scenarios` is the table of what can be done, `faults` do the harm and heal it, `verdict` evaluates what followed
(pure), `run` goes through it from top to bottom.
"""
