# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: devices, and process groups of 1 to 4 ranks that are started once."""

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported, here and in the processes of the pools: all ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from _distributed import RANKS_PER_GPU, RankPool, RankPools
from ringattn import _C

MAX_WORLD_SIZE = 4

#: (device type, number of ranks) with the marks that skip it where it cannot run.
RINGS = [
    *(pytest.param(("cpu", size), id=f"cpu-{size}") for size in range(1, MAX_WORLD_SIZE + 1)),
    pytest.param(("cuda", 1), id="cuda-1", marks=pytest.mark.cuda),
    *(
        pytest.param(("cuda", size), id=f"cuda-{size}", marks=pytest.mark.multi_gpu)
        for size in range(2, MAX_WORLD_SIZE + 1)
    ),
]


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


#: Rooms whose tests mostly wait, for timeouts or for ranks that start, and a small one: half of the
#: suite's time.
WAITING = ("cli", "integrations", "planner", "transport")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """`--numprocesses auto`: the two workers of the scheduler below, and none where both would use
    one GPU."""
    return 0 if torch.cuda.device_count() > 0 else 2


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two workers: one runs the rooms that mostly wait, the other one all others, some of which
    measure time."""
    from xdist.scheduler import LoadScopeScheduling

    class ByWaiting(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            room = Path(nodeid.partition("::")[0]).parent.name
            return "waits" if room in WAITING else "computes"

    return ByWaiting(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """float64 is for the CPU: its combinations with CUDA devices are no tests. Tests that compare
    measured times run again where they fail: other programs may take the cores meanwhile, while
    what is broken fails each time."""
    for item in items:
        if item.get_closest_marker("compares_times"):
            item.add_marker(pytest.mark.flaky(reruns=2))
    on_device = [item for item in items if any(item.iter_markers(name="cuda"))]
    on_device += [item for item in items if any(item.iter_markers(name="multi_gpu"))]
    impossible = {item for item in on_device if torch.float64 in _parameters(item).values()}
    if impossible:
        config.hook.pytest_deselected(items=list(impossible))
        items[:] = [item for item in items if item not in impossible]


def pytest_runtest_setup(item: pytest.Item) -> None:
    num_devices = torch.cuda.device_count()
    if item.get_closest_marker("cuda") and num_devices < 1:
        pytest.skip("needs a CUDA device")
    if marker := item.get_closest_marker("multi_gpu"):
        given = _parameters(item)
        size = given["ring"][1] if "ring" in given else (*marker.args, 2)[0]
        with_nccl = item.get_closest_marker("nccl") or given.get("transport") == "nccl"
        if num_devices * (1 if with_nccl else RANKS_PER_GPU) < size:
            pytest.skip(f"needs {size} CUDA devices")
    if item.get_closest_marker("hopper") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every single device there is."""
    return torch.device(request.param)


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Records in the item whether its test has failed, for the fixtures."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session")
def _pools_of_the_session() -> Iterator[RankPools]:
    with RankPools() as pools:
        yield pools


@pytest.fixture(scope="module")
def _pools_of_the_module() -> Iterator[RankPools]:
    with RankPools() as pools:
        yield pools


def _lent(pools: RankPools, request: pytest.FixtureRequest) -> Iterator[Callable[..., RankPool]]:
    """The pools, for one test. Where it fails its ranks may be out of step: they are replaced."""
    yield pools
    if request.node.stash.get(_FAILED, False):
        pools.close()


@pytest.fixture
def rank_pool(
    _pools_of_the_session: RankPools, request: pytest.FixtureRequest
) -> Iterator[Callable[..., RankPool]]:
    """``rank_pool(world_size, device_type="cpu")``: the pool of that size, started on first use and
    started again after a test that failed or lost one of its processes."""
    yield from _lent(_pools_of_the_session, request)


@pytest.fixture
def own_pool(
    _pools_of_the_module: RankPools, request: pytest.FixtureRequest
) -> Iterator[Callable[..., RankPool]]:
    """As ``rank_pool``, with pools that the tests of other files do not use: their ranks have not
    agreed on any call yet."""
    yield from _lent(_pools_of_the_module, request)


@pytest.fixture(params=RINGS)
def ring(request: pytest.FixtureRequest, rank_pool: Callable[..., RankPool]) -> RankPool:
    """A process group of every size, on every kind of device there is."""
    device_type, world_size = request.param
    return rank_pool(world_size, device_type)


@pytest.fixture
def set_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Sets an environment variable that C++ reads at its first use, and has it read again."""

    def set_and_read(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        _C.reread_environment()

    yield set_and_read
    monkeypatch.undo()
    _C.reread_environment()
