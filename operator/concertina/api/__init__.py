"""Data model of a TrainingJob as pydantic classes, and the CRD generated from them.

`spec` and `status` contain the classes. `rules` contains rules that concern several fields. `parse` reads a manifest
and describes its errors in sentences. `crd` generates the CustomResourceDefinition.
"""

GROUP = "concertina.dev"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"
PLURAL = "trainingjobs"
MANAGER = f"{GROUP}/operator"
"""Value of `spec.managedBy` for jobs that this operator runs. An absent field has the same meaning."""

CHECKPOINT_NOW = "concertina.dev/checkpoint-create"
"""Annotation of a TrainingJob. A new value requests a durable checkpoint at the next step."""
TRAINER = "trainer"
"""Name of the container in which the workers run."""
