"""Fixed seeds, device, and hypothesis profiles for every test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

from mlx_spec.environment import CERTIFICATES
from tests import seconds
from tests.cores import keep_to_a_core
from tests.forwards import Forwards
from tests.plans import PLANS, chosen

SEED = 20

# Drawing and running tiny models is slow by hypothesis' standards, not by ours.
_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)

settings.register_profile("fast", max_examples=8, deadline=None, derandomize=True, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("deep", max_examples=300, deadline=None, print_blob=True, suppress_health_check=_SLOW_IS_FINE)
# `--hypothesis-profile` is applied after this file and wins.
settings.load_profile("fast")

# What one test finds out about a model must not answer for the next, least of all with the double on.
os.environ[CERTIFICATES] = "off"

if sys.platform == "linux":
    mx.set_default_device(mx.cpu)


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several test processes a core of its own."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers:
        keep_to_a_core(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), workers)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many cases of each test are run, and where fixtures with a reference's outputs are."""
    parser.addoption("--plan", choices=PLANS, default="test", help="how many cases of each test: see tests/plans.py")
    parser.addoption("--seconds", action="store_true", help="end with the seconds that each folder of tests took")
    group = parser.getgroup("drafters")
    # pytest calls a list of its own fixtures so; that list is still to be had as --funcargs.
    group._arggroup.conflict_handler = "resolve"
    group.addoption(
        "--fixtures",
        action="append",
        metavar="DIR",
        help="compare drafters with the golden files below DIR instead of tests/fixtures; may be given several times",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `metal` says so instead of failing where there is no such device."""
    if item.get_closest_marker("metal") is not None and not mx.metal.is_available():
        pytest.skip("no Metal device here")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the plan leaves out of what was asked for by name, mark or keyword."""
    plan = config.getoption("--plan")
    kept = chosen(items, plan)
    if plan != "deep" and "deep" not in config.option.markexpr:
        # A mark that is asked for takes the place of the usual one, which leaves these out.
        kept = [item for item in kept if item.get_closest_marker("deep") is None]
    names = {id(item) for item in kept}
    left_out = [item for item in items if id(item) not in names]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(scope="module", autouse=True)
def out_of_the_collectors_way() -> None:
    """Keep what earlier files left, and the tests themselves, from every collection and from whoever counts arrays."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether a test that counts its own rounds shall count many: `make deep` has the time."""
    return request.config.getoption("--plan") == "deep"


@pytest.fixture(autouse=True)
def fixed_seed() -> int:
    """Every test starts from the same mlx RNG key, whatever ran before it. A hypothesis example seeds for itself."""
    mx.random.seed(SEED)
    return SEED


@pytest.fixture(scope="module")
def changed_classes() -> Iterator[Forwards]:
    """Classes of models whose forwards a test put a function around; mlx-lm's again after the file."""
    forwards = Forwards()
    yield forwards
    forwards.undo()


@pytest.fixture
def forwards(changed_classes: Forwards) -> Iterator[Forwards]:
    """To put a function around the forwards of a model until the test ends."""
    yield changed_classes
    changed_classes.clear()


TOLD, TOLD_ALWAYS = "told", "told always"


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Give it a line that the summary of the run should end with."""
    # Properties go with the report of a test, so they reach the summary from another process as well.
    return lambda line: request.node.user_properties.append((TOLD, line))


@pytest.fixture
def tell_always(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """As `tell`, for a line that a quiet run ends with too."""
    return lambda line: request.node.user_properties.append((TOLD_ALWAYS, line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what tests had to tell: which seed a property was tried from, and how often."""
    ended = [report for reports in terminalreporter.stats.values() for report in reports]
    if config.getoption("--seconds"):
        terminalreporter.section("seconds of each folder, both processes together")
        for line in seconds.lines(report for report in ended if isinstance(report, pytest.TestReport)):
            terminalreporter.write_line(line)
    calls = [report for report in ended if isinstance(report, pytest.TestReport) and report.when == "call"]
    told = [TOLD_ALWAYS]
    if config.get_verbosity() >= 0 or settings.get_current_profile_name() == "deep":
        told.append(TOLD)
    lines = [line for report in calls for name, line in report.user_properties if name in told]
    if lines:
        terminalreporter.section("told by tests")
        for line in lines:
            terminalreporter.write_line(line)
