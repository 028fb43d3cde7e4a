"""The version of ``lifeboatcache-core``.

A plain module, so that core also imports from a source tree that carries no
installed metadata. The build reads the number from here.
"""

__version__ = "0.1.0"
