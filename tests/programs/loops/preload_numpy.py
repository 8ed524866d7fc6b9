"""Imports for the parent process of scripts without torch: see loops.preload."""

# ruff: noqa: F401

import sys

import loops.without_torch
import trainingjob._state

assert "torch" not in sys.modules
