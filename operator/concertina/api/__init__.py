"""The TrainingJob as pydantic models, and the CRD that is generated from them.

`spec` and `status` are the models, `rules` has the constraints on several fields together, `parse` reads a manifest and
describes in sentences what is wrong with it, and `crd` writes the CustomResourceDefinition.
"""

GROUP = "concertina.dev"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"
PLURAL = "trainingjobs"
MANAGER = f"{GROUP}/operator"
"""Value of spec.managedBy for jobs that this operator runs; an absent field means the same."""

CHECKPOINT_NOW = "concertina.dev/checkpoint-create"
"""Annotation of a TrainingJob: a new value requests a durable checkpoint at the next step."""
TRAINER = "trainer"
"""Name of the container that the workers run in."""
