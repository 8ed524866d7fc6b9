"""Imports for the parent process of scripts in frameworks' loops: see loops.preload."""

# ruff: noqa: F401

import loops.frameworks
import loops.preload
