"""The TrainingJob as pydantic models, and the CRD made from them.

`spec` and `status` are the models, `rules` what several fields together must obey, `parse` reads a manifest and says in
sentences what is wrong with it, `crd` writes the CustomResourceDefinition.
"""

GROUP = "concertina.dev"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"
PLURAL = "trainingjobs"
MANAGER = f"{GROUP}/operator"
"""spec.managedBy of jobs that this operator runs; absence means the same."""

CHECKPOINT_NOW = "concertina.dev/checkpoint-create"
"""Annotation of a TrainingJob: a new value asks for a durable checkpoint at the next step."""
TRAINER = "trainer"
"""Name of the container that the workers run in."""
