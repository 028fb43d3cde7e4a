"""Targets that can hang live in a process of their own, one per target: the mover.

A hard mount whose server has gone puts threads where nothing reaches them. So no thread of an
engine ever touches such a target. It talks to the mover instead, over a socket and through
memory of its own, and each job has a deadline there (:mod:`lifeboat_cache.mover.remote_store`).
"""
