"""Live prices: the prices of gpuhunt's offers in a spec, and the errors if it is not available.

The network is never asked: one test reads a price list of ours through gpuhunt itself, where it is installed; the
others put a stand-in in its place.
"""

import io
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.cli.plan import with_live_prices
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan import make_plan
from tests.plan.specs import spec_of


class Failure(Exception):
    pass


def offer(provider: str, usd: float, gpus: int = 8) -> SimpleNamespace:
    return SimpleNamespace(provider=provider, price=usd * gpus, gpu_count=gpus)


def stand_in(monkeypatch: pytest.MonkeyPatch, on_demand: list[Any], spot: list[Any]) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def query(**wanted: Any) -> list[Any]:
        asked.append(wanted)
        return spot if wanted["spot"] else on_demand

    monkeypatch.setitem(sys.modules, "gpuhunt", SimpleNamespace(query=query, GPUHuntError=Failure))
    return asked


def test_the_price_is_the_median_of_providers_for_whole_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_demand = [
        offer("aws", 6.0),
        offer("aws", 8.0),
        offer("lambda", 4.0),
        offer("gcp", 11.0),
        offer("runpod", 1.0, 1),
    ]
    asked = stand_in(monkeypatch, on_demand, [offer("aws", 3.0)])
    spec, prices = with_live_prices(spec_of())
    assert prices["price_per_gpu_hour"].usd == 7.0
    assert prices["price_per_gpu_hour"].source.params == {"providers": ["aws", "gcp", "lambda"]}
    assert asked[0]["gpu_name"] == "H100"
    assert asked[0]["min_gpu_memory"] < 80 < asked[0]["max_gpu_memory"]
    cost = make_plan(spec).cost
    assert (cost.price_per_gpu_hour, cost.spot.price_per_gpu_hour) == (7.0, 3.0)


def test_prices_in_the_spec_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, [offer("aws", 6.0)], [])
    spec, prices = with_live_prices(spec_of(cluster__price_per_gpu_hour=2))
    assert (spec.cluster.price_per_gpu_hour, spec.cluster.spot_price_per_gpu_hour) == (2, "auto")
    assert prices.keys() == {"price_per_gpu_hour"}


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        *(("rtx-4090-24gb", "RTX4090"), ("h100-nvl-94gb", "H100NVL"), ("h200-nvl-141gb", "H200NVL")),
        *(("a100-pcie-80gb", "A100"), ("v100-sxm2-16gb", "V100"), ("mi300x-192gb", "MI300X"), ("gb200-186gb", "GB200")),
    ],
)
def test_devices_are_mapped_to_gpuhunt_names(monkeypatch: pytest.MonkeyPatch, gpu: str, name: str) -> None:
    asked = stand_in(monkeypatch, [offer("aws", 6.0)], [])
    with_live_prices(spec_of(cluster__gpu=gpu))
    assert asked[0]["gpu_name"] == name


def test_without_a_network_the_error_suggests_to_check_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def query(**_: Any) -> list[Any]:
        raise Failure("Failed to load catalogs of all providers")

    monkeypatch.setitem(sys.modules, "gpuhunt", SimpleNamespace(query=query, GPUHuntError=Failure))
    with pytest.raises(UsageError, match="cannot download its price lists"):
        with_live_prices(spec_of())


def test_a_gpu_without_offers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, [], [])
    with pytest.raises(UsageError, match="offers h100-sxm-80gb"):
        with_live_prices(spec_of())
    with pytest.raises(UsageError, match="cpu is not a GPU of the catalogue"):
        with_live_prices(spec_of(cluster__gpu="cpu"))


def test_gpuhunt_itself_reads_a_price_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpuhunt = pytest.importorskip("gpuhunt")
    head = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags"
    rows = [
        "p5.48xlarge,us-east-1,55.04,192,2048,8,H100,80,False,,nvidia,",
        "p5,us-east-1,20,192,2048,8,H100,80,True,,,",
    ]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("aws.csv", "\n".join([head, *rows]) + "\n")
    (tmp_path / "aws" / "1").mkdir(parents=True)
    (tmp_path / "aws" / "version").write_text("1", encoding="utf-8")
    (tmp_path / "aws" / "1" / "catalog.zip").write_bytes(packed.getvalue())
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", tmp_path.as_uri())
    sys.modules["gpuhunt._internal.default"].default_catalog.cache_clear()
    assert gpuhunt.__name__ == "gpuhunt"
    _, prices = with_live_prices(spec_of())
    assert {key: quote.usd for key, quote in prices.items()} == {
        "price_per_gpu_hour": 6.88,
        "spot_price_per_gpu_hour": 2.5,
    }
    sys.modules["gpuhunt._internal.default"].default_catalog.cache_clear()
