"""Names of number formats, which SGLang reads at import and hands to kernels only."""

__all__ = ["ScalarType", "scalar_types"]


class ScalarType:
    """A number format, of which no property is ever asked for on a CPU."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"ScalarType({self.name!r})"


class _ScalarTypes:
    def __getattr__(self, name: str) -> ScalarType:
        if name.startswith("__"):
            raise AttributeError(name)
        found = ScalarType(name)
        setattr(self, name, found)  # the same object each time: SGLang compares and hashes them
        return found


scalar_types = _ScalarTypes()
