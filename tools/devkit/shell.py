"""Running other programs, and saying what is going on."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["DevError", "heed_interrupts", "locked", "note", "output_of", "run", "try_run"]

#: Seconds that a command has to end when this one is told to.
_END_S = 90.0


class DevError(RuntimeError):
    """Something that stops the command; the message ends in the remedy."""


def heed_interrupts() -> None:
    """Let SIGINT reach this process and those it starts.

    What a shell runs in the background ignores it, and so would the servers and commands
    that are stopped with it.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def note(message: str) -> None:
    """Tell the person at the terminal what happens now (on stderr)."""
    print(f"[dev] {message}", file=sys.stderr, flush=True)


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    # An interpreter of a private environment must not see the caller's.
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, **(extra or {})}


def try_run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    to_stderr: bool = False,
) -> int:
    """Run a command and return its exit code.

    Parameters
    ----------
    command
        Program and arguments.
    env
        Variables to add.
    cwd
        Directory to run in.
    to_stderr
        Send its standard output to standard error: for set-up, so that
        standard output holds results only.
    """
    sys.stdout.flush()
    with subprocess.Popen(
        [str(part) for part in command],
        env=_environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if to_stderr else None,
    ) as process:
        try:
            return process.wait()
        except BaseException as error:
            # It has servers of its own to stop. Ctrl-C at a terminal has reached it, too.
            if not isinstance(error, KeyboardInterrupt):
                process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            raise


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run a set-up command with its output on stderr.

    Raises
    ------
    DevError
        When it fails.
    """
    code = try_run(command, env=env, cwd=cwd, to_stderr=True)
    if code:
        shown = " ".join(str(part) for part in command)
        msg = f"this command failed with exit code {code}; its output is above: {shown}"
        raise DevError(msg)


def output_of(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Return what a command prints on its standard output.

    Raises
    ------
    DevError
        When it fails.
    """
    done = subprocess.run(
        [str(part) for part in command],
        env=_environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        shown = " ".join(str(part) for part in command)
        msg = f"this command failed with exit code {done.returncode}: {shown}"
        raise DevError(msg)
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, so that two runs do not make the same thing at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"waiting for another run that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
