"""Imports of the parent that workers with a model of transformers are forked from."""

# ruff: noqa: F401

from transformers import AutoConfig, AutoModelForCausalLM

import concertina_trainer.preload
