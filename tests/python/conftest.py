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
from _gpus import GROUPS, num_gpus, only, parameters
from ringattn import _C

MAX_WORLD_SIZE = 4

#: (device type, number of ranks) with the marks that skip it where it cannot run.
RINGS = [
    *(pytest.param(("cpu", size), id=f"cpu-{size}") for size in range(1, MAX_WORLD_SIZE + 1)),
    pytest.param(("cuda", 1), id="cuda-1", marks=pytest.mark.cuda),
    *(
        pytest.param(("cuda", size), id=f"cuda-{size}", marks=pytest.mark.multi_gpu(size=size))
        for size in range(2, MAX_WORLD_SIZE + 1)
    ),
]


#: Rooms whose tests mostly wait, for timeouts or for ranks that start, and a small one.
WAITING = ("cli", "integrations", "planner", "transport")
#: Rooms of other libraries' models, which compute much for each rank: four ranks on CPUs show
#: nothing there that three do not.
LIBRARIES = ("integrations", "training")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-group", choices=GROUPS, help="only tests that need GPUs, and of those one group"
    )


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """`--numprocesses auto`: the two workers of the scheduler below, and none where both would use
    one GPU."""
    return 0 if torch.cuda.device_count() > 0 else 2


def _room(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).parent.name


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files: one worker runs those that mostly wait, the other one all others, so that one
    computes while the other waits. A worker without any left takes the other's."""
    from xdist.scheduler import LoadScopeScheduling

    class ByWaiting(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            waits = node is self.nodes[0]
            own = (file for file in self.workqueue if (_room(file) in WAITING) == waits)
            if file := next(own, None):
                self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    return ByWaiting(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """float64 is for the CPU: its combinations with CUDA devices are no tests. See LIBRARIES."""
    kept = [
        item
        for item in items
        if not (num_gpus(item) and torch.float64 in parameters(item).values())
        and not (_room(item.nodeid) in LIBRARIES and parameters(item).get("ring") == ("cpu", 4))
    ]
    if group := config.getoption("gpu_group"):
        kept = only(kept, group)
    if dropped := set(items) - set(kept):
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    with_nccl = item.get_closest_marker("nccl") or parameters(item).get("transport") == "nccl"
    here = torch.cuda.device_count()
    missing = num_gpus(item) > here * (1 if with_nccl else RANKS_PER_GPU)
    if not missing and item.get_closest_marker("hopper"):
        missing = torch.cuda.get_device_capability() != (9, 0)
    if missing:  # one reason for all of them: the log has one line
        pytest.skip(f"needs GPUs that this machine does not have, it has {here}")


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
