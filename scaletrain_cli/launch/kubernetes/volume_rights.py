"""Checks that the pods can write to the volume of run directories: its owner, where that is seen, and its driver.

The kubelet gives a volume to the group fs_group only where the volume's driver lets it, which NFS never does.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from scaletrain_cli.launch.kubernetes.api import Cluster
from scaletrain_cli.launch.kubernetes.kinds import CLAIM, CSI_DRIVER, PERSISTENT_VOLUME, Object
from scaletrain_cli.launch.kubernetes.obstacles import Found, problem
from scaletrain_cli.launch.kubernetes.refusals import RefusedError
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.safe_files import FOLDER_MODE
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.kubernetes import KubernetesSpec

# Volumes of Kubernetes itself to which the kubelet applies no fsGroup.
_WITHOUT_GROUPS = ("nfs", "hostPath", "glusterfs", "cephfs", "azureFile")


def volume_rights(cluster: Cluster, spec: RunSpec, run: RunDir | None) -> Iterator[Found]:
    """Yield why the pods could not write their run directory; ``run`` is one that the pods are known to write to."""
    kubernetes = spec.cluster.kubernetes
    claim = kubernetes.runs.claim and cluster.get(CLAIM, kubernetes.namespace, kubernetes.runs.claim)
    if not claim:
        return
    applied, why = _applies_group(cluster, claim) if kubernetes.fs_group is not None else (False, "")
    if applied:
        return
    seen = _folder_seen_here(spec, run)
    if seen is not None:
        folder, uid, gid, mode = seen
        if _may_write(kubernetes, uid, gid, mode):
            return
        owner = f"uid {uid}, gid {gid}, mode {mode:04o}"
        text = (
            f"the pods run as uid {kubernetes.run_as_user}, and could not write {folder} ({owner}). Set "
            f"cluster.kubernetes.run_as_user: {uid}, or give the folder to uid {kubernetes.run_as_user}."
        )
        if applied is None and kubernetes.fs_group is not None:  # it may be given to them all the same
            yield f"{text} Only where the volume takes fs_group {kubernetes.fs_group} is that not needed ({why})"
        else:
            yield problem(spec, "run_as_user", text, str(kubernetes.run_as_user))
    elif applied is False and why:
        yield (
            f"fs_group {kubernetes.fs_group} has no effect on claim {kubernetes.runs.claim} ({why}): its folder "
            f"{kubernetes.runs.sub_path or '/'} must be writable by uid {kubernetes.run_as_user}"
        )


def _folder_seen_here(spec: RunSpec, run: RunDir | None) -> tuple[Path, int, int, int] | None:
    """The folder that pods will write to with its owner and mode, where this machine sees the same volume."""
    if run is not None:
        found = run.path.stat()
        return run.path, found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)
    root = runs_root()
    if str(root) != spec.cluster.kubernetes.runs.path or not root.is_dir():
        return None
    return root, os.geteuid(), os.getegid(), FOLDER_MODE  # the run directory will be made as this user's


def _may_write(kubernetes: KubernetesSpec, uid: int, gid: int, mode: int) -> bool:
    user = kubernetes.run_as_user
    if user == uid:
        return mode & (stat.S_IWUSR | stat.S_IXUSR) == stat.S_IWUSR | stat.S_IXUSR
    if gid in (user, kubernetes.fs_group):  # runAsGroup is the user's number, too
        return mode & (stat.S_IWGRP | stat.S_IXGRP) == stat.S_IWGRP | stat.S_IXGRP
    return mode & (stat.S_IWOTH | stat.S_IXOTH) == stat.S_IWOTH | stat.S_IXOTH


def _applies_group(cluster: Cluster, claim: Object) -> tuple[bool | None, str]:
    """Return whether the kubelet gives the volume to fs_group, None where that is not known; and why."""
    name = claim.get("spec", {}).get("volumeName")
    if not name:
        return None, "the claim is not bound yet"
    try:
        volume = (cluster.get(PERSISTENT_VOLUME, "", name) or {}).get("spec", {})
        driver = volume.get("csi", {}).get("driver")
        if driver is None:
            found = next((source for source in _WITHOUT_GROUPS if source in volume), None)
            return (None, f"volume {name} is of a kind that is not known here") if found is None else (False, found)
        policy = (cluster.get(CSI_DRIVER, "", driver) or {}).get("spec", {}).get("fsGroupPolicy")
    except RefusedError as error:
        if not error.is_rights:
            raise
        return None, "you may not look at its volume"
    why = f"driver {driver} has fsGroupPolicy {policy}"
    if policy == "ReadWriteOnceWithFSType":  # what a driver that says nothing has
        modes = claim.get("spec", {}).get("accessModes", ())
        return "ReadWriteOnce" in modes and len(modes) == 1 and "fsType" in volume["csi"], why
    return {"File": True, "None": False}.get(str(policy)), why
