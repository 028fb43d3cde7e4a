"""The dashboard: pages that show what all engines of a home directory do.

It reads what processes publish below the home directory and runs in none of them: as a child of
the agent, or alone with ``lifeboat-cache dashboard``. Nothing is imported here, for the
command line loads a module of this package at every call.
"""
