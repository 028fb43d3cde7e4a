"""Storage targets: where segments and journals live."""
