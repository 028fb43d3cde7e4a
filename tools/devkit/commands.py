"""The commands of ``tools/dev.py``."""

import argparse
from collections.abc import Callable
from pathlib import Path

from devkit import recipes
from devkit.bench import bench_names, run_bench
from devkit.building import build_wheels, smoke_test
from devkit.demo import TIERS, run_demo
from devkit.hatch import core_python, hatch_run
from devkit.model import make_model
from devkit.places import ROOT
from devkit.testing import lint, run_tests

__all__ = ["add_to"]

_Run = Callable[[argparse.Namespace], int]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add every command to the parser; each sets ``run``."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, summary: str, run: _Run, *, pytest: bool = False
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(run=run, takes_pytest_arguments=pytest)
        return added

    demo = command("demo", "restart a real vLLM server and restore a long prompt", _demo)
    demo.add_argument("--json", action="store_true", help="print one JSON object, last on stdout")
    demo.add_argument("--tier", choices=TIERS, default="lifeboat", help=argparse.SUPPRESS)

    test = command(
        "test", "run what CI runs; arguments for pytest run only tests", _test, pytest=True
    )
    test.add_argument("--full", action="store_true", help="also run tests that take minutes")

    bench = command("bench", "compare speed with a peer and with a limit", _bench)
    bench.add_argument("name", choices=bench_names(), metavar="NAME", help=", ".join(bench_names()))
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="for it, such as --help")

    check = command("lint", "check style, format and types", _lint)
    check.add_argument("--fix", action="store_true", help="mend what ruff can mend first")

    build = command("build", "build all wheels, check and try them", _build)
    build.add_argument("target", nargs="?", type=Path, default=ROOT / "dist")

    env = command("env", "make an environment and print its interpreter", _env)
    env.add_argument("name", choices=recipes.environment_names())

    command("model", "make the small model and print its directory", _model)


def _demo(arguments: argparse.Namespace) -> int:
    return run_demo(arguments.tier, as_json=arguments.json)


def _test(arguments: argparse.Namespace) -> int:
    return run_tests(arguments.rest, full=arguments.full)


def _bench(arguments: argparse.Namespace) -> int:
    return run_bench(arguments.name, arguments.arguments)


def _lint(arguments: argparse.Namespace) -> int:
    if arguments.fix:
        hatch_run("lint", ["fix"])
    lint()
    return 0


def _build(arguments: argparse.Namespace) -> int:
    smoke_test(build_wheels(arguments.target.resolve()))
    return 0


def _env(arguments: argparse.Namespace) -> int:
    make: dict[str, Callable[[], Path]] = {
        "core": core_python,
        "dashboard": lambda: recipes.dashboard().make(),
        "mlx": lambda: recipes.mlx().make(),
        "lmcache": lambda: recipes.lmcache().make(),
        "sglang": lambda: recipes.sglang().make(),
        "tools": lambda: recipes.tools().make(),
        "vllm": lambda: recipes.vllm().make(),
        "vllm_lmcache": recipes.make_vllm_lmcache,
    }
    print(make[arguments.name]())
    return 0


def _model(_arguments: argparse.Namespace) -> int:
    print(make_model())
    return 0
