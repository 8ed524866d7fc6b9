"""`python -m concertina.cli` is the command `concertina`."""

from concertina.cli.main import app

app(prog_name="concertina")
