"""One pod on this node, from its binding to its end, with its volumes, containers, restarts and termination."""

import asyncio
import contextlib
import logging
import shutil
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp

from concertina.local.node import ending, images
from concertina.local.node.node import Node
from concertina.local.node.node_client import RequestRefused
from concertina.local.node.node_status import ContainerState, PodFacts, now
from concertina.local.node.pods import container_probes, pod_restore
from concertina.local.node.pods.status_writer import PodStatusWriter
from concertina.local.node.runtime import container_environment, mounts, volumes
from concertina.local.node.runtime.container import RunningContainer, Setting

Object = dict[str, Any]
_log = logging.getLogger(__name__)
_OUTAGES = (aiohttp.ClientError, TimeoutError, RequestRefused, ConnectionError)
_QUIET_START = 0.25  # seconds: a pod that runs sooner skips the status write about its creation
_RETRY, _REFRESH, _SHOW_PULL_ERROR = 1.0, 60.0, 1.0  # seconds
_DEADLINE = ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
_FORCED_GRACE = 1.0  # seconds, for a pod whose object is gone


class Pod:
    """Runs one pod of the node.

    `update` and `remove` process changes of the pod object in the API server. Tasks of this object run the containers.
    """

    def __init__(self, node: Node, pod: Object) -> None:
        self.node, self.object = node, pod
        self.folder = node.folder / "pods" / pod["metadata"]["uid"]
        restored = pod_restore.containers(pod)
        states = restored.states
        self.inits = [self._container(spec, states[spec["name"]]) for spec in pod["spec"].get("initContainers") or []]
        self.mains = [self._container(spec, states[spec["name"]]) for spec in pod["spec"]["containers"]]
        self.address = ""
        self._start_time = (pod.get("status") or {}).get("startTime") or now()
        self._deleted = False
        self._failure = restored.failure
        self._deadline: asyncio.TimerHandle | None = None
        self._volumes = volumes.Volumes(node.client, pod, self.folder, node.config.resources)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer = PodStatusWriter(node.client, pod, self._facts)
        self._end: asyncio.Task[None] | None = None
        self._work = asyncio.create_task(self._finish_restored() if restored.over else self._run())
        self.update(pod)

    # Changes at the API server

    def update(self, pod: Object) -> None:
        """Process a change of the pod object. If it has a deletion timestamp, the pod is stopped."""
        self.object["metadata"] = pod["metadata"]
        self._writer.observe(pod.get("status") or {})
        self._watch_deadline(pod["spec"].get("activeDeadlineSeconds"))
        if "deletionTimestamp" not in pod["metadata"]:
            return
        grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
        if self._end is None:
            self._end = asyncio.create_task(self._terminate(grace))
        else:  # a second deletion may shorten the grace period
            asyncio.get_running_loop().call_later(grace, self._kill)

    def _watch_deadline(self, seconds: int | None) -> None:
        """Set the time at which the pod fails, in seconds after the pod's start. None removes the deadline.

        A user can set or shorten `spec.activeDeadlineSeconds` at any time.
        """
        if self._deadline is not None:
            self._deadline.cancel()
        if seconds is not None:
            deadline = datetime.fromisoformat(self._start_time) + timedelta(seconds=seconds)
            remaining_seconds = (deadline - datetime.now(UTC)).total_seconds()
            self._deadline = asyncio.get_running_loop().call_later(max(0.0, remaining_seconds), self._exceed)

    def _exceed(self) -> None:
        if self._end is None and not self._work.done():
            self._work.cancel()
            self._work = asyncio.create_task(self._fail(self._work))

    async def _fail(self, work: asyncio.Task[None]) -> None:
        """Stop the containers and mark the pod as failed, without deleting it."""
        await ending.end(work)
        await asyncio.gather(*(container.stop(self._grace) for container in self.inits + self.mains))
        for container in self.mains:
            container.never_ran()
        self._failure = _DEADLINE
        await self._release()
        self._writer.mark()

    def remove(self) -> asyncio.Task[None]:
        """Stop the pod's containers and delete its files, because its object was deleted from the API server.

        Containers that do not stop are killed. The returned task ends when all processes and volumes of the pod are
        removed.
        """
        if self._end is None:
            self._end = asyncio.create_task(self._terminate(_FORCED_GRACE))
        else:
            self._kill()
        return asyncio.create_task(self._clean_up(self._end))

    def container(self, name: str) -> RunningContainer | None:
        """Return the container with this name, or None."""
        return next((container for container in self.inits + self.mains if container.name == name), None)

    # From start to end

    async def _run(self) -> None:
        asyncio.get_running_loop().call_later(_QUIET_START, self._writer.mark)
        await self._prepare()
        self._spawn(self._refresh())
        for container in self.inits:
            if container.state.restarts_always:
                self._spawn(self._keep(container))
                await self._until_started(container)
            elif not await self._initialize(container):
                break
        else:
            async with asyncio.TaskGroup() as group:
                for container in self.mains:
                    group.create_task(self._keep(container))
        await self._release()
        self._writer.mark()

    async def _finish_restored(self) -> None:
        self._writer.mark()

    async def _prepare(self) -> None:
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.address = self.address or self._take_address()
                mounts.write_hosts(self.folder, self.object, self.address)
                await self._volumes.prepare()
                return
            except volumes.VolumeError as error:
                self._cannot_mount(error)
            except _OUTAGES as error:
                _log.warning("volumes of %s: %s", self.object["metadata"]["name"], error)
            except OSError as error:  # no space or no permission; this may change
                self._cannot_mount(error)
            await asyncio.sleep(_RETRY)

    def _cannot_mount(self, error: Exception) -> None:
        self.node.warn(self.object, "FailedMount", str(error))
        for container in self.inits + self.mains:
            if "waiting" in container.state.state:
                container.waiting("ContainerCreating" if not self.inits else "PodInitializing", str(error))
        self._writer.mark()

    def _take_address(self) -> str:
        shares = self.object["spec"].get("hostNetwork")
        address = self.node.config.address if shares else self.node.addresses.take()
        self.object["status"] = {"podIP": address, "hostIP": self.node.config.address}
        return address

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH)
            with contextlib.suppress(volumes.VolumeError, OSError, *_OUTAGES):
                await self._volumes.refresh()

    async def _initialize(self, container: RunningContainer) -> bool:
        await self._keep(container)
        return container.state.initialized

    async def _until_started(self, container: RunningContainer) -> None:
        while not container.state.started:
            await asyncio.sleep(0.02)

    async def _keep(self, container: RunningContainer) -> None:
        """Run a container until it has ended for good, and restart it as the pod's restart policy requires."""
        while True:
            if "terminated" in container.state.state:
                if not self._starts_again(container):
                    return
                await self._back_off(container)
            if await self._start(container):
                probing = asyncio.create_task(self._probe(container))
                await container.wait()
                probing.cancel()
            self._writer.mark()

    def _starts_again(self, container: RunningContainer) -> bool:
        policy = "Always" if container.state.restarts_always else self.object["spec"].get("restartPolicy", "Always")
        failed = container.state.exit_code != 0
        is_init = container in self.inits and not container.state.restarts_always
        return (failed and policy != "Never") if is_init or policy == "OnFailure" else policy == "Always"

    async def _back_off(self, container: RunningContainer) -> None:
        container.retire()
        seconds, container.backoff = container.backoff.seconds, container.backoff.next()
        if seconds:
            pod = self.object["metadata"]["name"]
            text = f"back-off {seconds:g}s restarting failed container={container.name} pod={pod}"
            container.waiting("CrashLoopBackOff", text)
            self.node.warn(self.object, "BackOff", text)
            self._writer.mark()
            await asyncio.sleep(seconds)
        container.state.restarts += 1

    async def _start(self, container: RunningContainer) -> bool:
        """Start the container's process. Return False if the process could not start.

        The preparation before the start, for example of volumes, can take any time.
        """
        image = await self._pull(container)
        while True:
            try:
                setting = await self._setting(container, image)
                return await container.start(setting)
            except container_environment.ConfigError as error:
                container.waiting("CreateContainerConfigError", str(error))
                self.node.warn(self.object, "Failed", f"Error: {error}")
                self._writer.mark()
            except _OUTAGES as error:
                _log.warning("settings of %s: %s", container.name, error)
            except OSError as error:
                container.waiting("CreateContainerError", str(error))
                self.node.warn(self.object, "Failed", f"Error: {error}")
            finally:
                self._writer.mark()
            await asyncio.sleep(_RETRY)

    async def _pull(self, container: RunningContainer) -> images.Image:
        name = container.spec["image"]
        backoff = type(container.backoff)().next()
        while True:
            image = self.node.image(name)
            if image:
                return image
            reason = images.why_not(name)
            container.waiting("ErrImagePull", reason)
            self.node.warn(self.object, "Failed", reason)
            self._writer.mark()
            await asyncio.sleep(_SHOW_PULL_ERROR)
            container.waiting("ImagePullBackOff", f'Back-off pulling image "{name}": ErrImagePull: {reason}')
            self._writer.mark()
            await asyncio.sleep(backoff.seconds)
            backoff = backoff.next()

    async def _setting(self, container: RunningContainer, image: images.Image) -> Setting:
        config, namespace = self.node.config, self.object["metadata"]["namespace"]
        maps, secrets = container_environment.references(container.spec)
        names = [("configMap", name) for name in sorted(maps)] + [("secret", name) for name in sorted(secrets)]
        manifests = await asyncio.gather(
            *(volumes.fetch(self.node.client, namespace, kind, name) for kind, name in names)
        )
        pairs = list(zip(names, manifests, strict=True))
        pod = self.object | {"status": {"podIP": self.address, "hostIP": config.address}}
        sources = container_environment.Sources(
            pod,
            config.resources,
            config.api_host,
            config.api_port,
            {name: manifest for (kind, name), manifest in pairs if kind == "configMap"},
            {name: manifest for (kind, name), manifest in pairs if kind == "secret"},
        )
        variables = container_environment.build(container.spec, sources, image.environment)
        hosts = self.folder / "hosts"
        return Setting(
            variables,
            image,
            mounts.of_container(container.spec, self._volumes, hosts, variables),
            mounts.hostname(self.object),
        )

    async def _probe(self, container: RunningContainer) -> None:
        warn = lambda reason, message: self.node.warn(self.object, reason, message)  # noqa: E731
        await container_probes.watch(container, self.address, self._grace, self._writer.mark, warn)

    @property
    def _grace(self) -> float:
        return float(self.object["spec"].get("terminationGracePeriodSeconds", 30))

    # The end

    async def _terminate(self, grace: float) -> None:
        await ending.end(self._work)
        await asyncio.gather(*(container.stop(grace) for container in self.inits + self.mains))
        self._deleted = True
        for container in self.mains:
            container.never_ran()
        await self._release()
        self._writer.mark()
        await self._writer.flush()
        await self._delete()

    async def _delete(self) -> None:
        metadata = self.object["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        while True:
            try:
                await self.node.client.call("DELETE", path, options)
                return
            except RequestRefused as error:
                if error.status in (404, 409):
                    return
                _log.warning("%s not deleted: %s", path, error)
            except _OUTAGES as error:
                _log.warning("%s not deleted: %s", path, error)
            await asyncio.sleep(_RETRY)

    async def _release(self) -> None:
        """Stop the remaining containers (sidecars), and release the volumes and the address of the pod."""
        await asyncio.gather(*(container.stop(self._grace) for container in self.inits))
        await ending.end(*self._tasks)
        self._volumes.remove()
        if self.address and self.address != self.node.config.address:
            self.node.addresses.release(self.address)

    async def _clean_up(self, end: asyncio.Task[None]) -> None:
        await asyncio.gather(end, return_exceptions=True)
        await self._writer.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill(self) -> None:
        for container in self.inits + self.mains:
            container.kill()

    # Helpers

    def _container(self, spec: Object, state: ContainerState) -> RunningContainer:
        return RunningContainer(spec, self.folder / "containers" / spec["name"], self.node.runtime, state)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _facts(self) -> PodFacts:
        spec = self.object["spec"]
        return PodFacts(
            restart_policy=spec.get("restartPolicy", "Always"),
            host_ip=self.node.config.address,
            pod_ip=self.address,
            start_time=self._start_time,
            inits=[container.state for container in self.inits],
            mains=[container.state for container in self.mains],
            deleted=self._deleted,
            failure=self._failure,
        )
