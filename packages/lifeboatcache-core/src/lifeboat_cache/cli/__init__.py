"""The ``lifeboat-cache`` command.

Other distributions add subcommands through the entry-point group
``lifeboat_cache.cli``; see :mod:`lifeboat_cache.cli.plugins`.
"""
