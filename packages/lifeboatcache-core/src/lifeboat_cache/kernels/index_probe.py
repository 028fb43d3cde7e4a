"""The loops of the index, in plain Python; ``kernels/index.py`` compiles them.

Both forms work on the same memory: numpy arrays when compiled, memoryviews of them
otherwise. All arrays are flat.

- ``rows``: int64, 16 per record: its journal entry, whose last word is not the checksum
  but, as in ``small``, writer and time of last use. ``small`` is the same memory as
  uint32, 32 per record; the kind of an entry says there what the row is.
- ``links``: int32, one per record: the row of the next record of the same key plus 1, or
  0. Free rows are linked in the same way.
- ``table`` and ``old``: int64 cells of an open-addressing table with linear probing: 31
  bits of the key (the tag, whose low bits also say where probing begins) above the row
  plus 1; 0 is empty, -1 was emptied. Its length is a power of two. While a table is being
  replaced, cells are copied from ``old``, which may be empty otherwise; a key is looked up
  in both, and what changes is changed in both.
- ``buried``: uint32, 3 per place declared dead: writer plus 1 (0 is empty), segment, slot.
- ``state``: int64, see the constants.

Integers are chosen so that both forms agree: nothing but sums of hashes exceeds 63 bits,
and only the low bits of those are used.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BURIED",
    "FREE",
    "FRESH",
    "LIVE",
    "OCCUPIED",
    "RECORDS",
    "STATE_WORDS",
    "bury_all",
    "drop",
    "find",
    "gather",
    "insert",
    "is_buried",
    "locate",
    "migrate",
    "probe",
    "raise_used",
    "select",
    "touch",
    "unlink",
]

# Words of the state.
#: Keys that have a record.
LIVE = 0
#: Cells of the table that are not empty, those that were emptied included.
OCCUPIED = 1
#: First free row plus 1, or 0.
FREE = 2
#: Rows used so far; those behind were never used.
FRESH = 3
#: Records, those in reserve included.
RECORDS = 4
#: Places in ``buried``.
BURIED = 5
STATE_WORDS = 6

#: What a row is (where an entry has its kind); a free row has 0 there.
_ANSWERS = 1
_SPARE = 2

_TOMBSTONE = 2
_TAG = 0x7FFFFFFF
_LOW = 0xFFFFFFFF

# Hash factors: odd, otherwise arbitrary.
_BY_SLOT = 0x9E3779B1
_BY_SEGMENT = 0x85EBCA6B
_BY_WRITER = 0xC2B2AE35


def probe(keys: Any, at: int, tag: int, cells: Any, rows: Any) -> int:
    """Row of the key at ``keys[at:at + 4]``, or -1."""
    mask = len(cells) - 1
    if mask < 0:
        return -1
    where = tag & mask
    while True:
        cell = cells[where]
        if cell == 0:
            return -1
        if cell >> 32 == tag:
            row = (cell & _LOW) - 1
            base = 16 * row
            if (
                rows[base] == keys[at]
                and rows[base + 1] == keys[at + 1]
                and rows[base + 2] == keys[at + 2]
                and rows[base + 3] == keys[at + 3]
            ):
                return int(row)
        where = (where + 1) & mask


def locate(cells: Any, tag: int, row: int) -> int:
    """Which cell holds a row, or -1."""
    mask = len(cells) - 1
    if mask < 0:
        return -1
    wanted = (tag << 32) | (row + 1)
    where = tag & mask
    while True:
        cell = cells[where]
        if cell == wanted:
            return where
        if cell == 0:
            return -1
        where = (where + 1) & mask


def is_buried(buried: Any, writer: int, segment: int, slot: int) -> bool:
    """Whether a place was declared dead."""
    mask = len(buried) // 3 - 1
    where = (writer * _BY_WRITER + segment * _BY_SEGMENT + slot * _BY_SLOT) & mask
    while True:
        at = 3 * where
        if buried[at] == 0:
            return False
        if buried[at] == writer + 1 and buried[at + 1] == segment and buried[at + 2] == slot:
            return True
        where = (where + 1) & mask


def bury(buried: Any, writer: int, segment: int, slot: int) -> int:
    """Add a place; there is room. Returns whether it is new, as 0 or 1."""
    mask = len(buried) // 3 - 1
    where = (writer * _BY_WRITER + segment * _BY_SEGMENT + slot * _BY_SLOT) & mask
    while True:
        at = 3 * where
        if buried[at] == 0:
            buried[at] = writer + 1
            buried[at + 1] = segment
            buried[at + 2] = slot
            return 1
        if buried[at] == writer + 1 and buried[at + 1] == segment and buried[at + 2] == slot:
            return 0
        where = (where + 1) & mask


def unlink(
    head: int,
    writer: int,
    segment: int,
    slot: int,
    anywhere: int,
    table: Any,
    old: Any,
    rows: Any,
    small: Any,
    links: Any,
    state: Any,
) -> int:
    """Free the record of a place among those of one key; the next one answers then.

    Unless ``anywhere``, only the record that answers is meant. Returns the row, or -1.
    """
    before = -1
    row = head
    while True:
        base = 32 * row
        if small[base + 29] == slot and small[base + 22] == segment and small[base + 30] == writer:
            break
        following = int(links[row])
        if anywhere == 0 or following == 0:
            return -1
        before = row
        row = following - 1
    following = int(links[row])
    if before >= 0:
        links[before] = following
    else:
        word = rows[16 * row]
        tag = (word ^ (word >> 29)) & _TAG
        where = locate(table, tag, row)
        if following > 0:
            cell = (tag << 32) | following
            if where >= 0:
                table[where] = cell
            where = locate(old, tag, row)
            if where >= 0:
                old[where] = cell
            at = 32 * (following - 1) + 28
            small[at] = (small[at] & 0xFFFF00FF) | (_ANSWERS << 8)
        else:
            if where >= 0:
                table[where] = -1
                mask = len(table) - 1
                if table[(where + 1) & mask] == 0:
                    # Nothing is probed for beyond: this cell, and emptied ones before it,
                    # may be empty again.
                    while table[where] == -1:
                        table[where] = 0
                        state[OCCUPIED] -= 1
                        where = (where - 1) & mask
            where = locate(old, tag, row)
            if where >= 0:
                old[where] = -1
            state[LIVE] -= 1
    small[32 * row + 28] = 0
    links[row] = state[FREE]
    state[FREE] = row + 1
    state[RECORDS] -= 1
    return row


def find(keys: Any, table: Any, old: Any, rows: Any, found: Any) -> None:
    """Row of each key, or -1."""
    for number in range(len(found)):
        at = 4 * number
        word = keys[at]
        tag = (word ^ (word >> 29)) & _TAG
        row = probe(keys, at, tag, table, rows)
        if row < 0 and len(old) > 0:
            row = probe(keys, at, tag, old, rows)
        found[number] = row


def gather(keys: Any, table: Any, old: Any, rows: Any, found: Any, out: Any) -> None:
    """Row of each key, or -1, and a copy of it (16 words)."""
    for number in range(len(found)):
        at = 4 * number
        word = keys[at]
        tag = (word ^ (word >> 29)) & _TAG
        row = probe(keys, at, tag, table, rows)
        if row < 0 and len(old) > 0:
            row = probe(keys, at, tag, old, rows)
        found[number] = row
        if row >= 0:
            for word_number in range(16):
                out[16 * number + word_number] = rows[16 * row + word_number]


def touch(keys: Any, now: int, table: Any, old: Any, rows: Any, small: Any, places: Any) -> int:
    """Set the time of last use where it is earlier.

    Writer, segment and slot of those records go to ``places``, three each; returns how many.
    """
    count = 0
    for number in range(len(keys) // 4):
        at = 4 * number
        word = keys[at]
        tag = (word ^ (word >> 29)) & _TAG
        row = probe(keys, at, tag, table, rows)
        if row < 0 and len(old) > 0:
            row = probe(keys, at, tag, old, rows)
        if row >= 0:
            base = 32 * row
            if small[base + 31] < now:
                small[base + 31] = now
                places[3 * count] = small[base + 30]
                places[3 * count + 1] = small[base + 22]
                places[3 * count + 2] = small[base + 29]
                count += 1
    return count


def insert(
    entries: Any,
    fields: Any,
    writer: int,
    owners: Any,
    table: Any,
    old: Any,
    rows: Any,
    small: Any,
    links: Any,
    state: Any,
    buried: Any,
    buried_before: Any,
    placed: Any,
) -> None:
    """Take in records and tombstones; there is room for all.

    Parameters
    ----------
    entries, fields
        Journal entries as int64 and, the same memory, as uint32.
    writer
        Whose records they are.
    owners
        int64: writer of the record that a tombstone declares dead.
    placed
        int64, filled in: the row of each entry that became a record, or -1.
    """
    for number in range(len(placed)):
        placed[number] = -1
        field = 32 * number
        segment = int(fields[field + 22])
        slot = int(fields[field + 29])
        at = 16 * number
        word = entries[at]
        tag = (word ^ (word >> 29)) & _TAG
        if (fields[field + 28] >> 8) & 0xFF == _TOMBSTONE:
            owner = int(owners[number])
            state[BURIED] += bury(buried, owner, segment, slot)
            head = probe(entries, at, tag, table, rows)
            if head < 0 and len(old) > 0:
                head = probe(entries, at, tag, old, rows)
            if head >= 0:
                unlink(head, owner, segment, slot, 1, table, old, rows, small, links, state)
            continue
        if is_buried(buried, writer, segment, slot):
            continue
        if is_buried(buried_before, writer, segment, slot):
            continue
        head = probe(entries, at, tag, table, rows)
        if head < 0 and len(old) > 0:
            head = probe(entries, at, tag, old, rows)
        last = -1
        if head >= 0:
            row = head
            known = False
            while True:
                base = 32 * row
                if (
                    small[base + 29] == slot
                    and small[base + 22] == segment
                    and small[base + 30] == writer
                ):
                    known = True
                    break
                last = row
                if links[row] == 0:
                    break
                row = int(links[row]) - 1
            if known:
                continue
        free = int(state[FREE])
        if free > 0:
            row = free - 1
            state[FREE] = links[row]
        else:
            row = int(state[FRESH])
            state[FRESH] = row + 1
        for word_number in range(15):
            rows[16 * row + word_number] = entries[at + word_number]
        base = 32 * row
        what = _ANSWERS if head < 0 else _SPARE
        small[base + 28] = (small[base + 28] & 0xFFFF00FF) | (what << 8)
        small[base + 30] = writer
        small[base + 31] = fields[field + 26]
        links[row] = 0
        state[RECORDS] += 1
        placed[number] = row
        if head >= 0:
            links[last] = row + 1
            continue
        mask = len(table) - 1
        where = tag & mask
        while table[where] > 0:
            where = (where + 1) & mask
        if table[where] == 0:
            state[OCCUPIED] += 1
        table[where] = (tag << 32) | (row + 1)
        state[LIVE] += 1


def migrate(old: Any, first: int, stop: int, table: Any, state: Any) -> None:
    """Copy the cells of ``old[first:stop]`` to the table."""
    mask = len(table) - 1
    for at in range(first, stop):
        cell = old[at]
        if cell > 0:
            where = (cell >> 32) & mask
            while table[where] > 0:
                where = (where + 1) & mask
            if table[where] == 0:
                state[OCCUPIED] += 1
            table[where] = cell


def drop(
    keys: Any,
    writers: Any,
    segments: Any,
    slots: Any,
    anywhere: int,
    table: Any,
    old: Any,
    rows: Any,
    small: Any,
    links: Any,
    state: Any,
    dropped: Any,
) -> None:
    """Forget records by key and place (uint32 each); ``dropped`` is their row, or -1."""
    for number in range(len(dropped)):
        at = 4 * number
        word = keys[at]
        tag = (word ^ (word >> 29)) & _TAG
        head = probe(keys, at, tag, table, rows)
        if head < 0 and len(old) > 0:
            head = probe(keys, at, tag, old, rows)
        if head >= 0:
            head = unlink(
                head,
                int(writers[number]),
                int(segments[number]),
                int(slots[number]),
                anywhere,
                table,
                old,
                rows,
                small,
                links,
                state,
            )
        dropped[number] = head


def raise_used(
    numbers: Any, writers: Any, segments: Any, slots: Any, times: Any, small: Any
) -> None:
    """Set the time of last use of rows where it is earlier and they are still of that place."""
    for number in range(len(numbers)):
        base = 32 * int(numbers[number])
        if (
            (small[base + 28] >> 8) & 0xFF != 0
            and small[base + 29] == slots[number]
            and small[base + 22] == segments[number]
            and small[base + 30] == writers[number]
            and small[base + 31] < times[number]
        ):
            small[base + 31] = times[number]


def select(first: int, stop: int, group: int, small: Any, out: Any) -> int:
    """Rows that answer for a key, of one group or (-1) of all; returns how many."""
    count = 0
    for row in range(first, stop):
        base = 32 * row
        if (small[base + 28] >> 8) & 0xFF == _ANSWERS and (
            group < 0 or small[base + 27] & 0xFFFF == group
        ):
            out[count] = row
            count += 1
    return count


def bury_all(source: Any, target: Any) -> None:
    """Copy all places of one set to another that has room."""
    for number in range(len(source) // 3):
        at = 3 * number
        if source[at] != 0:
            bury(target, int(source[at]) - 1, int(source[at + 1]), int(source[at + 2]))
