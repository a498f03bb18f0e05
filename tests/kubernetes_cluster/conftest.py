"""The cluster of the current context, a namespace of the suite's own, and users on it."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kubernetes_cluster.offers import Offers, offers_of
from tests.kubernetes_cluster.place import Place
from tests.kubernetes_cluster.proxy import Proxy, User
from tests.kubernetes_cluster.server import Server, connect
from tests.kubernetes_cluster.settings import SETTINGS
from tests.kubernetes_cluster.site import ADMINISTRATOR, Site
from tests.kubernetes_cluster.turns import Turns


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Server:
    if "kubernetes" not in request.config.getoption("markexpr"):
        pytest.skip("it acts on the cluster of your kubeconfig: only `make test-k8s` runs it")
    try:
        server = connect(SETTINGS.kubeconfig)
    except Exception as error:  # a kubeconfig and the programs that it names can raise any exception
        pytest.skip(f"no kubeconfig with a current context: {error}")
    try:
        server.request("GET", "/version")
    except Exception as error:
        pytest.skip(f"the cluster of the current context does not answer: {error}")
    return server


@pytest.fixture(scope="session")
def offers(server: Server) -> Offers:
    return offers_of(server, SETTINGS)


@pytest.fixture(scope="session")
def place(server: Server, offers: Offers) -> Iterator[Place]:
    offers.need_right("create", "", "namespaces")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # else nothing would be removed
    try:
        with Place.made(server, offers) as place:
            yield place
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def proxy(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    proxy = Proxy(server.upstream, tmp_path_factory.mktemp("kubeconfigs"))
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Turns:
    """Return the turns of all processes of the suite."""
    own = tmp_path_factory.getbasetemp()
    return Turns(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture
def site_of(
    place: Place, proxy: Proxy, tmp_path: Path, turns: Turns, request: pytest.FixtureRequest
) -> Iterator[Callable[[User], Site]]:
    """Return a function that makes a user's machine; all runs are deleted at the end of the test."""
    for name in ("backend", "nodes_of_its_own"):  # they may skip the test, and that need not wait
        if name in request.fixturenames:
            request.getfixturevalue(name)
    alone = "nodes_of_its_own" in request.fixturenames
    with turns.alone() if alone else turns.beside_others():
        proxy.image = place.offers.settings.small_image

        def make(user: User) -> Site:
            return Site(place, proxy, tmp_path / (user.name or "admin"), user)

        yield make
        proxy.image, proxy.faults = None, []
        place.empty()


@pytest.fixture
def site(site_of: Callable[[User], Site]) -> Site:
    return site_of(ADMINISTRATOR)


@pytest.fixture(params=["jobset", "trainjob", "volcano"])
def backend(request: pytest.FixtureRequest, offers: Offers) -> str:
    """Return each kind of workload that the cluster serves."""
    offers.need_backend(request.param)
    return str(request.param)


@pytest.fixture
def nodes_of_its_own(offers: Offers) -> None:
    """Let no other process of the suite run a test meanwhile: the test takes nodes away."""
    offers.need_disruption()
