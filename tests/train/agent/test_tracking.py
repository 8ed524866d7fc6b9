"""A run as its tracker shows it, through rounds, kills and a new coordinator, read from TensorBoard's files."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from builders.train.replicas import newest_complete, running, trained
from builders.train.tensorboard import scalars
from builders.until import until_async
from concertina_protocol.tracking.spool import SpoolReader
from concertina_protocol.tracking.tracking_records import StepDone


def test_one_run_through_rounds_and_a_new_coordinator_has_each_step_once(folder, trainer, tmp_path):
    steps = 40
    environment = {
        "CONCERTINA_TRAINER": json.dumps({**trainer, "steps": steps}),
        "CONCERTINA_CACHE": os.environ["CONCERTINA_CACHE"],
        "CONCERTINA_TRACKING": json.dumps({"backend": "TensorBoard", "uri": f"file://{tmp_path}/runs"}),
        "CONCERTINA_CHECKPOINT": json.dumps({"uri": f"file://{tmp_path}/states", "everySteps": 10, "keep": 3}),
    }

    async def body():
        async with running(folder, 2, ["--bundled"], **environment) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], trained(10))
            os.kill(job[1].worker_pids()[1], 9)
            await job.until(job[0], lambda r: r.failures)
            prepared = await job.prepare(2, job[1], job[0])
            restore = newest_complete(prepared)
            await job.assign(job.assignment(prepared, restore))
            await job.until(job[1], lambda r: r.round == 2 and trained(restore.step + 5)(r))
            # An agent that exits waits at most 20 s for its tracking process, which has a low priority: on a busy
            # machine, that process needs longer for its imports. So wait until both coordinators have sent all records,
            # the first one before it is lost.
            await until_async(lambda: sent(job[0]), "sent records", lambda: job[0].log()[-1000:], pause=0.2)
            job[0].kill()
            await job.until(job[1], lambda r: r.failures)
            await until_async(lambda: sent(job[1]), "sent records", lambda: job[1].log()[-1000:], pause=0.2)
            prepared = await job.prepare(3, job[1])
            await job.assign(job.assignment(prepared, newest_complete(prepared)))
            await job.until(job[1], lambda r: r.state == "succeeded", "never succeeded")
            assert await asyncio.to_thread(job[1].process.wait, 60) == 0
            *_, last = (event for event in job[1].events() if event["event"] == "agent_exits")
            assert (last["job"], last["round"], last["step"]) == ("test/job", 3, steps)

    asyncio.run(body())
    (run,) = (tmp_path / "runs" / "test").iterdir()
    points, texts = scalars(run)
    assert [step for step, _ in points["loss"]] == list(range(1, steps + 1))
    assert [value for _, value in points["workers"]][-1] == 1.0
    assert points["samples"][-1] == (steps, steps * trainer["globalBatchSize"])
    assert texts["outcome"] == "succeeded"
    (checkpoint,) = (tmp_path / "states").glob(f"*/round-3/step-{steps}")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    made_of = texts[f"checkpoint/{steps}"]
    assert f"| uri | file://{checkpoint} |" in made_of
    assert f"| data_sets | {' '.join(manifest['lineage']['data_sets'])} |" in made_of
    assert f"| parent | {manifest['lineage']['parent']['uri']} |" in made_of


def sent(replica):
    """Return whether the replica has sent all records of the steps that it has trained as coordinator."""
    spool = SpoolReader(replica.folder / "tracking")
    spool.look()
    return spool.next > 0 and spool.behind == 0


@contextlib.contextmanager
def mlflow_server(folder, port):
    """Run a real MLflow server. Its store is kept when the server ends."""
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "HOME": str(folder)}
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
    with (folder / "mlflow.log").open("ab") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            until(lambda: answers(port), 120)
            yield
        finally:
            os.killpg(server.pid, 9)
            server.wait()


def answers(port):
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
        return answer.status == 200
    return False


def until(holds, seconds):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.timeout(600)
@pytest.mark.long(law="tests/unit/tracking/test_shipper.py::test_each_step_once_whatever_happens")
def test_an_mlflow_server_that_is_killed_in_between_has_each_step_once(folder, trainer, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    tracking = {"backend": "MLflow", "uri": uri, "experiment": "tests", "tags": {"kind": "test"}}
    environment = {
        "CONCERTINA_TRAINER": json.dumps({**trainer, "steps": 400}),
        "CONCERTINA_CACHE": os.environ["CONCERTINA_CACHE"],
        "CONCERTINA_TRACKING": json.dumps(tracking),
    }

    async def body(server):
        async with running(folder, 2, ["--bundled"], **environment) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], trained(100))
            server.close()
            os.kill(job[1].worker_pids()[1], 9)
            await job.until(job[0], lambda r: r.failures)
            prepared = await job.prepare(2, job[1], job[0])
            restore = newest_complete(prepared)
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[1], lambda r: r.round == 2 and r.tracking, "nobody says that it is away")
            assert "MLflow" in report.tracking
            await asyncio.to_thread(server.enter_context, mlflow_server(tmp_path, port))
            await job.until(job[1], lambda r: r.state == "succeeded", "never succeeded")
            for one in (job[0], job[1]):
                assert await asyncio.to_thread(one.process.wait, 60) == 0

    with contextlib.ExitStack() as server:
        server.enter_context(mlflow_server(tmp_path, port))
        asyncio.run(body(server))
        import mlflow  # here, because each process of the suite imports this module, and that takes a second

        client = mlflow.MlflowClient(uri)
        (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
        assert run.info.status == "FINISHED"
        assert (run.data.params["steps"], run.data.tags["kind"]) == ("400", "test")
        assert "concertina.round.2" in run.data.tags
        history = sorted(metric.step for metric in client.get_metric_history(run.info.run_id, "loss"))
        assert history == list(range(1, 401))


@pytest.mark.long(law="tests/unit/tracking/test_shipper.py::test_each_step_once_whatever_happens")
def test_nobody_who_trains_waits_for_a_tracker_that_hangs(folder, trainer):
    """Connections are taken, by the kernel, and nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        uri = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        environment = {
            "CONCERTINA_TRAINER": json.dumps({**trainer, "steps": 30}),
            "CONCERTINA_CACHE": os.environ["CONCERTINA_CACHE"],
            "CONCERTINA_TRACKING": json.dumps({"backend": "MLflow", "uri": uri}),
        }

        async def body():
            async with running(folder, 1, ["--bundled"], **environment) as job:
                await job.begin(1, job[0])
                await job.until(job[0], lambda r: r.state == "succeeded", "never succeeded")
                assert await asyncio.to_thread(job[0].process.wait, 60) == 0
                hanging.setblocking(False)
                hanging.accept()[0].close()  # it was asked
                (spool,) = folder.rglob("tracking")
                kept = [record for _, record in SpoolReader(spool).read(1000)]
                assert [record.step for record in kept if isinstance(record, StepDone)] == list(range(1, 31))

        asyncio.run(body())
