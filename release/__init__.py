"""Build and release tools: the matrix, and everything that reads it. Not installed with the package."""
