"""Trainer's configuration: what it refuses, and that reading it is cheap."""

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from concertina.api.spec import Checkpoint
from concertina_trainer.config.checkpoint_config import CheckpointConfig
from concertina_trainer.config.trainer import TrainerConfig

DATA = {"data": {"uri": "s3://bucket/data"}}


def test_yaml_names_are_camel_case_and_defaults_fill_the_rest():
    config = TrainerConfig.model_validate({**DATA, "globalBatchSize": 7, "model": {"heads": 4, "kvHeads": 2}})
    assert (config.global_batch_size, config.model.resolved_kv_heads, config.model.resolved_hidden_dim) == (7, 2, 352)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stepz": 3}, "stepz"),
        ({"model": {"layerz": 3}}, "layerz"),
        ({"model": {"dim": 24, "heads": 8}}, "even multiple of heads"),
        ({"model": {"heads": 4, "kvHeads": 3}}, "multiple of kvHeads"),
        ({"data": {"uri": "relative/path"}}, "uri"),
        ({"data": {}}, "set either uri or mixture"),
        ({"data": {"uri": "/a", "mixture": [{"uri": "/b", "weight": 1}]}}, "set either uri or mixture"),
        ({"data": {"mixture": [{"uri": "/b", "weight": 0.5}]}}, "valid integer"),
        ({"data": {"uri": "/a", "documents": "Bucketed"}, "determinism": "Bitwise"}, "another value of data.documents"),
        ({"data": {"uri": "/a", "balance": "Speed"}, "determinism": "Bitwise"}, "set balance to Even"),
        ({"data": {"uri": "/a", "balance": "Speed", "documents": "Bucketed"}}, "set balance to Even"),
        ({"model": {"size": []}}, "model.size"),
        ({"compile": "Everything"}, "'Blocks' or 'Never'"),
        ({"compile": "Blocks", "determinism": "Bitwise"}, "set determinism to Order"),
        ({"compile": "Blocks", "model": {"entrypoint": "a.b:c"}}, "or model.entrypoint"),
        ({"compile": "Blocks", "data": {"uri": "/a", "documents": "Bucketed"}}, "choose another documents"),
        ({"compile": "Blocks", "data": {"uri": "/a", "balance": "Speed"}}, "set balance to Even"),
        ({"evaluation": {"everySteps": 0}}, "everySteps"),
        ({"evaluation": {"ema": True}}, "set optimizer.emaDecay"),
        ({"gradientPrecision": "BFloat16", "determinism": "Bitwise"}, "set gradientPrecision to Float32"),
        ({"evaluation": {"sequences": 0}}, "sequences"),
        ({"snapshot": {"overhead": 0}}, "overhead"),
        ({"evaluation": {"everyStep": 5}}, "everyStep"),
        ({"steps": 5, "reproduction": {"lastStep": 6}}, "must not exceed steps"),
        ({"reproduction": {"skippedSamples": [[1, 2, 3]]}}, "at most 2 items"),
        ({"steps": 0}, "greater than or equal to 1"),
        ({"precision": "float8"}, "precision"),
        ({"data": {"uri": "/a", "cacheSize": "15Mi"}}, "from 16Mi to 16Ti"),
        ({"data": {"uri": "/a", "cacheSize": "17Ti"}}, "from 16Mi to 16Ti"),
        ({"data": {"uri": "/a", "cacheSize": "4 GiB"}}, "cacheSize"),
        ({"determinism": "Bitwise", "globalBatchSize": 33, "microBatchSize": 2}, "at most 16 microbatches"),
        ({"anomalies": {"nonFinite": "Ignore"}}, "nonFinite"),
        ({"model": {"experts": {}}}, "experts.count"),
        ({"model": {"experts": {"count": 4, "activePerToken": 5}}}, "must not exceed count"),
        ({"model": {"layers": 2, "experts": {"count": 4, "firstDense": 2}}}, "must be below layers"),
        ({"model": {"hiddenDim": 100, "experts": {"count": 4}}}, "multiple of 8"),
        ({"model": {"experts": {"count": 4}}, "determinism": "Bitwise"}, "does not support experts"),
        ({"model": {"entrypoint": "a.b"}}, "pattern"),
        ({"model": {"entrypoint": "a.b:c", "kvHeads": 2}}, "with entrypoint, only options and sequenceLength"),
        ({"model": {"entrypoint": "a.b:c", "normEpsilon": 0.01}}, "with entrypoint, only options and sequenceLength"),
        ({"model": {"options": {}}}, "options are for the model that entrypoint names"),
    ],
)
def test_a_mistake_is_named(change, said):
    with pytest.raises(ValidationError) as refused:
        TrainerConfig.model_validate({**DATA, **change})
    assert said in str(refused.value)


@pytest.mark.parametrize("uri", ["/data", "file:///data", "s3://b/data", "gs://b/data", "az://c/data"])
def test_data_may_be_in_every_store_that_checkpoints_may_be_in(uri):
    assert TrainerConfig.model_validate({**DATA, "data": {"uri": uri}}).data.uri == uri


def test_the_digest_is_of_what_decides_the_numbers():
    config = TrainerConfig.model_validate(DATA)
    same = {"snapshot": {"everySteps": 5}, "microBatchSize": 2, "evaluation": {"everySteps": 5}}
    same["data"] = {"uri": "s3://elsewhere/data", "cacheSize": "99Mi"}
    assert TrainerConfig.model_validate({**DATA, **same}).digest() == config.digest()
    same["reproduction"] = {"lastStep": 5, "dataDigest": "d", "skippedSamples": [[1, 2]]}
    assert TrainerConfig.model_validate({**DATA, **same}).digest() == config.digest()
    assert TrainerConfig.model_validate({**DATA, "seed": 1}).digest() != config.digest()
    bitwise = [{**DATA, "determinism": "Bitwise", "microBatchSize": size} for size in (8, 4)]
    assert len({TrainerConfig.model_validate(one).digest() for one in bitwise}) == 2
    own = [{**DATA, "model": {"entrypoint": "a:b", "options": {"dim": [dim, None]}}} for dim in (1, 2)]
    assert len({TrainerConfig.model_validate(one).digest() for one in own}) == 2


@pytest.mark.parametrize(("size", "size_bytes"), [("16Mi", 16 << 20), ("1.5Gi", 3 << 29), ("20000000", 20_000_000)])
def test_the_size_of_the_cache_is_a_quantity(size, size_bytes):
    assert TrainerConfig.model_validate({"data": {"uri": "/a", "cacheSize": size}}).data.cache_bytes == size_bytes


def test_a_default_that_is_written_out_is_the_same_run():
    written = {"minLearningRateFactor": 0.1, "warmupSteps": 100}
    assert TrainerConfig.model_validate({**DATA, "optimizer": written}).digest() == (
        TrainerConfig.model_validate(DATA).digest()
    )


def test_unknown_fields_of_the_checkpoint_are_the_job_s_business():
    said = {"uri": "s3://b/x", "everySteps": 5}
    found = CheckpointConfig.model_validate({**said, "secretName": "s3", "invented": 1})
    asked = Checkpoint.model_validate(said)
    assert found.model_dump() == asked.model_dump(exclude={"secret_name", "take_over"}), "one set of defaults"
    with pytest.raises(ValidationError, match="invented"):
        Checkpoint.model_validate({**said, "invented": 1})


def test_importing_the_configuration_brings_no_torch():
    code = "import sys, json, concertina_trainer.layouts; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"torch", "numpy", "obstore"} & set(modules)
