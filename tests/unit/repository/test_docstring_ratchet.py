"""Ratchet on docstrings: a new violation fails, and the recorded counts only go down."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import docstring_ratchet
from tools.docstring_ratchet import COUNTS_FILE, Key

GOOD = '"""Hold good docstrings."""\n'
PLANTED = '''
def join(names):
    """Returns one name
    of many."""
    if not names:
        raise ValueError("no names")
    return "-".join(names)
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """Write a module into a repository whose recorded counts are all zero."""
    path = tmp_path / "operator" / "concertina" / "names.py"
    path.parent.mkdir(parents=True)
    path.write_text(GOOD)
    (tmp_path / "tools").mkdir()
    assert docstring_ratchet.main(["--write"], tmp_path) == 0
    return path


def recorded(root: Path) -> docstring_ratchet.Counts:
    return docstring_ratchet.read_counts(root / COUNTS_FILE)


def test_a_planted_docstring_fails(module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docstring_ratchet.main([], tmp_path) == 0
    module.write_text(GOOD + PLANTED)
    assert docstring_ratchet.main([], tmp_path) == 1
    complaint = capsys.readouterr().err
    for rule in docstring_ratchet.RULES:
        assert f"{rule} in operator/concertina: 1 docstrings lack" in complaint
    assert docstring_ratchet.main(["--write"], tmp_path) == 1
    assert recorded(tmp_path) == {}, "a count that rose is not recorded"


def test_a_function_that_builds_an_exception_is_no_exception_type(module: Path, tmp_path: Path) -> None:
    imports = "from errors import Refused, _refusal\n"
    raises = 'def join(names):\n    """Join names.\n\n    Each once.\n    """\n    raise {}("no names")\n'
    module.write_text(GOOD + imports + raises.format("_refusal"))
    assert docstring_ratchet.main([], tmp_path) == 0
    module.write_text(GOOD + imports + raises.format("Refused"))
    assert docstring_ratchet.main([], tmp_path) == 1


def test_a_count_that_fell_is_recorded_on_request(
    module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module.write_text(GOOD + PLANTED)
    (tmp_path / COUNTS_FILE).unlink()
    docstring_ratchet.main(["--write"], tmp_path)
    assert recorded(tmp_path) == {Key(rule, "operator/concertina"): 1 for rule in docstring_ratchet.RULES}
    module.write_text(GOOD)
    assert docstring_ratchet.main([], tmp_path) == 0
    assert "3 fewer violations than recorded: run `make docstrings`" in capsys.readouterr().out
    assert docstring_ratchet.main(["--write"], tmp_path) == 0
    assert recorded(tmp_path) == {}


def test_files_count_for_their_package() -> None:
    paths = ["trainer_image/trainingjob/state.py", "tests/unit/test_turns.py", "tests/conftest.py", "setup.py"]
    packages = [docstring_ratchet.package_of(Path(path)) for path in paths]
    assert packages == ["trainer_image/trainingjob", "tests", "tests", "."]
