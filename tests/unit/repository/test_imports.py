"""Imports: the top of any package is cheap to import, and only inner modules of the trainer need torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "kubernetes", "kopf", "aiohttp", "cryptography", "matplotlib", "obstore", "pydantic")
TOPS = {
    "concertina": (),
    "concertina.api": (),
    "concertina.api.spec": ("pydantic",),
    "concertina.plan": (),
    "concertina.kube": (),
    "concertina.agents": (),
    "concertina.controller": (),
    "concertina.terminal": (),
    "concertina.drill": (),
    "concertina.demo": (),
    "concertina.local": (),
    "concertina.cli": (),
    "concertina.cli.main": (),
    "concertina_agent": (),
    "concertina_protocol": (),
    "concertina_trainer": (),
    "concertina_trainer.config.trainer": ("pydantic",),
    "concertina.controller.operator": ("aiohttp", "cryptography", "kopf", "pydantic"),
}


@pytest.mark.parametrize(("module", "needs"), TOPS.items(), ids=TOPS)
def test_importing_it_is_cheap(module: str, needs: tuple[str, ...]) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == list(needs)
