"""On-disk format 1: segments, journals, dead bitmaps, access logs.

``docs/format.md`` describes every field. Golden files in the tests pin the
bytes: a change that alters them is a new format, not an edit of this one.
"""
