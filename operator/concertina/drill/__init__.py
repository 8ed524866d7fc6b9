"""`concertina drill`: inject one known fault into a running job, watch it recover, revert the fault, and give a
verdict.

`scenarios` is the table of what can be done, `faults` inject and revert, `verdict` evaluates what followed
(pure), `run` goes through it from top to bottom.
"""
