"""State on real kubelets and real S3: data built by pods, checkpoints on request, a continued run, and a rollback."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from builders.cluster import e2e
from builders.cluster.e2e import Cluster, Object
from builders.programs import AUDIO, AUDIO_FIELDS
from builders.strange import check_went_back, rolling_back, strange
from concertina_state.objects.prefix import ObjectPrefix

pytestmark = [pytest.mark.usefixtures("operator"), pytest.mark.timeout(900)]
SMALL: Object = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
BIG: Object = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1536Mi"}}
BUILDING = ("sources", "built", "alone")
SHARES = 3


def contents(uri: str) -> dict[str, bytes | None]:
    folder = ObjectPrefix(uri)
    return {key: folder.get(key) for key in folder.list("")}


def in_pods_of_ours(job: Object) -> Object:
    """Return the command's Job, with the trainer's packages if its image lacks them."""
    template = job["spec"]["template"]["spec"]
    built = template["containers"][0] | {"resources": SMALL}
    job["spec"]["template"]["spec"] = template | e2e.pod(e2e.trainer(**built) | {"name": "build"})
    return job


def text(folder: Path) -> list[str]:
    for path in Path(e2e.ROOT, "docs").glob("*.md"):
        (folder / path.name).write_bytes(path.read_bytes())
    return []


def frames(folder: Path) -> list[str]:
    runpy.run_path(str(AUDIO / "make_features.py"))["main"](folder, 40)
    return [*AUDIO_FIELDS]


@pytest.mark.parametrize("made", [text, frames], ids=lambda made: made.__name__)
def test_the_pods_of_a_job_build_the_bytes_that_one_machine_builds(
    cluster: Cluster, made: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    """The command's manifest is applied as with GitOps."""
    options = made(tmp_path)
    sources, built, alone = (f"s3://{e2e.BUCKET}/{what}-{made.__name__}-{e2e.RUN}" for what in BUILDING)
    folder = ObjectPrefix(sources)
    for path in sorted(tmp_path.iterdir()):
        folder.put(path.name, path.read_bytes())
    what = [*options, "--shard-mebibytes", "0.01", "--validation", "0.2", sources]
    where = ["--pods", str(SHARES), "--cpus", "1", "--secret", "s3", "--image", e2e.TRAINER_IMAGE]
    printed = e2e.concertina("data", "build", "--cluster", "--dry-run", *where, "--out", built, *what)
    job = in_pods_of_ours(yaml.safe_load(printed))
    name = job["metadata"]["name"]
    cluster.apply(job)
    try:
        cluster.kubectl("wait", "--for=condition=complete", f"job/{name}", "--timeout=180s")
    finally:
        cluster.kubectl("delete", "job", name, "--ignore-not-found", "--wait=false")
    e2e.concertina("data", "build", "--out", alone, *what)
    assert contents(built) == contents(alone)
    assert len(contents(built)) > 5
    assert "no of" in e2e.concertina("data", "verify", built)


def test_a_checkpoint_on_request_is_verified_and_gone_on_from_by_another_job(cluster: Cluster, data: None) -> None:
    uri = f"s3://{e2e.BUCKET}/asked-{e2e.RUN}"
    first = e2e.bundled_job("asked", e2e.pod(e2e.trainer(resources=BIG)))
    first["spec"]["checkpoint"] = {"uri": uri, "secretName": "s3", "everySteps": 10_000_000}
    with cluster.running(first):
        cluster.training(2, name="asked")
        output = e2e.concertina("checkpoint", "create", "asked", "-n", e2e.NAMESPACE)
        checkpoint = cluster.until("a checkpoint", lambda status: status.get("lastCheckpoint"), "asked")[
            "lastCheckpoint"
        ]
        assert f"step {checkpoint['step']}" in output.replace("\n", " ")
    step = json.loads(e2e.concertina("checkpoint", "show", uri, "-o", "json"))["id"]["step"]
    assert step >= checkpoint["step"], "its deletion was a notice to all, which made another one"
    assert f"step {step}" in e2e.concertina("checkpoint", "verify", uri)
    second = e2e.bundled_job("goes-on", e2e.pod(e2e.trainer(resources=BIG)), steps=step + 20)
    second["spec"]["replicas"] = 3
    second["spec"]["checkpoint"] |= {"resumeFrom": uri}
    with cluster.running(second):
        done = cluster.until("its end", lambda status: e2e.reason(status) == "Complete", "goes-on")
    assert done["lastCheckpoint"]["step"] == step + 20
    shown = e2e.concertina("checkpoint", "show", f"s3://{e2e.BUCKET}/goes-on-{e2e.RUN}")
    assert f"step {step}" in shown.replace("\n", " ")


def test_a_loss_that_jumps_is_undone_and_what_led_there_left_out(cluster: Cluster, tmp_path: Path) -> None:
    """The test is that of tests/cluster/operator/state/test_rollback.py, with the same data in the store."""
    name, uri = "spike", f"s3://{e2e.BUCKET}/strange-{e2e.RUN}"
    bad = strange(tmp_path)
    job = e2e.bundled_job(name, e2e.pod(e2e.trainer(resources=BIG)))
    job["spec"] |= rolling_back(bad, {"uri": f"s3://{e2e.BUCKET}/{name}-{e2e.RUN}", "secretName": "s3"})
    job["spec"]["trainer"]["data"] = {"uri": uri}
    shards = Path(bad.trainer["data"]["uri"])
    for path in filter(Path.is_file, shards.rglob("*")):
        ObjectPrefix(uri).put(str(path.relative_to(shards)), path.read_bytes())
    with cluster.running(job):
        status = cluster.until("its end", lambda status: e2e.reason(status) == "Complete", name)
        log = cluster.log(status["world"]["members"][0]["replica"])
        check_went_back(bad, status, log, lambda reason: cluster.event(name, reason))
