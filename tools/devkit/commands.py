"""The commands of ``tools/dev.py``."""

import argparse
from collections.abc import Callable

from devkit import recipes
from devkit.demo import TIERS, run_demo
from devkit.model import make_model

__all__ = ["add_to"]

_Run = Callable[[argparse.Namespace], int]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add every command to the parser; each sets ``run``."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, summary: str, run: _Run, *, pytest: bool = False
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        added.set_defaults(run=run, takes_pytest_arguments=pytest)
        return added

    demo = command("demo", "restart a real vLLM server and restore a long prompt", _demo)
    demo.add_argument("--json", action="store_true", help="print one JSON object, last on stdout")
    demo.add_argument("--tier", choices=TIERS, default="fs", help=argparse.SUPPRESS)

    env = command("env", "make an environment and print its interpreter", _env)
    env.add_argument("name", choices=recipes.environment_names())

    command("model", "make the small model and print its directory", _model)


def _demo(arguments: argparse.Namespace) -> int:
    return run_demo(arguments.tier, as_json=arguments.json)


def _env(arguments: argparse.Namespace) -> int:
    print({"tools": recipes.tools, "vllm": recipes.vllm}[arguments.name]().make())
    return 0


def _model(_arguments: argparse.Namespace) -> int:
    print(make_model())
    return 0
