"""The entry of the ``lifeboat-cache`` command."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from lifeboat_cache.cli.parser import PROGRAM, build_parser
from lifeboat_cache.errors import LifeboatError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lifeboat-cache``.

    Parameters
    ----------
    argv
        The arguments, by default those of the process.

    Returns
    -------
    int
        The exit code; see :data:`lifeboat_cache.cli.parser.EXIT_CODES`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model's name must not end the command on a terminal that cannot show it.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(argv)
        # Here, so that a reader that went away is noticed here.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes again at exit, which must have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except LifeboatError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:
        # argparse has said what there is to say: help, version or wrong usage.
        return end.code if isinstance(end.code, int) else 2
    func = getattr(args, "func", None)
    if func is None:
        return _fail("this command does nothing: its distribution sets no function for it")
    code: int = func(args)
    return code


def _fail(message: str) -> int:
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
