"""Tables of 64-bit words that Python fills in and the native I/O threads read."""

from __future__ import annotations

# The words of a task (`lifeboat_cache.store.io_task`).
TASK_OP = 0
TASK_RUNS = 1
TASK_RUN_TABLE = 2
TASK_STARTS = 3
TASK_IOV = 4
TASK_OFFSETS = 5
TASK_LENGTHS = 6
TASK_BINDINGS = 7
TASK_CHECKSUMS = 8
TASK_OUTCOMES = 9
TASK_CHUNK = 10
TASK_ERRNO = 11
#: Rows of the tensors of a block with their coders (``codec_layout.py``) and how many they
#: are; 0: blocks are stored as they are.
TASK_ROWS = 12
TASK_ROW_COUNT = 13
#: For each tensor, in which piece of its block it lies and where it begins there.
TASK_WHICH = 14
TASK_WITHIN = 15
#: Of ``OP_ENCODE``: where stored blocks go, the place of each there, and their lengths.
TASK_STAGING = 16
TASK_PLACES = 17
TASK_SIZES = 18
#: Filled in by the thread: ends of its pipe with turns (``THREAD_TURNS``), -1 for none, and an
#: address with room for one.
TASK_TURN_IN = 19
TASK_TURN_OUT = 20
TASK_TURN = 21
TASK_WORDS = 24

#: Values of ``TASK_OP``.
OP_LOAD = 1
OP_STORE = 2
#: Store blocks in memory, to learn how long they are.
OP_ENCODE = 3

#: Columns of a run: descriptor, mode, first block, number of blocks; and a descriptor to read
#: first what the page cache holds, or -1.
RUN_COLUMNS = 5

#: Mode of a run whose pieces go straight between the caller's memory and the file.
SCATTER = 0
#: Mode of a run that goes through an aligned buffer, because O_DIRECT does not take
#: the caller's addresses or lengths.
BOUNCE = 1

#: One system call carries about this much: enough for a device …
DIRECT_CHUNK_BYTES = 4 << 20
#: … and what is copied from memory stays in the cache until it is hashed.
CACHED_CHUNK_BYTES = 512 << 10

#: Bytes of a thread's aligned buffer: so long may a block be that goes through a coder
#: there. It takes memory only as far as it is used …
SCRATCH_BYTES = 16 << 20
#: … and blocks that are stored as they are use so much of it.
BOUNCE_BYTES = 4 << 20

# The words that an I/O thread starts with.
#: Reading ends of the pipes that tasks come from, without blocking. Loads first.
THREAD_LOADS = 0
THREAD_STORES = 1
#: Writing ends of the pipes that finished tasks go to.
THREAD_LOADS_DONE = 2
THREAD_STORES_DONE = 3
#: How many of the two lanes the thread serves.
THREAD_LANES = 4
#: Address and bytes of the thread's aligned buffer.
THREAD_SCRATCH = 5
THREAD_ROOM = 6
#: Address of the pool's flags: word 0 is not 0 when tasks are to be cancelled.
THREAD_FLAGS = 7
#: Room for a task's address on its way in and out, two ``struct pollfd``, a checksum.
THREAD_TAKEN = 8
THREAD_ANSWER = 9
THREAD_POLL = 10
THREAD_SUMS = 12
#: Address of the coders' working memory.
THREAD_WORK = 14
#: Pipes with a byte for each thread that may compute at a time: reading and writing end of that
#: of loads, and of that of stores.
THREAD_TURNS = 16
#: Room for such a byte.
THREAD_TURN = 20
THREAD_WORDS = 21
