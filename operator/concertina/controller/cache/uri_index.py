"""Live jobs by the checkpoint folder that they write to.

Only jobs of one namespace are compared. Across namespaces the store decides, by the owner object in the folder
(decision "The store decides who owns a folder"). Among jobs with the same folder, the oldest job that has begun has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from concertina.api.spec import JobSpec
from concertina.api.status import ENDED
from concertina.controller.cache.job import CachedJob
from concertina.plan.observed import UriHolder

FILES = "file://"


@dataclass(frozen=True)
class CheckpointFolder:
    """Folder of checkpoints.

    Jobs for which all fields are equal write to the same location, as far as their specs show.
    """

    namespace: str
    uri: str
    secret: str
    volume: str

    @property
    def group(self) -> tuple[str, str]:
        """Key of the jobs that may write to the same location.

        Jobs of other groups cannot: one volume may be mounted at several paths.
        """
        return self.namespace, FILES if self.uri.startswith(FILES) else self.uri


@dataclass(frozen=True)
class FolderUse:
    """Use of a folder by one live job."""

    folder: CheckpointFolder
    has_begun: bool
    """Whether a round of the job was claimed."""
    take_over: str
    """Uid of the job from which this job takes the folder over, or empty when there is none."""


class UriIndex:
    """Index of the live jobs by their folder.

    It calls `changed(uid)` for each other job that may have the folder now, or may no longer have it.
    """

    def __init__(self, jobs: Mapping[str, CachedJob], changed: Callable[[str], None]) -> None:
        self._jobs = jobs
        self._changed = changed
        self._folders: dict[str, tuple[JobSpec, CheckpointFolder]] = {}
        """Folder of each job, by uid, with the spec that it was derived from: other events bring the same spec."""
        self._uses: dict[str, FolderUse] = {}
        self._groups: dict[tuple[str, str], set[str]] = {}

    def update(self, uid: str) -> None:
        """Update the index after the job's folder may have changed, or the job may have begun, ended or gone."""
        before, now = self._uses.pop(uid, None), self._use(uid)
        if now is not None:
            self._uses[uid] = now
        if now == before:
            return
        if before is not None:
            self._groups[before.folder.group].discard(uid)
        if now is not None:
            self._groups.setdefault(now.folder.group, set()).add(uid)
        for folder in {use.folder for use in (before, now) if use is not None}:
            for neighbor in self._others(uid, folder):
                if self._uses[neighbor].folder == folder:
                    self._changed(neighbor)
            if not self._groups[folder.group]:
                del self._groups[folder.group]

    def _use(self, uid: str) -> FolderUse | None:
        job = self._jobs.get(uid)
        if job is None:
            self._folders.pop(uid, None)
            return None
        spec, status = job.view.spec, job.view.status
        if spec is None or spec.checkpoint is None:
            return None
        if any(condition.type in ENDED and condition.status == "True" for condition in status.conditions):
            return None
        if uid not in self._folders or self._folders[uid][0] is not spec:
            self._folders[uid] = spec, folder_of(job.view.namespace, spec)
        begun = status.world.round > 0 or status.world.claim is not None
        return FolderUse(self._folders[uid][1], begun, spec.checkpoint.take_over)

    def holder(self, uid: str) -> UriHolder | None:
        """Return the other job of this namespace that has this job's folder, or None."""
        use = self._uses.get(uid)
        if use is None:
            return None
        users = [user for user in (uid, *self._others(uid, use.folder)) if self._uses[user].folder == use.folder]
        taken_over = {self._uses[user].take_over for user in users if user == uid or self._uses[user].has_begun}
        begun = [user for user in users if self._uses[user].has_begun and user not in taken_over]
        oldest = min(begun, key=lambda user: (self._jobs[user].view.created, user), default=uid)
        return None if oldest == uid else UriHolder(self._jobs[oldest].name, oldest)

    def sharing(self, uid: str) -> tuple[str, ...]:
        """Return the uids of the other live jobs of this namespace that may write to the same location.

        The jobs count even if their specs name another Secret or volume, because two names may lead to one store.
        """
        use = self._uses.get(uid)
        return tuple(sorted(self._others(uid, use.folder))) if use else ()

    def _others(self, uid: str, folder: CheckpointFolder) -> Iterable[str]:
        return self._groups.get(folder.group, set()) - {uid}


def folder_of(namespace: str, spec: JobSpec) -> CheckpointFolder:
    """Return the folder of a job with checkpoints."""
    assert spec.checkpoint is not None
    uri = normal(spec.checkpoint.uri)
    volume = _volume(uri.removeprefix(FILES), spec) if uri.startswith(FILES) else ""
    return CheckpointFolder(namespace, uri, spec.checkpoint.secret_name or "", volume)


def normal(uri: str) -> str:
    """Return the URI as the store's client reads it, without redundant slashes."""
    scheme, separator, path = uri.partition("://")
    return scheme + separator + re.sub(r"/+", "/", path).rstrip("/")


def _volume(path: str, spec: JobSpec) -> str:
    """Return the volume that the template mounts at that path in the container `trainer`, or empty without one."""
    pod, trainer = spec.template.manifest()["spec"], spec.template.trainer.manifest()
    mount_by_path = {str(mount.get("mountPath")).rstrip("/"): mount for mount in _objects(trainer, "volumeMounts")}
    above = [folder for folder in mount_by_path if path == folder or path.startswith(f"{folder}/")]
    if not above:
        return ""
    mount_path = max(above, key=len)
    mount = mount_by_path[mount_path]
    sources = [volume for volume in _objects(pod, "volumes") if volume.get("name") == mount.get("name")]
    source = [{key: value for key, value in volume.items() if key != "name"} for volume in sources]
    return json.dumps([source, mount_path, mount.get("subPath"), mount.get("subPathExpr")], sort_keys=True)


def _objects(parent: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the objects of a list in a template, in which a user may have written anything."""
    entries = parent.get(name)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
