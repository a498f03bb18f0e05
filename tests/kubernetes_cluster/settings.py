"""What the environment says about the cluster under test; CONTRIBUTING.md has the variables. Read once, at import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PodsAre = Literal["real", "acted", "auto"]


@dataclass(frozen=True)
class Settings:
    """The variables SCALETRAIN_K8S_...

    ``pods``: how pods end on request; ``acted`` by the annotation ``fake/exit`` that simulated kubelets read.
    ``small_image``: an image with a shell, for stand-in pods. ``image``: one of k8s/Containerfile, for pods that train.
    ``kubectl``: a command in its place.
    ``silence``, ``wake``: commands with ``{}`` for the name of a node. None where the variable is not set.
    """

    kubeconfig: str | None
    pods: PodsAre
    small_image: str
    image: str | None
    storage_class: str | None
    disrupt: bool
    silence: str | None
    wake: str | None
    kubectl: str | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """Raises ValueError for a value that is not allowed."""
        pods = environment.get("SCALETRAIN_K8S_PODS", "auto")
        if pods not in ("real", "acted", "auto"):
            raise ValueError(f"SCALETRAIN_K8S_PODS is {pods!r}; allowed are real, acted and auto")
        disrupt = environment.get("SCALETRAIN_K8S_DISRUPT", "0")
        if disrupt not in ("0", "1"):
            raise ValueError(f"SCALETRAIN_K8S_DISRUPT is {disrupt!r}; allowed are 0 and 1")
        return cls(
            kubeconfig=environment.get("KUBECONFIG") or None,
            pods=pods,  # type: ignore[arg-type]
            small_image=environment.get("SCALETRAIN_K8S_SMALL_IMAGE", "busybox:1.37"),
            image=environment.get("SCALETRAIN_K8S_IMAGE") or None,
            storage_class=environment.get("SCALETRAIN_K8S_STORAGE_CLASS") or None,
            disrupt=disrupt == "1",
            silence=environment.get("SCALETRAIN_K8S_SILENCE") or None,
            wake=environment.get("SCALETRAIN_K8S_WAKE") or None,
            kubectl=environment.get("SCALETRAIN_K8S_KUBECTL") or None,
        )


SETTINGS = Settings.of(os.environ)
