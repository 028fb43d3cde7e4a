"""How kernels are declared, and how they come from disk.

A decorator only notes a kernel. Its machine code is made by :func:`compile_into`
or read by :func:`load_from`; a call before that, or with other types than
declared, is an error and never compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import binding
from numba import njit
from numba.core import caching, sigutils
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
from numba.core.types import ExternalFunction

from lifeboat_cache.kernels.cache import UnusableError

__all__ = ["Native", "brief", "compile_into", "helper", "inline", "kernel", "load_from", "native"]

#: No GIL, no checks of indices, no exception on division by zero.
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

_registered: dict[str, _Kernel | Native] = {}


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """The part of a locator that saving asks for."""

    def __init__(self, py_func: Any, directory: Path) -> None:
        self._py_file = py_func.__code__.co_filename
        self._directory = str(directory)

    def get_cache_path(self) -> str:
        return self._directory

    def get_source_stamp(self) -> str:
        # The directory's name covers the sources: times of files, which a
        # reinstallation changes, mean nothing.
        return ""

    def get_disambiguator(self) -> str:
        return ""


class _Files(caching.CompileResultCacheImpl):  # type: ignore[misc]
    """Our names of files, whatever locators numba is configured with."""

    def __init__(self, py_func: Any, directory: Path) -> None:
        self._lineno = py_func.__code__.co_firstlineno
        self._locator = _Locator(py_func, directory)
        self._filename_base = _name_of(py_func)


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """A numba cache in a directory of ours, out of which everything has to come."""

    def __init__(self, py_func: Any, directory: Path) -> None:
        self._name = repr(py_func)
        self._py_func = py_func
        self._impl = _Files(py_func, directory)
        self._cache_path = str(directory)
        self._cache_file = caching.IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )
        self.enable()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None:  # numba would compile it now
            raise UnusableError(
                f"{self._cache_path} has no code for {_name_of(self._py_func)}; remove it"
            )
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        if not self._impl.check_cachable(data):
            raise UnusableError(f"the code of {_name_of(self._py_func)} cannot be kept on disk")
        super().save_overload(sig, data)


def _name_of(py_func: Any) -> str:
    return f"{py_func.__module__.rpartition('.')[2]}.{py_func.__qualname__}"


class _Kernel:
    """A dispatcher and the signatures that it gets."""

    def __init__(
        self, dispatcher: Dispatcher, signatures: tuple[Any, ...], *, nogil: bool = True
    ) -> None:
        self._dispatcher = dispatcher
        self._signatures = signatures
        self._nogil = nogil
        self._loaded = False

    def compile_into(self, directory: Path) -> None:
        dispatcher = self._dispatcher
        if self._loaded:
            # What came from disk cannot be written again, only be made again.
            dispatcher = _dispatcher_of(dispatcher.py_func, nogil=self._nogil)
        cache = _Cache(dispatcher.py_func, directory)
        self._bind(dispatcher, caching.NullCache())
        for signature in self._signatures:
            arguments, _ = sigutils.normalize_signature(signature)
            cache.save_overload(signature, dispatcher.overloads[tuple(arguments)])

    def load_from(self, directory: Path) -> None:
        self._loaded = True
        self._bind(self._dispatcher, _Cache(self._dispatcher.py_func, directory))

    def _bind(self, dispatcher: Dispatcher, cache: Any) -> None:
        dispatcher._cache = cache
        dispatcher._can_compile = True
        try:
            for signature in self._signatures:
                dispatcher.compile(signature)
        finally:
            dispatcher._can_compile = False


def _dispatcher_of(py_func: Callable[..., Any], *, nogil: bool = True) -> Dispatcher:
    dispatcher = njit(**{**_OPTIONS, "nogil": nogil})(py_func)
    # Only we compile, and only what is declared.
    dispatcher._can_compile = False
    return dispatcher


class Native:
    """A kernel that other machine code calls, such as the start routine of a thread."""

    def __init__(self, py_func: Any, signature: Any) -> None:
        self._py_func = py_func
        self._signature = signature
        self._function: CFunc | None = None

    @property
    def address(self) -> int:
        """Where the machine code is.

        Raises
        ------
        UnusableError
            If the kernels are not ready.
        """
        if self._function is None:
            raise UnusableError("the kernels are not ready; call lifeboat_cache.kernels.load()")
        address: int = self._function.address
        return address

    def compile_into(self, directory: Path) -> None:
        """Compile it and save it."""
        made = self._make(_Save(self._py_func, directory))
        self._function = self._function or made

    def load_from(self, directory: Path) -> None:
        """Load it."""
        self._function = self._make(_Cache(self._py_func, directory))

    def _make(self, cache: Any) -> CFunc:
        signature = sigutils.normalize_signature(self._signature)
        function = CFunc(self._py_func, signature, locals={}, options=dict(_OPTIONS))
        function._cache = cache
        function.compile()
        return function


class _Shared(Native):
    """A native kernel that other kernels call, by a symbol that stands for its address."""

    def __init__(self, py_func: Any, signature: Any) -> None:
        super().__init__(py_func, signature)
        self.symbol = f"lifeboat.{_name_of(py_func)}"

    def compile_into(self, directory: Path) -> None:
        super().compile_into(directory)
        binding.add_symbol(self.symbol, self.address)

    def load_from(self, directory: Path) -> None:
        super().load_from(directory)
        binding.add_symbol(self.symbol, self.address)


class _Save(_Cache):
    """A cache into which everything goes, and out of which nothing comes."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        del sig, target_context


def kernel(*signatures: str) -> Callable[[Callable[..., Any]], Any]:
    """A function that Python calls without the GIL, for the given signatures only."""

    def declare(py_func: Callable[..., Any]) -> Any:
        dispatcher = _dispatcher_of(py_func)
        _register(py_func, _Kernel(dispatcher, signatures))
        return dispatcher

    return declare


def brief(*signatures: str) -> Callable[[Callable[..., Any]], Any]:
    """A function that keeps the GIL, for what takes less than a tenth of a millisecond.

    To win the GIL back takes up to 5 ms beside a thread that computes in Python.
    """

    def declare(py_func: Callable[..., Any]) -> Any:
        dispatcher = _dispatcher_of(py_func, nogil=False)
        _register(py_func, _Kernel(dispatcher, signatures, nogil=False))
        return dispatcher

    return declare


def native(signature: str) -> Callable[[Callable[..., Any]], Native]:
    """A function with a C interface and without the GIL; its ``address`` goes to C code."""

    def declare(py_func: Callable[..., Any]) -> Native:
        function = Native(py_func, signature)
        _register(py_func, function)
        return function

    return declare


def shared(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """A part of kernels that is compiled once for all of them; for what is very long.

    Only kernels can call it, and only those that are declared after it.
    """

    def declare(py_func: Callable[..., Any]) -> Any:
        function = _Shared(py_func, signature)
        _register(py_func, function)
        arguments, result = sigutils.normalize_signature(signature)
        return ExternalFunction(function.symbol, result(*arguments))

    return declare


def inline(py_func: Callable[..., Any]) -> Any:
    """A part of kernels, put into them by the compiler; for what runs often."""
    return njit(forceinline=True, **_OPTIONS)(py_func)


def helper(py_func: Callable[..., Any]) -> Any:
    """A part of kernels that the compiler need not put into them; for what is long."""
    return njit(**_OPTIONS)(py_func)


def _register(py_func: Any, declared: _Kernel | Native) -> None:
    # By name: an import that failed half-way and is repeated declares the same kernels again.
    _registered[_name_of(py_func)] = declared


def compile_into(directory: Path) -> None:
    """Compile what is not compiled yet, and save all kernels in a directory."""
    for declared in _registered.values():
        declared.compile_into(directory)


def load_from(directory: Path) -> None:
    """Load all kernels from a directory.

    Raises
    ------
    UnusableError
        If one is not there. Nothing is compiled.
    """
    for declared in _registered.values():
        declared.load_from(directory)
