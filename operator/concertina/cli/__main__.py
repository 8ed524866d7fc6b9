"""`python -m concertina.cli` runs the command `concertina`."""

from concertina.cli.main import app

app(prog_name="concertina")
