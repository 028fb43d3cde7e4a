"""``dev.py test``: everything that CI runs, and one closing line."""

import contextlib
import dataclasses
import fnmatch
import functools
import time
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path

from devkit import recipes
from devkit.beside import WHOLE_TESTS, Beside, beside
from devkit.browser import install_browser
from devkit.building import build_wheels, smoke_test
from devkit.hatch import core_python, hatch_run
from devkit.model import make_model
from devkit.next_vllm import NEXT_VLLM, make_next_vllm
from devkit.places import ROOT, dev_home
from devkit.shell import DevError, note, try_run

__all__ = ["lint", "run_tests"]

_NO_TESTS = 5  # pytest's exit code when it collected or selected none


@dataclasses.dataclass(frozen=True)
class _Suite:
    """Tests that run in one environment, that of an engine or core's.

    Attributes
    ----------
    name
        What the suite is called.
    directory
        Where its tests are.
    environment
        ``core``, ``dashboard``, or an engine's.
    files
        Which files of the directory are its tests, where another suite has the others.
    """

    name: str
    directory: Path
    environment: str
    files: str = ""

    @property
    def report(self) -> Path:
        """Where pytest says what has become of the tests."""
        return dev_home() / f"report-{self.name}.xml"

    @property
    def engine(self) -> bool:
        """Whether the tests need an engine, and its model."""
        return self.environment in ("vllm", "vllm_lmcache", "sglang")

    def python(self) -> Path:
        make: dict[str, Callable[[], Path]] = {
            "core": core_python,
            "dashboard": _dashboard_python,
            "mlx": lambda: recipes.mlx().make(),
            "lmcache": lambda: recipes.lmcache().make(),
            "vllm_lmcache": recipes.make_vllm_lmcache,
            "sglang": lambda: recipes.sglang().make(),
            "vllm": lambda: recipes.vllm().make(),
        }
        return make[self.environment]()

    def all_tests(self) -> list[str]:
        """Return the arguments for pytest that stand for the whole suite."""
        if self.files:
            return sorted(map(str, self.directory.glob(self.files)))
        others = [
            f"--ignore-glob={other.directory / other.files}"
            for other in _SUITES
            if other.files and other.directory == self.directory
        ]
        return [*others, str(self.directory)]

    def holds(self, path: Path) -> bool:
        """Whether a path is one of the suite's, or below one."""
        if not path.is_relative_to(self.directory):
            return False
        name = next(iter(path.relative_to(self.directory).parts), "")
        if self.files:
            return fnmatch.fnmatch(name, self.files)
        return not any(
            other.files and other.directory == self.directory and other.holds(path)
            for other in _SUITES
        )


@dataclasses.dataclass
class _Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, report: Path) -> None:
        """Add what a JUnit report says."""
        for suite in xml.etree.ElementTree.parse(report).getroot().iter("testsuite"):
            total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            self.passed += total - skipped - failed
            self.failed += failed
            self.skipped += skipped


_VLLM_TESTS = ROOT / "packages" / "lifeboatcache-vllm" / "tests"

#: What meets vLLM's own code but boots no server; runs on the next release too.
_NEXT_VLLM_TESTS = (
    *(
        _VLLM_TESTS / f"test_vllm_{name}.py"
        for name in (
            "activation",
            "epoch",
            "handover",
            "identity_parts",
            "lora",
            "selftest",
            "tier",
        )
    ),
    ROOT / "tests" / "test_vllm_identity.py",
)

_SUITES = (
    _Suite("core", ROOT / "packages" / "lifeboatcache-core" / "tests", "core"),
    _Suite("dashboard", ROOT / "packages" / "lifeboatcache-dashboard" / "tests", "dashboard"),
    _Suite("metapackage", ROOT / "packages" / "lifeboatcache" / "tests", "core"),
    _Suite("vllm", ROOT / "packages" / "lifeboatcache-vllm" / "tests", "vllm"),
    _Suite("sglang", ROOT / "packages" / "lifeboatcache-sglang" / "tests", "sglang"),
    _Suite("mlx", ROOT / "packages" / "lifeboatcache-mlx" / "tests", "mlx"),
    _Suite("lmcache", ROOT / "packages" / "lifeboatcache-lmcache" / "tests", "lmcache"),
    _Suite("whole", WHOLE_TESTS, "vllm"),
    _Suite("whole-sglang", WHOLE_TESTS, "sglang", files="test_sglang_*.py"),
    _Suite("whole-mlx", WHOLE_TESTS, "mlx", files="test_mlx_*.py"),
    _Suite("whole-lmcache", WHOLE_TESTS, "vllm_lmcache", files="test_lmcache_*.py"),
)


def _dashboard_python() -> Path:
    install_browser()
    return recipes.dashboard().make()


def lint() -> None:
    """Check style, format and types.

    Raises
    ------
    DevError
        When one of them finds something.
    """
    _check_style()
    _check_types()


def _check_style() -> None:
    if hatch_run("lint", ["check"]):
        msg = "ruff found something; `python3 tools/dev.py lint --fix` mends most of it"
        raise DevError(msg)


def _check_types() -> None:
    if hatch_run("types", ["check"]):
        msg = "mypy found something; see above"
        raise DevError(msg)


def _check_wheels() -> None:
    smoke_test(build_wheels(dev_home() / "wheels"))


def run_tests(arguments: Sequence[str], *, full: bool) -> int:
    """Run the checks and every suite, then say how it went.

    When all is run, tests across packages run beside the rest, in a process of their own.

    Parameters
    ----------
    arguments
        For pytest. With any, only the suites run (those that a path among
        them points into, if there is a path), not lint, types and wheels.
    full
        Also run the tests marked ``full``.

    Returns
    -------
    int
        0 when every step passed and at least one test ran.
    """
    selected = _select(arguments)
    steps: list[tuple[str, Callable[[], None]]] = []
    counts = _Counts()
    ran: list[str] = []
    if not arguments:
        steps += [("lint", _check_style), ("types", _check_types), ("wheels", _check_wheels)]
    away = [suite for suite, _ in selected if not arguments and suite.directory == WHOLE_TESTS]
    for suite, given in selected:
        if suite in away:
            continue
        run = functools.partial(
            _run_suite, suite, given, full=full, must_run=not arguments, counts=counts, ran=ran
        )
        steps.append((f"tests of {suite.name}", run))
    if full and not arguments:
        suite = _Suite(f"vllm-{NEXT_VLLM}", ROOT, "vllm")
        run = functools.partial(
            _run_suite, suite, list(map(str, _NEXT_VLLM_TESTS)), full=full, must_run=True,
            counts=counts, ran=ran, release=make_next_vllm,
        )  # fmt: skip
        steps.append((f"on vLLM {NEXT_VLLM}", run))
    rows = []
    good = True
    with contextlib.ExitStack() as stack:
        if away:
            for suite in away:
                suite.report.unlink(missing_ok=True)
            lane = stack.enter_context(beside(full=full))
            steps.append(("tests beside", functools.partial(_take_in, lane, away, counts, ran)))
        for name, step in steps:
            print(f"\n=== {name} ===", flush=True)
            begin = time.monotonic()
            try:
                step()
                outcome = "passed"
            except DevError as error:
                print(f"{name}: {error}", flush=True)
                outcome, good = "FAILED", False
            rows.append(f"  {name:<22} {outcome:<7} {time.monotonic() - begin:7.1f} s")
    print("\n" + "\n".join(rows))
    if good and not ran:
        print("no test was selected; check the arguments given to pytest")
        good = False
    print(f"\n{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped", flush=True)
    return 0 if good else 1


def _select(arguments: Sequence[str]) -> list[tuple[_Suite, list[str]]]:
    """Hand each suite the arguments for it: all options, and the paths that concern it."""
    places = {
        argument: Path(argument.partition("::")[0]).absolute()
        for argument in arguments
        if not argument.startswith("-") and Path(argument.partition("::")[0]).exists()
    }
    options = [argument for argument in arguments if argument not in places]
    if not places:
        return [(suite, [*options, *suite.all_tests()]) for suite in _SUITES]
    chosen: list[tuple[_Suite, list[str]]] = []
    homeless = set(places)
    for suite in _SUITES:
        around = [name for name, path in places.items() if suite.directory.is_relative_to(path)]
        inside = [name for name, path in places.items() if suite.holds(path)]
        homeless.difference_update(inside, around)
        paths = suite.all_tests() if around else inside
        if paths:
            chosen.append((suite, [*options, *paths]))
    if homeless:
        suites = ", ".join(str(suite.directory.relative_to(ROOT)) for suite in _SUITES)
        msg = f"no suite holds {', '.join(sorted(homeless))}; tests are in {suites}"
        raise DevError(msg)
    return chosen


def _take_in(lane: Beside, suites: Sequence[_Suite], counts: _Counts, ran: list[str]) -> None:
    """Wait for suites that run in a process of their own, and count their tests."""
    passed = lane.finish()
    for suite in suites:
        before = dataclasses.replace(counts)
        if suite.report.exists():
            counts.add(suite.report)
        if counts == before:
            msg = f"no test ran of {suite.name}; a suite without tests proves nothing"
            raise DevError(msg)
        ran.append(suite.name)
    if not passed:
        msg = "it failed; see above"
        raise DevError(msg)


def _run_suite(
    suite: _Suite,
    arguments: Sequence[str],
    *,
    full: bool,
    must_run: bool,
    counts: _Counts,
    ran: list[str],
    release: Callable[[], Path] | None = None,
) -> None:
    # One for all: suites whose environments have the same numba compile once.
    variables = {"LIFEBOAT_TEST_KERNEL_HOME": str(dev_home() / "kernels")}
    if suite.engine:
        variables["LIFEBOAT_TEST_MODEL"] = str(make_model())
    if release is not None:
        variables["PYTHONPATH"] = str(release())
    suite.report.unlink(missing_ok=True)
    code = try_run(
        [
            suite.python(), "-m", "pytest", f"--junitxml={suite.report}",
            f"--override-ini=cache_dir={dev_home() / 'pytest' / suite.name}",
            *(() if full else ("-m", "not full")),
            *arguments,
        ],
        env=variables,
        cwd=ROOT,
    )  # fmt: skip
    if suite.report.exists():
        counts.add(suite.report)
    if code == _NO_TESTS:
        if must_run:
            msg = f"no test ran in {suite.directory}; a suite without tests proves nothing"
            raise DevError(msg)
        note(f"no test of {suite.name} is selected")
    elif code:
        msg = f"pytest ended with exit code {code}"
        raise DevError(msg)
    else:
        ran.append(suite.name)
