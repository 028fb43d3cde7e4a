"""Real faults for tests: disks that fill, fail and hang, processes that are killed."""
