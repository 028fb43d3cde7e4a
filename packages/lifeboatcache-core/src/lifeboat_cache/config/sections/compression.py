"""In which codecs KV is stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lifeboat_cache.codecs.names import ALIASES, AUTO, CODEC_NAMES, CodecName
from lifeboat_cache.config.nearest import nearest
from lifeboat_cache.config.sections.base import Key, Section
from lifeboat_cache.config.sections.values import to_switch

__all__ = ["Compression", "Rungs"]


def _codec(value: object) -> object:
    names = (*CODEC_NAMES, AUTO)
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not the name of a codec")
    name = ALIASES.get(value, value)
    if name not in names:
        near = nearest(value, (*names, *ALIASES))
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"there is no codec {value!r}{hint}")
    return name


_Codec = Annotated[
    CodecName | Literal["auto"],
    BeforeValidator(_codec),
    Key(
        allowed=f"{', '.join(CODEC_NAMES)} or {AUTO}; turboquant4, turboquant3 and oscar2 stand "
        "for lbq4, lbq3 and lbq2",
        example="fp8",
        restart=False,
    ),
]


class Rungs(Section):
    """The codec of each rung: of a kind of target, by how fast it is.

    For KV of 16 bits or more; 8-bit KV goes by `compression.lossless_8bit`. Recurrent state, and
    what is not known to be KV, is always kept exactly. A copy from one rung to another is coded
    anew, but never in a larger codec than what it is made of.
    """

    local: _Codec = Field(
        default="fp8",
        description="For all targets of this version. `raw`, `lossless` and `dense` (smaller, "
        "slower) are exact. `fp8` takes half the space, `lbq4`, `lbq3` and `lbq2` about 4, 3 and "
        "2 bits per value. `auto`: of `raw`, `lossless`, `dense`, `fp8` and `lbq4` the one that "
        "restores fastest here, measured; `lifeboat-cache status` says which and why.",
    )
    shared: _Codec = Field(
        default="fp8",
        description="For targets of type `nfs` and `ontap`, and tiers with `rung: shared`.",
    )
    archive: _Codec = Field(
        default="fp8",
        description="For tiers with `rung: archive`: the slowest ones.",
    )


class Compression(Section):
    """How KV is stored: exactly, or smaller. What is stored already stays readable."""

    ladder: Rungs
    lossless_8bit: Annotated[
        Literal["on", "remote", "off"],
        BeforeValidator(to_switch),
        Key(allowed="on, remote or off", example="remote", restart=False),
    ] = Field(
        default="remote",
        description="Where 8-bit KV is compressed, without loss: on every rung (`on`), on rungs "
        "slower than `local` (`remote`), or nowhere (`off`). Otherwise it "
        "is stored as it is.",
    )
