"""Real servers for tests of remote data: S3, http with ranges, and a proxy between that breaks connections."""
