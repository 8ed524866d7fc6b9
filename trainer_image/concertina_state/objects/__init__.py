"""Objects in a store named by a URI: S3, other clouds, folders."""
