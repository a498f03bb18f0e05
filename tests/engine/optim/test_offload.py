"""DeepSpeed's settings for offloading, and that a run with NVMe resumes bit-exactly."""

import ctypes.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scaletrain_cli.engine.deepspeed_engine import extensions_folder, load_async_io, offload_config
from tests.engine.optim.small_engine import layout_of, load, run_spec, save, start, train, weights
from tests.engine.ranks import on_ranks


def settings(offload: str, device: str, replicas: int = 1) -> dict[str, Any]:
    spec = run_spec(offload=offload, offload_device=device)
    return offload_config(spec, layout_of(spec, 3, replicas=replicas), Path("/scratch/run"))


def test_nothing_is_offloaded_by_default() -> None:
    assert settings("none", "cpu") == {}


def test_optimizer_states_and_weights_are_offloaded_to_the_host() -> None:
    place = {"device": "cpu", "pin_memory": False}
    assert settings("optimizer", "cpu") == {"offload_optimizer": place}
    assert settings("optimizer+params", "cpu") == {"offload_optimizer": place, "offload_param": place}


@pytest.mark.parametrize(("replicas", "size"), [(1, 16 * 64), (4, 4 * 64)])
def test_offload_to_nvme_has_a_folder_and_buffers_for_the_largest_shard(replicas: int, size: int) -> None:
    reported = settings("optimizer+params", "nvme", replicas)
    assert {place["nvme_path"] for place in reported.values()} == {"/scratch/run"}
    assert reported["offload_param"]["buffer_size"] == size


WIDE = 32768  # so that the matrices' pieces reach the megabyte from which DeepSpeed swaps


def resumed(offload: str, folder: Path) -> tuple[list[float], list[float], Tensor, Tensor]:
    """Return losses and weights after a save, without and with a restart in between."""
    load_async_io()
    spec = run_spec({"optimizer": {"lr": 1e-3}}, vocab_size=2 * WIDE, offload=offload, offload_device="nvme")
    first = start(spec, 3, width=WIDE, folder=folder / "first")
    for step in range(3):
        train(first, step)
    save(first, folder)
    went_on = [train(first, step) for step in (3, 4)], weights(first)
    assert len(list((folder / "first").glob("*/*/rank*"))) >= 2  # what the node agent will remove
    second = start(spec, 3, width=WIDE, folder=folder / "second")
    load(second, folder)
    return went_on[0], [train(second, step) for step in (3, 4)], went_on[1], weights(second)


def nvme_missing() -> str:
    """Return why the native operator is not available without a compilation of minutes; empty if it is."""
    if ctypes.util.find_library("aio") is None:
        return "no libaio"
    built = list(extensions_folder().rglob("async_io/async_io.so"))
    return "" if built or os.environ.get("SCALETRAIN_BUILD_OPERATORS") else "async_io was never built here"


@pytest.mark.skipif(bool(nvme_missing()), reason=nvme_missing())
@pytest.mark.parametrize("offload", ["optimizer", "optimizer+params"])
def test_a_run_on_nvme_resumes_to_the_bit(offload: str, tmp_path: Path) -> None:
    without, with_restart, expected, found = on_ranks(2, resumed, offload, tmp_path)[0]
    assert with_restart == without
    assert torch.equal(found, expected)
