"""The command line's grammar."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from lifeboat_cache.cli.plugins import add_missing_commands, add_plugin_commands
from lifeboat_cache.config import preset_names
from lifeboat_cache.version import __version__

__all__ = ["EXIT_CODES", "PROGRAM", "build_parser"]

PROGRAM = "lifeboat-cache"

#: Every exit code of the command, and what it means.
EXIT_CODES = {
    0: "done; for doctor and selftest: nothing failed; for check and status: nothing is wrong",
    1: "doctor: a check failed; check, status: something is or was wrong; purge: you answered no; "
    "selftest: a step failed",
    2: "wrong usage or configuration, or something could not be read or written; "
    "selftest: it could not run",
    130: "interrupted",
    141: "the reader of the output went away",
}

Command = Callable[[argparse.Namespace], int]


# The commands are imported when they run: `--help` and plugins need none of them.
def _init(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.config_commands import init

    return init(args)


def _show(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.config_commands import show

    return show(args)


def _validate(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.config_commands import validate

    return validate(args)


def _ls(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.store_commands import ls

    return ls(args)


def _purge(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.purge_command import purge

    return purge(args)


def _gc(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.gc_command import gc

    return gc(args)


def _doctor(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.doctor_command import doctor

    return doctor(args)


def _selftest(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.selftest_command import selftest

    return selftest(args)


def _check(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.check_command import check

    return check(args)


def _bench(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.bench_command import bench

    return bench(args)


def _agent(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.agent_command import agent

    return agent(args)


def _status(args: argparse.Namespace) -> int:
    from lifeboat_cache.cli.status_command import status

    return status(args)


def build_parser(*, plugins: bool = True) -> argparse.ArgumentParser:
    """Return the parser of ``lifeboat-cache``.

    Parameters
    ----------
    plugins
        Whether to add the subcommands of other distributions.
    """
    codes = "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Looks after LifeboatCache, the KV cache of LLM engines on disk.",
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"{PROGRAM} {__version__}",
        help="show the version and exit",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration file to use")
    # The same option after the subcommand; absent there, it must not undo the one before it.
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="the configuration file to use",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        to: argparse._SubParsersAction[argparse.ArgumentParser],
        name: str,
        func: Command,
        text: str,
        more: str = "",
    ) -> argparse.ArgumentParser:
        added = to.add_parser(
            name, parents=[common], help=text, description=f"{text[0].upper()}{text[1:]}. {more}"
        )
        added.set_defaults(func=func)
        return added

    init = add(
        commands,
        "init",
        _init,
        "write a configuration file with every key explained",
        "It goes to lifeboat.yaml in the home directory ($LIFEBOAT_CACHE_HOME, by default "
        "~/.lifeboat_cache) unless --path or --config names another one.",
    )
    init.add_argument(
        "--preset", metavar="NAME", help=f"start from a preset: {', '.join(preset_names())}"
    )
    init.add_argument("--force", action="store_true", help="replace a file that is there already")
    init.add_argument("--path", type=Path, metavar="FILE", help="the file to write")

    config = commands.add_parser(
        "config",
        help="show or check the configuration",
        description="Shows or checks the configuration.",
    )
    configs = config.add_subparsers(title="commands", metavar="COMMAND", required=True)
    show = add(
        configs,
        "show",
        _show,
        "show the values in effect and where each comes from",
        "Secrets are masked.",
    )
    _json(show)
    validate = add(
        configs, "validate", _validate, "check a configuration file, by default the one in use"
    )
    validate.add_argument("file", type=Path, nargs="?", metavar="FILE", help="the file to check")

    ls = add(
        commands,
        "ls",
        _ls,
        "show what is stored, by target and namespace",
        "A namespace holds the KV that one model in one configuration can use. With NAMESPACE, "
        "prints as JSON what it is made from, which tells why two engines do or do not share.",
    )
    ls.add_argument(
        "namespace", nargs="?", metavar="NAMESPACE", help="a namespace, or the start of its name"
    )
    _json(ls)

    status = add(
        commands,
        "status",
        _status,
        "show which engines use this home directory, and whether all is well",
        "Processes, hit rates, bytes, space, queues, evictions and losses, as processes publish "
        "them; nobody is asked. What is wrong is said first, and the exit code is 1 then.",
    )
    _json(status)
    status.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=2.0,
        metavar="SECONDS",
        help="show it again every so many seconds, by default 2, until interrupted",
    )

    purge = add(
        commands,
        "purge",
        _purge,
        "remove stored KV",
        "On every target that is configured, enabled or not. Files of engines that have ended are "
        "removed; blocks that lie among others, or in files of running engines, are declared "
        "dead, and erased when the engines have let go of them, after half a minute (on mounts "
        "that several hosts share, one and a half).",
    )
    which = purge.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--namespace",
        action="append",
        metavar="PREFIX",
        help="a namespace, or the start of its name; can be given several times",
    )
    which.add_argument("--all", action="store_true", help="all namespaces of all targets")
    which.add_argument(
        "--salt",
        metavar="SALT",
        help="what requests with this cache salt stored, where the adapter knows it (LMCache)",
    )
    purge.add_argument(
        "--older-than",
        metavar="AGE",
        help="only what was stored longer ago than this, for example 7d or 12h",
    )
    purge.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    _yes(purge)

    gc = add(
        commands,
        "gc",
        _gc,
        "make room and tidy up now",
        "This is what the agent does all the time: what was used least recently is evicted where a "
        "target is nearly full, what is dead is reclaimed, small files of engines that have ended "
        "are merged. Engines may run meanwhile; readers get a grace before space is reclaimed.",
    )
    gc.add_argument(
        "--dry-run", action="store_true", help="only say what would be evicted, change nothing"
    )
    _json(gc)

    check = add(
        commands,
        "check",
        _check,
        "verify everything that is stored",
        "Reads every block of every target and compares it with its checksum, beside running "
        "engines too. --repair declares bad blocks dead and puts right what processes that have "
        "ended left damaged; what runs, and what a newer release wrote, is left alone.",
    )
    check.add_argument(
        "namespace",
        nargs="*",
        metavar="NAMESPACE",
        help="only these namespaces; the start of a name is enough",
    )
    check.add_argument("--repair", action="store_true", help="repair what can be repaired")
    _json(check)
    check.add_argument(
        "--quiet", action="store_true", help="print faults only, and no progress on the terminal"
    )

    bench = add(
        commands,
        "bench",
        _bench,
        "measure the store on this machine beside its device and memory",
        "Stores, loads and looks up blocks in a directory of its own inside the target, which is "
        "removed in the end, and measures raw reads and writes of the same size, depth and bytes "
        "in turn with it. Leave the machine alone meanwhile.",
    )
    where = bench.add_mutually_exclusive_group()
    where.add_argument(
        "--target",
        metavar="NAME",
        help="a target of the configuration, by default the first usable one",
    )
    where.add_argument("--path", type=Path, metavar="DIR", help="a directory instead of a target")
    bench.add_argument(
        "--size",
        default="256MiB",
        metavar="SIZE",
        help="bytes moved per operation, by default 256MiB; needs twice as much memory and space",
    )
    bench.add_argument(
        "--block-size",
        default="64KiB,256KiB,2MiB",
        metavar="SIZES",
        help="sizes of a block, by default 64KiB,256KiB,2MiB",
    )
    bench.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="jobs that share the blocks, by default one: a single request",
    )
    bench.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="how often everything is measured, by default 9 times; at least 7 without --quick",
    )
    bench.add_argument(
        "--quick", action="store_true", help="only 3 rounds: a first idea, without intervals"
    )
    bench.add_argument(
        "--no-compile",
        action="store_true",
        help="measure with what is there, without compiling kernels first",
    )
    bench.add_argument("--json", action="store_true", help="print a JSON object a line")

    doctor = add(
        commands,
        "doctor",
        _doctor,
        "check this installation and machine",
        "Run it as the user and in the environment of the engine.",
    )
    _json(doctor)
    doctor.add_argument(
        "--fix", action="store_true", help="offer to put right what can be put right"
    )
    _yes(doctor)

    selftest = add(
        commands,
        "selftest",
        _selftest,
        "store and restore through an installed engine's own interface",
        "Run it after every upgrade of the engine, as its user and in its environment. The bytes "
        "are compared, in this process and in another one; the store itself is not touched, and "
        "no GPU is needed. Speed is shown and not judged.",
    )
    selftest.add_argument(
        "engine",
        nargs="?",
        metavar="ENGINE",
        help="which engine: lmcache, mlx, sglang or vllm; needed where several adapters are "
        "installed",
    )
    _json(selftest)
    selftest.add_argument(
        "--keep", action="store_true", help="leave the files that were written, and say where"
    )

    agent = add(
        commands,
        "agent",
        _agent,
        "run the node agent in the foreground",
        "It reclaims space, compiles kernels and serves metrics until it is told to end (SIGTERM "
        "or Ctrl-C). Engines start one by themselves unless agent.autostart is off; this one takes "
        "over from it.",
    )
    agent.add_argument(
        "--stop", action="store_true", help="end the agent of this node and home instead"
    )

    if plugins:
        add_plugin_commands(commands)
        add_missing_commands(commands)
    return parser


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")
