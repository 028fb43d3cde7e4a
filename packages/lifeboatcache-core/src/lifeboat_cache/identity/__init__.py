"""Fingerprints of models, adapters and what else decides their KV.

Depends on neither an engine nor torch.
"""

from lifeboat_cache.identity.adapter import AdapterIdentity, adapter_files, adapter_identity
from lifeboat_cache.identity.checkpoint_files import (
    CheckpointFiles,
    checkpoint_files,
    unreadable_load_format,
)
from lifeboat_cache.identity.hub_cache import hub_cache_dir, resolve_model_dir
from lifeboat_cache.identity.jsonable import jsonable, qualified_name
from lifeboat_cache.identity.model_config import effective_config, length_matters
from lifeboat_cache.identity.sampling import FingerprintStoppedError
from lifeboat_cache.identity.side_files import (
    PROCESSOR_FILES,
    QUANTIZATION_FILES,
    digest_code,
    digest_files,
)
from lifeboat_cache.identity.stamps import FileStamp, process_start_time, stamp, stamps_of
from lifeboat_cache.identity.weights import WeightsIdentity, weights_identity

__all__ = [
    "PROCESSOR_FILES",
    "QUANTIZATION_FILES",
    "AdapterIdentity",
    "CheckpointFiles",
    "FileStamp",
    "FingerprintStoppedError",
    "WeightsIdentity",
    "adapter_files",
    "adapter_identity",
    "checkpoint_files",
    "digest_code",
    "digest_files",
    "effective_config",
    "hub_cache_dir",
    "jsonable",
    "length_matters",
    "process_start_time",
    "qualified_name",
    "resolve_model_dir",
    "stamp",
    "stamps_of",
    "unreadable_load_format",
    "weights_identity",
]
