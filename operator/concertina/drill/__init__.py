"""Command `concertina drill`: inject a known fault into a running job, observe the recovery, and print a verdict.

`scenarios` is the table of the drills. `faults` injects and reverts the faults. `verdict` evaluates the observations
and is pure. `run` performs all steps of a drill.
"""
