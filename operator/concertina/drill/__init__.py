"""`concertina drill`: inject a known fault into a running job, watch it recover, and give a verdict.

`scenarios` is the table of the drills, `faults` injects and reverts faults, `verdict` evaluates the observations
(pure), and `run` does all of it in order.
"""
