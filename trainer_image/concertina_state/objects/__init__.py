"""Objects in a store that a URI names: S3, other clouds, folders."""
