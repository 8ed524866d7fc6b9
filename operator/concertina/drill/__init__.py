"""`concertina drill`: hurt a running job in one known way, watch it recover, heal what was hurt, and give a verdict.

`scenarios` is the table of what can be played, `faults` and its neighbours do the harm and heal it, `watch` sees what
follows, `verdict` judges it (pure), `play` goes through it from top to bottom.
"""
