"""The constants of XXH3 with its default secret and seed 0."""

from __future__ import annotations

__all__ = ["INITIAL", "PRIME32_1", "SECRET", "WORDS"]

#: The default secret (192 bytes).
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)

#: The little-endian 64-bit word at every offset of the secret, 0 to 184.
WORDS = tuple(int.from_bytes(SECRET[at : at + 8], "little") for at in range(185))

PRIME32_1 = 0x9E3779B1

#: What the eight lanes begin with.
INITIAL = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)
