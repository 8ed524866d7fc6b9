"""Names of a script's metrics: MLflow accepts all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concertina_tracking.trackers import mlflow


@given(st.text(max_size=300) | st.lists(st.sampled_from(["", ".", "..", "a", "b c", "é"]), max_size=9).map("/".join))
def test_a_name_is_one_that_mlflow_takes(name: str) -> None:
    # Here, because each process of the suite imports this module, and that takes a second.
    validation = pytest.importorskip("mlflow.utils.validation")
    validation._validate_metric_name(mlflow._name(name))
    validation._validate_param_name(mlflow._name(name))


@pytest.mark.parametrize("name", ["loss", "train/loss", "a b-c.d:e", "gradient_norm"])
def test_one_that_it_takes_stays(name: str) -> None:
    assert mlflow._name(name) == name
