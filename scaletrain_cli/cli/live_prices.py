"""Today's prices from gpuhunt, an optional package that downloads the price lists of cloud providers. Plans nothing."""

from __future__ import annotations

import logging
import re
import socket
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.plan.catalogue.hardware import Accelerator, find_accelerator
from scaletrain_cli.plan.catalogue.prices import Quote
from scaletrain_cli.spec import RunSpec

# Whose lists gpuhunt takes from its own storage; for the others it would need credentials or ask each of them.
_PROVIDERS = ["aws", "azure", "gcp", "lambdalabs", "nebius", "oci", "runpod", "verda"]
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class LivePrices:
    """Quotes of today; None on a market where nobody offers the GPU."""

    on_demand: Quote | None
    spot: Quote | None


def with_live_prices(spec: RunSpec) -> tuple[RunSpec, LivePrices]:
    """The run with the prices of today where the spec leaves them ``auto``, and what they are.

    Raises UsageError where gpuhunt is not installed, cannot reach its lists, or lists no such GPU.
    """
    device = find_accelerator(spec.cluster)
    prices = LivePrices(*(_quote(device, spot, spec.cluster.gpus_per_node) for spot in (False, True)))
    if prices.on_demand is None and prices.spot is None:
        raise _no_prices(f"no provider that gpuhunt knows offers {device.name}.", "Set cluster.price_per_gpu_hour.")
    cluster = spec.cluster
    updates = {
        key: quote.usd
        for key, quote in (("price_per_gpu_hour", prices.on_demand), ("spot_price_per_gpu_hour", prices.spot))
        if quote is not None and getattr(cluster, key) == "auto"
    }
    return spec.model_copy(update={"cluster": cluster.model_copy(update=updates)}), prices


def _quote(device: Accelerator, spot: bool, gpus_per_node: int) -> Quote | None:
    """The median over providers of each one's median over regions; of whole nodes where they are on offer."""
    offers = _offers(*_gpuhunt_name(device), spot)
    whole = [offer for offer in offers if offer.gpu_count == gpus_per_node]
    by_provider: dict[str, list[float]] = {}
    for offer in whole or offers:
        by_provider.setdefault(offer.provider, []).append(offer.price / offer.gpu_count)
    if not by_provider:
        return None
    median = statistics.median(statistics.median(prices) for prices in by_provider.values())
    return Quote(median, f"gpuhunt today, median of {len(by_provider)} providers: {', '.join(sorted(by_provider))}")


def _gpuhunt_name(device: Accelerator) -> tuple[str, float]:
    """``rtx-4090-24gb`` -> RTX4090 of 24 GB. gpuhunt does not tell SXM from PCIe."""
    size = re.search(r"-(\d+)gb$", device.name)
    if size is None:
        raise _no_prices(f"{device.name} is not a GPU of the catalogue.", "Set cluster.price_per_gpu_hour.")
    name = re.sub(r"-(sxm\d?|pcie|gcd)$", "", device.name[: size.start()])
    return name.replace("-", "").upper(), float(size[1])


def _offers(name: str, gigabytes: float, spot: bool) -> list[Any]:
    try:
        import gpuhunt
    except ImportError as error:
        raise _no_prices("gpuhunt is not installed.", f"Run {install_command('prices')}, or go without.") from error
    with _quiet():
        try:
            return list(
                gpuhunt.query(
                    provider=_PROVIDERS,
                    gpu_name=name,
                    min_gpu_memory=0.9 * gigabytes,
                    max_gpu_memory=1.1 * gigabytes,
                    spot=spot,
                )
            )
        except (gpuhunt.GPUHuntError, OSError) as error:
            raise _no_prices(f"gpuhunt cannot reach its price lists: {error}.", "Check the network.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No tracebacks on the terminal for a provider that fails while others answer, and an end to waiting."""
    logger, waits = logging.getLogger("gpuhunt"), socket.getdefaulttimeout()
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        logger.setLevel(level)
        socket.setdefaulttimeout(waits)


def _no_prices(message: str, hint: str) -> UsageError:
    hint += " The embedded catalogue needs no network."
    return UsageError("no live prices", (Problem("--live-prices", "", message, None, hint),))
