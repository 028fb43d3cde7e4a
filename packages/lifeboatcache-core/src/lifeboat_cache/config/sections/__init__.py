"""The sections of the configuration; :mod:`lifeboat_cache.config.schema` has them all."""
