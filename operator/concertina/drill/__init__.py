"""`concertina drill`: inject a known fault into a running job, watch it recover, and give a verdict.

`scenarios` is the table of what can be done, `faults` are injected and reverted, `verdict` evaluates what followed
(pure), `run` goes through it from top to bottom.
"""
