"""An object store that speaks S3 as a storage target."""
